"""Messages with tool calls, in the forms that chat templates read.

Templates differ in the type of a call's arguments (an object or its JSON text) and in the content
of a message with calls (some write a call only if the content is None). A template with another
form drops or garbles the call without an error, so the form is found by trial.

Some templates render contents alone, such as those of Granite 3.3 and SmolLM3. They receive calls
as a part of the content, in the format of the tool-call parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

Message = dict[str, Any]
WriteCalls = Callable[[Sequence[tuple[str, dict[str, Any]]]], str]
"""Returns the text of calls, each a name and arguments."""

SHORT_ID = 9


def read_functions(tools: list[Any]) -> list[dict[str, Any]]:
    """Returns the functions of the tools.

    Raises:
      ValueError: A tool has no function with a name.
    """
    for tool in tools:
        match tool:
            case {"function": {"name": str()}}:
                pass
            case _:
                raise ValueError(f"a tool must have a function with a name, got {tool!r:.80}")
    return [tool["function"] for tool in tools]


class Arguments(dict[str, Any]):
    """Arguments of a call: an object whose string is its JSON text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


@dataclass(frozen=True)
class CallForm:
    """Form of messages with calls.

    Attributes:
      ids: Ids of calls: "given"; "short", nine letters and digits, as Mistral's templates require;
        or "named", `functions.NAME:N`, as Kimi K2 writes them, where N counts the calls of the
        conversation. Ids that have the form already are unchanged.
      is_none: Contents that become None: "never", "empty" ones, or "always".
      has_text: Arguments are JSON text rather than an object.
      write: Writes calls into the content, for a template that renders contents alone; None: calls
        are a field of the message.
      is_split: Several calls of a message become messages of one call, each followed by its result,
        for a template that renders one call per message (gpt-oss, Llama 3).
    """

    ids: str
    is_none: str
    has_text: bool
    write: WriteCalls | None = None
    is_split: bool = False

    def of(self, messages: list[Message]) -> list[Message]:
        """Returns messages in this form; one without calls has no `tool_calls`.

        Some templates write an empty list as a turn of calls and drop the content next to it.
        """
        if self.ids != "given":
            messages = list(_with_ids(messages, _named_id if self.ids == "named" else _short_id))
        if self.is_split:
            messages = list(_one_call_each(messages))
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return {name: value for name, value in message.items() if name != "tool_calls"}
        content = message.get("content")
        if self.write is not None:
            return self._written(message, self.write)
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if self.is_none == "always" or (self.is_none == "empty" and is_empty):
            content = None
        return {**message, "content": content, "tool_calls": list(self._calls(message))}

    def _written(self, message: Message, write: WriteCalls) -> Message:
        """Returns a message with its calls at the end of the content."""
        calls = write([_name_and_arguments(call["function"]) for call in message["tool_calls"]])
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        content = message.get("content") or ""
        if isinstance(content, str):
            return {**rest, "content": f"{content}\n{calls}" if content.strip() else calls}
        return {**rest, "content": [*content, {"type": "text", "text": calls}]}

    def _calls(self, message: Message) -> Iterator[dict[str, Any]]:
        for call in message["tool_calls"]:
            function, arguments = call["function"], call["function"].get("arguments")
            if isinstance(arguments, dict):
                arguments = Arguments(arguments)
                arguments = str(arguments) if self.has_text else arguments
            # Some templates write the type, which clients may omit.
            kind = {"type": call.get("type", "function")}
            yield {**call, "function": {**function, "arguments": arguments}, **kind}


def _one_call_each(messages: list[Message]) -> Iterator[Message]:
    """Yields messages with at most one call; the results of several calls follow their own call."""
    place = 0
    while place < len(messages):
        message, calls = messages[place], messages[place].get("tool_calls") or []
        place += 1
        if len(calls) < 2:
            yield message
            continue
        others = (i for i in range(place, len(messages)) if messages[i].get("role") != "tool")
        end = next(others, len(messages))
        results, place = messages[place:end], end
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in own]
            yield from own
        yield from results


def _name_and_arguments(function: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    arguments = function.get("arguments")
    return function["name"], arguments if isinstance(arguments, dict) else {}


def _with_ids(
    messages: list[Message], new_id: Callable[[dict[str, Any], int], str]
) -> Iterator[Message]:
    """Yields messages with new ids of calls and results, made from a call and its number."""
    number, new_ids = 0, dict[Any, str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [new_id(call, number + index) for index, call in enumerate(calls)]
            new_ids |= {call.get("id"): new for call, new in zip(calls, ids, strict=True)}
            named = [{**call, "id": new} for call, new in zip(calls, ids, strict=True)]
            number += len(calls)
            yield {**message, "tool_calls": named}
        elif (old := message.get("tool_call_id")) in new_ids:
            yield {**message, "tool_call_id": new_ids[old]}
        else:
            yield message


def _short_id(call: dict[str, Any], number: int) -> str:
    """Returns nine letters and digits that depend on the id alone, so that prefixes stay equal."""
    old = str(call.get("id") or number)
    is_short = len(old) == SHORT_ID and old.isalnum() and old.isascii()
    return old if is_short else sha256(old.encode()).hexdigest()[:SHORT_ID]


def _named_id(call: dict[str, Any], number: int) -> str:
    """Returns the id of a call, unchanged if it has the function's name already."""
    prefix, old = f"functions.{call['function']['name']}:", str(call.get("id"))
    return old if old.startswith(prefix) else f"{prefix}{number}"


FORMS = tuple(
    CallForm(ids, is_none, has_text)
    for ids in ("given", "short", "named")
    for is_none in ("never", "empty", "always")
    for has_text in (False, True)
)
"""All forms; earlier ones change less of a message."""

_ARGUMENTS = {"probe_key": "probe_value", "probe_list": [True, None]}


def forms_for(
    write: Callable[[list[Message]], str | None], write_calls: WriteCalls | None
) -> list[CallForm]:
    """Returns all forms, beginning with those in which a template writes complete calls.

    Args:
      write: Renders messages; returns None on an error.
      write_calls: Writes calls into the content if the template writes none; None: it may not.
    """
    for contents in (("", "probe_said"), ("",)):
        messages = _probe(contents)
        whole = [form for form in FORMS if _is_whole(write(form.of(messages)), len(contents))]
        if whole:
            others = [form for form in FORMS if form not in whole]
            return _split_if_needed(whole, write) + others
    messages = _probe(("",))
    if write_calls is not None and write(FORMS[0].of(messages)) is not None:  # it drops calls
        form = CallForm("given", "never", has_text=False, write=write_calls)
        if _is_whole(write(form.of(messages)), 1):
            return [form]
    return list(FORMS)


def _split_if_needed(
    forms: list[CallForm], write: Callable[[list[Message]], str | None]
) -> list[CallForm]:
    """Returns forms with one call per message, if only these write both calls of a message."""
    _, first, one, second, two = _probe(("", ""))
    calls = [*first["tool_calls"], *second["tool_calls"]]
    messages = [_probe(("",))[0], {**first, "tool_calls": calls}, one, two]
    split = [replace(form, is_split=True) for form in forms]
    whole = [_is_whole(write(form.of(messages)), 2) for form in (forms[0], split[0])]
    return split if whole == [False, True] else forms


def _probe(contents: tuple[str, ...]) -> list[Message]:
    """Returns a conversation with a call next to each content."""
    messages: list[Message] = [{"role": "user", "content": "probe_question"}]
    for number, content in enumerate(contents):
        call_id = f"call_{number:032}"  # as servers and clients write it
        function = {"name": f"probe_name_{number}", "arguments": _ARGUMENTS}
        call = {"id": call_id, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call_id, "content": f"probe_result_{number}"}
        messages += [{"role": "assistant", "content": content, "tool_calls": [call]}, result]
    return messages


def _is_whole(text: str | None, count: int) -> bool:
    """Returns True if a prompt of `_probe` has every call and result once."""
    if text is None:
        return False
    names = (f"probe_{kind}_{n}" for n in range(count) for kind in ("name", "result"))
    counts = {text.count(word) for word in ("probe_key", "probe_value", "probe_list")}
    is_json = "'probe_key'" not in text  # Python's notation of an object
    return is_json and counts == {count} and all(name in text for name in names)
