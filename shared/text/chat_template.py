"""A checkpoint's chat template: a conversation as the text that its model was trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jinja2 import meta

from shared.text.marks import THINK
from shared.text.template_language import environment, reads_parts
from shared.text.worker import WorkRefused

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the argument that turns reasoning on or off."""

_OWN = ("messages", "tools", "add_generation_prompt")  # what is given to every template


class TemplateFailed(WorkRefused):
    """The chat template did not accept what it was given; the message says why.

    Attributes:
      part: What is at fault: "messages", "tools", "arguments" or "reasoning_effort".
    """

    def __init__(self, reason: str, part: str = "messages") -> None:
        super().__init__(reason, part)


@dataclass(frozen=True)
class Conversation:
    """What a template writes.

    Attributes:
      messages: As the client wrote them: with `role`, and `content` that is a text or a list of
        parts, each with `type` "text" and `text`.
      tools: What the assistant may call, as OpenAI's API describes it.
      arguments: Values of the template's own variables, as of `enable_thinking`.
      without_reasoning: The model is to answer at once.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    without_reasoning: bool = False


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
        switches = self._switches(conversation)
        messages = conversation.messages
        if not self._knows_developers:
            messages = [_as_system(message) for message in messages]
        messages = [_with_parts(message, self._reads_parts) for message in messages]
        given = {**self.names, **conversation.arguments, **switches}
        return self._write(messages, tools=conversation.tools or None, **given)

    def _write(self, messages: list[dict[str, Any]], **given: Any) -> str:
        """What the template writes; raises as `render`."""
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **given)
            text.encode()  # a template can write a half of a character, which no tokenizer takes
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            raise TemplateFailed(f"the chat template failed: {error}") from error
        return text

    def _switches(self, conversation: Conversation) -> dict[str, bool]:
        """The arguments that turn the reasoning off, where that is asked for."""
        if not conversation.without_reasoning:
            return {}
        names = [name for name in _SWITCHES if name in self._arguments]
        for name in names:
            if conversation.arguments.get(name, False) is not False:
                reason = f"none and the argument {name} of the chat template differ; give one"
                raise TemplateFailed(f"reasoning_effort {reason} of them", "reasoning_effort")
        if not names and THINK in self.source:
            reason = "the chat template has no switch that turns the model's reasoning off"
            raise TemplateFailed(reason, "reasoning_effort")
        return dict.fromkeys(names, False)

    def _check(self, conversation: Conversation) -> None:
        """Refuses what the template does not read."""
        for name in conversation.arguments.keys() - self._arguments:
            known = ", ".join(sorted(self._arguments)) or "none"
            reason = f"the chat template has no argument {name!r:.80}; it has {known:.400}"
            raise TemplateFailed(reason, "arguments")
        if not self._knows_tools and conversation.tools:
            raise TemplateFailed("the chat template of the model knows no tools", "tools")
        if not self._knows_tool_messages and any(map(_is_of_tools, conversation.messages)):
            raise TemplateFailed("the chat template of the model knows no messages of tools")


def _is_of_tools(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_parts(message: dict[str, Any], are_read: bool) -> dict[str, Any]:
    """A message whose parts, if it has some, are a list where these are read, else a text."""
    if not isinstance(message.get("content"), list):
        return message
    parts = _Parts(message["content"])
    return {**message, "content": parts if are_read else str(parts)}


class _Parts(list[Any]):
    """The parts of a message; as a text they are joined by newlines, as vLLM does.

    A template may read the parts of users' messages, and write a system message as a text.
    """

    def __str__(self) -> str:
        return "\n".join(part["text"] for part in self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)
