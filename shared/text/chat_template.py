"""Chat template of a checkpoint: renders a conversation as the prompt of the model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import meta

from shared.text.call_formats.registry import FORMATS
from shared.text.delimiters import THINK
from shared.text.dropped_content import left_out
from shared.text.jinja_environment import environment, reads_attribute, reads_parts
from shared.text.tool_messages import FORMS, CallForm, forms_for
from shared.text.worker import WorkerError

_SWITCHES = ("enable_thinking", "thinking")
"""Names of the template argument that enables or disables reasoning."""

_OWN = ("messages", "tools", "add_generation_prompt")  # passed to every template


class TemplateError(WorkerError):
    """Error of a chat template; the message contains the reason.

    Attributes:
      part: Faulty part: "messages", "tools", "arguments", "continue_final_message" or the name of
        an entry of `Conversation.advice`.
    """

    def __init__(self, reason: str, part: str = "messages") -> None:
        super().__init__(reason, part)


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template.

    Attributes:
      messages: Messages of the client with `role` and `content`, a string or a list of parts: of
        `type` "text" with `text`, or of `type` "image" as the placeholder of an image.
      tools: Functions that the assistant may call, in OpenAI's format.
      arguments: Values of the template's own variables, such as `enable_thinking`.
      advice: Values for templates that read them, ignored by others: `enable_thinking` or
        `thinking`, a boolean or an object with `type` as in Anthropic's API, and variables by
        name. `reasoning_effort` "none" also disables the reasoning.
      add_generation_prompt: The prompt ends with the beginning of a new assistant message.
      continue_final_message: The prompt ends within the last message, which is the assistant's.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """Chat template in the format of Hugging Face.

    A template is a program. Its sandbox denies access to the machine but does not limit time and
    memory, so a server renders in `shared.text.template_worker`.

    Args:
      source: Jinja source.
      names: Special tokens that the template may write by name.
      call_format: Format in which earlier calls are written into the content if the template drops
        them, a name of `FORMATS`; None: such conversations are errors.

    Raises:
      jinja2.TemplateError: The source is invalid.
    """

    def __init__(self, source: str, names: dict[str, str], call_format: str | None = None) -> None:
        language = environment()
        self._template = language.from_string(source)
        self.source, self.names = source, names
        self._write_calls = None if call_format is None else FORMATS[call_format].write
        tree = language.parse(source)
        variables = meta.find_undeclared_variables(tree)
        self._reads_parts = reads_parts(tree)
        self._reads_thinking = reads_attribute(tree, "thinking")
        self._arguments = variables - {*_OWN, *names}
        self._knows_developers = "developer" in source
        # A template may write calls and results, and never list the tools.
        self._knows_tools = "tools" in variables
        self._knows_tool_messages = "tool" in source

    def render(self, conversation: Conversation) -> str:
        """Renders the prompt of a conversation.

        `developer` is OpenAI's newer role for the system message. Most templates lack it and would
        drop the message without an error, so they receive a system message.

        Raises:
          TemplateFailed: The template raises an error, would drop a part of its input without one,
            or writes invalid Unicode.
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
            except TemplateError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def unread(self, advice: dict[str, Any]) -> list[str]:
        """Returns the names in a conversation's `advice` that the template does not read."""
        read = {name for name, _, _ in self._read(advice)}
        if advice.get("reasoning_effort") == "none" and THINK not in self.source:
            read.add("reasoning_effort")  # the template has no reasoning to disable
        names = [name for name in advice if name not in read]
        parts = [(name, part) for name in read for part in _parts_of(advice.get(name))]
        return names + [f"{name}.{part}" for name, part in parts if part != "type"]

    def _rendered(self, conversation: Conversation, given: dict[str, Any], form: CallForm) -> str:
        """Renders a conversation with calls in a given form; raises as `render`."""
        mark = f"{secrets.token_hex(8)} "  # unguessable, so no message contains it
        text = self._write(messages=self._messages(conversation, mark, form), **given)
        prompt = text
        if conversation.continue_final_message:
            prompt = _cut(text, mark, text_of(conversation.messages[-1]))
        if missing := left_out(conversation.messages, conversation.tools, text):
            part, what = missing
            raise TemplateError(f"the chat template of the model omits {what}", part)
        return prompt

    @cached_property
    def _forms(self) -> list[CallForm]:
        """Forms of messages with calls, in the order of trial."""

        def write(messages: list[dict[str, Any]]) -> str | None:
            try:
                return self._write(messages=messages, add_generation_prompt=True, **self.names)
            except TemplateError:
                return None

        return forms_for(write, self._write_calls)

    def _messages(
        self, conversation: Conversation, mark: str, form: CallForm
    ) -> list[dict[str, Any]]:
        """Returns the messages for the template; a mark ends a message to continue."""
        messages = conversation.messages
        if conversation.continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        if not self._knows_developers:
            messages = [_as_system(message) for message in messages]
        messages = [_with_parts(message, self._reads_parts) for message in messages]
        return form.of(list(map(_with_thinking, messages)) if self._reads_thinking else messages)

    def _write(self, **given: Any) -> str:
        """Renders the template; raises as `render`."""
        try:
            text = self._template.render(**given)
            text.encode()  # a template can write a lone surrogate, which tokenizers reject
        except Exception as error:  # a template is a program: any exception is its error
            raise TemplateError(f"the chat template failed: {error}") from error
        return text

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """Returns the template's own variables: arguments, and the advice that it reads."""
        given = dict(conversation.arguments)
        for name, variable, value in self._read(conversation.advice):
            if given.setdefault(variable, value) != value:
                is_none = conversation.advice[name] == "none"
                subject = f"{name} none" if is_none else name
                reason = f"and the argument {variable} of the chat template differ; give one"
                raise TemplateError(f"{subject} {reason} of them", name)
        return given

    def _read(self, advice: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yields names of advice, each with a variable of the template and its value."""
        for name, value in advice.items():
            if name not in _SWITCHES and name in self._arguments:
                yield name, name, value
            turns_on = _turns_on(name, value)
            for switch in _SWITCHES if turns_on is not None else ():
                if switch in self._arguments:
                    yield name, switch, turns_on

    def _check(self, conversation: Conversation) -> None:
        """Raises for arguments and tools that the template lacks, and for invalid continuations."""
        for name in conversation.arguments.keys() - self._arguments:
            known = ", ".join(sorted(self._arguments)) or "none"
            reason = f"the chat template has no argument {name!r:.80}; it has {known:.400}"
            raise TemplateError(reason, "arguments")
        if not self._knows_tools and conversation.tools:
            raise TemplateError("the chat template of the model does not support tools", "tools")
        if not self._knows_tool_messages and any(map(_is_of_tools, conversation.messages)):
            raise TemplateError("the chat template of the model does not support tool messages")
        if conversation.continue_final_message:
            _check_last(conversation)


def _turns_on(name: str, value: Any) -> bool | None:
    """Returns whether advice enables (True) or disables (False) the reasoning; None: neither."""
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
    """Raises for a last message that cannot be continued."""
    last = conversation.messages[-1] if conversation.messages else {"role": ""}
    if conversation.add_generation_prompt:
        reason = "and add_generation_prompt are mutually exclusive"
    elif last["role"] != "assistant":
        reason = "requires a last message of the assistant"
    elif last.get("tool_calls") or last.get("content") is None:
        reason = "requires a last message with content and without tool_calls"
    else:
        return
    raise TemplateError(f"continue_final_message {reason}", "continue_final_message")


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Returns a message with a mark at the end of its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    last = {**content[-1], "text": content[-1]["text"] + mark}
    return {**message, "content": [*content[:-1], last]}


def _cut(text: str, mark: str, message: str) -> str:
    """Returns a text up to its mark, without the template's end of the message.

    Args:
      text: Rendered prompt.
      mark: Ends with a space. If the text lacks this space, the template strips contents.
      message: End of the message, as the client wrote it.
    """
    end = text.rfind(mark.strip())
    if end < 0 or message.strip() not in text:
        reason = "the chat template does not write the last message unchanged"
        raise TemplateError(f"{reason}, so it cannot be continued", "continue_final_message")
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()


def _calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _is_of_tools(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" or _calls(message)


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_parts(message: dict[str, Any], are_read: bool) -> dict[str, Any]:
    """Returns a message whose parts are a list if the template reads parts, else a string."""
    if not isinstance(message.get("content"), list):
        return message
    parts = _Parts(message["content"])
    return {**message, "content": parts if are_read else str(parts)}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its reasoning in `thinking`, as gpt-oss's template reads it.

    The template renders the text next to a call as reasoning too, and rejects both together.
    """
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought:
        return message
    if message.get("tool_calls") and content:
        return {**message, "thinking": f"{thought}\n\n{content}", "content": ""}
    return {**message, "thinking": thought}


def text_of(message: dict[str, Any]) -> str:
    """Returns the last text of a message: its content, or the text of its last part."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else content[-1].get("text", "")


class _Parts(list[Any]):
    """Parts of a message; as a string they are joined by newlines, as in vLLM.

    A template may read the parts of user messages and write a system message as a string.
    """

    def __str__(self) -> str:
        if any("text" not in part for part in self):
            reason = "the chat template writes this content as a string, without image placeholders"
            raise TemplateError(reason)
        return "\n".join(part["text"] for part in self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)
