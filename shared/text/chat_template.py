"""A checkpoint's chat template: a conversation as the text that its model was trained on."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import meta

from shared.text.left_out import left_out
from shared.text.marks import THINK
from shared.text.template_language import environment, reads_parts
from shared.text.tool_messages import FORMS, CallForm, forms_for
from shared.text.worker import WorkRefused

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the argument that turns reasoning on or off."""

_OWN = ("messages", "tools", "add_generation_prompt")  # what is given to every template


class TemplateFailed(WorkRefused):
    """The chat template did not accept what it was given; the message says why.

    Attributes:
      part: What is at fault: "messages", "tools", "arguments", "continue_final_message" or the name
        of advice.
    """

    def __init__(self, reason: str, part: str = "messages") -> None:
        super().__init__(reason, part)


@dataclass(frozen=True)
class Conversation:
    """What a template writes.

    Attributes:
      messages: As the client wrote them: with `role`, and `content` that is a text or a list of
        parts: of `type` "text" with `text`, or of `type` "image", where a picture stands.
      tools: What the assistant may call, as OpenAI's API describes it.
      arguments: Values of the template's own variables, as of `enable_thinking`.
      advice: Values that are given to a template that reads them: `enable_thinking` or `thinking`,
        a truth value or an object of `type` as Anthropic's API has it, and variables by name, of
        which `reasoning_effort` "none" turns the reasoning off as well.
      add_generation_prompt: The text ends with the beginning of a new answer.
      continue_final_message: The text ends within the last message, which is the assistant's.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A template that Hugging Face's libraries read too.

    It is a program: in its sandbox it reaches nothing of the machine, but it takes the time and the
    memory that it takes. A server renders in `shared.text.template_worker`.

    Args:
      source: The template.
      names: The special tokens that it may write by name.

    Raises:
      jinja2.TemplateError: The source is no template.
    """

    def __init__(self, source: str, names: dict[str, str]) -> None:
        language = environment()
        self._template = language.from_string(source)
        self.source, self.names = source, names
        tree = language.parse(source)
        variables = meta.find_undeclared_variables(tree)
        self._reads_parts = reads_parts(tree)
        self._arguments = variables - {*_OWN, *names}
        self._knows_developers = "developer" in source
        # A template may write calls and what tools answer, and never say which tools there are.
        self._knows_tools = "tools" in variables
        self._knows_tool_messages = "tool" in source

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation that the assistant is to answer.

        A developer is OpenAI's later word for who writes the system message. Most templates do not
        know it and would drop the message in silence, so they get a system message.

        Raises:
          TemplateFailed: The template refuses the messages or would drop a part of what it is given
            in silence, or what it writes is no text.
        """
        self._check(conversation)
        given = {
            "tools": conversation.tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
            **self.names,
            **self._variables(conversation),
        }
        failure = None
        for form in self._forms if any(map(_calls, conversation.messages)) else FORMS[:1]:
            try:
                return self._rendered(conversation, given, form)
            except TemplateFailed as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def unread(self, advice: dict[str, Any]) -> list[str]:
        """The names of what the template does not read of a conversation's `advice`."""
        read = {name for name, _, _ in self._read(advice)}
        if advice.get("reasoning_effort") == "none" and THINK not in self.source:
            read.add("reasoning_effort")  # nothing is left to turn off
        names = [name for name in advice if name not in read]
        parts = [(name, part) for name in read for part in _parts_of(advice.get(name))]
        return names + [f"{name}.{part}" for name, part in parts if part != "type"]

    def _rendered(self, conversation: Conversation, given: dict[str, Any], form: CallForm) -> str:
        """The text of a conversation whose calls have a form; raises as `render`."""
        mark = f"{secrets.token_hex(8)} "  # nobody can have written it
        text = self._write(messages=self._messages(conversation, mark, form), **given)
        prompt = text
        if conversation.continue_final_message:
            prompt = _cut(text, mark, text_of(conversation.messages[-1]))
        if missing := left_out(conversation.messages, conversation.tools, text):
            part, what = missing
            raise TemplateFailed(f"the chat template of the model leaves out {what}", part)
        return prompt

    @cached_property
    def _forms(self) -> list[CallForm]:
        """The forms of messages with calls, in the order in which they are tried."""

        def write(messages: list[dict[str, Any]]) -> str | None:
            try:
                return self._write(messages=messages, add_generation_prompt=True, **self.names)
            except TemplateFailed:
                return None

        return forms_for(write)

    def _messages(
        self, conversation: Conversation, mark: str, form: CallForm
    ) -> list[dict[str, Any]]:
        """The messages as the template reads them; a mark ends one that is to be continued."""
        messages = conversation.messages
        if conversation.continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        if not self._knows_developers:
            messages = [_as_system(message) for message in messages]
        return [form.of(_with_parts(message, self._reads_parts)) for message in messages]

    def _write(self, **given: Any) -> str:
        """What the template writes; raises as `render`."""
        try:
            text = self._template.render(**given)
            text.encode()  # a template can write a half of a character, which no tokenizer takes
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            raise TemplateFailed(f"the chat template failed: {error}") from error
        return text

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """The template's own variables: arguments, and what it reads of advice."""
        given = dict(conversation.arguments)
        for name, variable, value in self._read(conversation.advice):
            if given.setdefault(variable, value) != value:
                is_none = conversation.advice[name] == "none"
                subject = f"{name} none" if is_none else name
                reason = f"and the argument {variable} of the chat template differ; give one"
                raise TemplateFailed(f"{subject} {reason} of them", name)
        return given

    def _read(self, advice: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Names of advice, each with a variable of the template and its value."""
        for name, value in advice.items():
            if name not in _SWITCHES and name in self._arguments:
                yield name, name, value
            turns_on = _turns_on(name, value)
            for switch in _SWITCHES if turns_on is not None else ():
                if switch in self._arguments:
                    yield name, switch, turns_on

    def _check(self, conversation: Conversation) -> None:
        """Refuses what the template does not read, and ends that a text cannot have."""
        for name in conversation.arguments.keys() - self._arguments:
            known = ", ".join(sorted(self._arguments)) or "none"
            reason = f"the chat template has no argument {name!r:.80}; it has {known:.400}"
            raise TemplateFailed(reason, "arguments")
        if not self._knows_tools and conversation.tools:
            raise TemplateFailed("the chat template of the model knows no tools", "tools")
        if not self._knows_tool_messages and any(map(_is_of_tools, conversation.messages)):
            raise TemplateFailed("the chat template of the model knows no messages of tools")
        if conversation.continue_final_message:
            _check_last(conversation)


def _turns_on(name: str, value: Any) -> bool | None:
    """Returns whether advice turns the reasoning on or off; None: neither."""
    if name == "reasoning_effort":
        return False if value == "none" else None
    if name not in _SWITCHES:
        return None
    if isinstance(value, dict):
        return {"enabled": True, "disabled": False}.get(str(value.get("type")))
    return value


def _parts_of(value: Any) -> Iterable[str]:
    return value if isinstance(value, dict) else ()


def _check_last(conversation: Conversation) -> None:
    """Refuses a last message that cannot be continued."""
    last = conversation.messages[-1] if conversation.messages else {"role": ""}
    if conversation.add_generation_prompt:
        reason = "and add_generation_prompt exclude each other"
    elif last["role"] != "assistant":
        reason = "needs a last message of the assistant"
    elif last.get("tool_calls") or last.get("content") is None:
        reason = "needs a last message that has content and no tool_calls"
    else:
        return
    raise TemplateFailed(f"continue_final_message {reason}", "continue_final_message")


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """A message with a mark where its content ends."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    last = {**content[-1], "text": content[-1]["text"] + mark}
    return {**message, "content": [*content[:-1], last]}


def _cut(text: str, mark: str, said: str) -> str:
    """A text up to its mark, without what the template closes the message with.

    Args:
      mark: Ends with a space: where it has lost it, the template strips what it is given.
      said: The end of the message, as the client wrote it.
    """
    end = text.rfind(mark.strip())
    if end < 0 or said.strip() not in text:
        reason = "the chat template does not write the last message as it is"
        raise TemplateFailed(f"{reason}, so it cannot be continued", "continue_final_message")
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()


def _calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _is_of_tools(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" or _calls(message)


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_parts(message: dict[str, Any], are_read: bool) -> dict[str, Any]:
    """A message whose parts, if it has some, are a list where these are read, else a text."""
    if not isinstance(message.get("content"), list):
        return message
    parts = _Parts(message["content"])
    return {**message, "content": parts if are_read else str(parts)}


def text_of(message: dict[str, Any]) -> str:
    """The text that a message's content ends with: all of it, or that of the last part."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else content[-1].get("text", "")


class _Parts(list[Any]):
    """The parts of a message; as a text they are joined by newlines, as vLLM does.

    A template may read the parts of users' messages, and write a system message as a text.
    """

    def __str__(self) -> str:
        if any("text" not in part for part in self):
            reason = "the chat template writes this content as a text, without places for pictures"
            raise TemplateFailed(reason)
        return "\n".join(part["text"] for part in self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)
