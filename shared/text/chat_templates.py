"""A checkpoint's chat templates by name, of which a conversation picks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from shared.text.chat_template import ChatTemplate, Conversation, TemplateFailed

DEFAULT = "default"
TOOL_USE = "tool_use"
"""The template of conversations with tools, where a folder has one for them."""


class ChatTemplates:
    """Templates by name; most folders have one alone, `default`.

    Args:
      sources: Of each template.
      names: The special tokens that they may write by name.

    Raises:
      ValueError: A source is no template; one sentence.
    """

    def __init__(self, sources: dict[str, str], names: dict[str, str]) -> None:
        self.sources, self.names = sources, names
        self._templates = {name: _parsed(name, sources[name], names) for name in sources}

    @classmethod
    def from_folder(
        cls, folder: Path, config: dict[str, Any], names: dict[str, str]
    ) -> ChatTemplates | None:
        """Those of a folder; None where it has none.

        chat_template.jinja is `default` and additional_chat_templates/NAME.jinja is NAME. Where
        there is either, the `chat_template` of tokenizer_config.json counts for nothing, as in
        transformers; there it is a text, which is `default`, or has several by name.

        Raises:
          ValueError: One is broken; one sentence.
        """
        paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
        if (path := folder / "chat_template.jinja").is_file():
            paths = {DEFAULT: path} | paths
        try:
            sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
            sources = sources or _sources_in(config.get("chat_template"))
            return cls(sources, names) if sources else None
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the chat template in {folder} cannot be read: {error}") from error

    @classmethod
    def from_file(cls, path: Path, names: dict[str, str]) -> ChatTemplates:
        """One template for all conversations, from a Jinja file.

        Raises:
          ValueError: It cannot be read, or is no template; one sentence.
        """
        try:
            return cls({DEFAULT: path.read_text(encoding="utf-8")}, names)
        except OSError as error:
            raise ValueError(
                f"--chat-template {path} cannot be read: {error.strerror}; give the path of a "
                "Jinja file"
            ) from error
        except ValueError as error:
            raise ValueError(f"--chat-template {path} is no Jinja template: {error}") from error

    @property
    def has_default(self) -> bool:
        """Whether a conversation without tools has a template."""
        return DEFAULT in self._templates

    def render(self, conversation: Conversation) -> str:
        """What the conversation's template writes, see `ChatTemplate.render`.

        Raises:
          TemplateFailed: As there, or there is no template for it.
        """
        return self._of(bool(conversation.tools)).render(conversation)

    def unread(self, advice: dict[str, Any], has_tools: bool) -> list[str]:
        """What the template of a conversation does not read, see `ChatTemplate.unread`.

        Raises:
          TemplateFailed: There is no template for it.
        """
        return self._of(has_tools).unread(advice)

    def _of(self, has_tools: bool) -> ChatTemplate:
        wanted = (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        known = ", ".join(sorted(self._templates))
        reason = f"the model has no chat template {' or '.join(wanted)}; it has {known:.400}"
        raise TemplateFailed(reason)


def _sources_in(given: Any) -> dict[str, str]:
    """The templates that tokenizer_config.json has."""
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    return given if isinstance(given, dict) else {} if given is None else {DEFAULT: given}


def _parsed(name: str, source: str, names: dict[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source, names)
    except jinja2.TemplateError as error:
        raise ValueError(f"{name}: {error}") from error
