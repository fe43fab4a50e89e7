"""Named chat templates of a checkpoint; a conversation selects one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from shared.models.config_fields import Json
from shared.text.chat_template import ChatTemplate, Conversation, TemplateError

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Template of conversations with tools, if a folder has a separate one."""


class ChatTemplates:
    """Templates by name; most folders have only `default`.

    Args:
      sources: Jinja source of each template.
      names: Special tokens that templates may write by name.
      call_format: See `ChatTemplate`.

    Raises:
      ValueError: A source is invalid; one sentence.
    """

    def __init__(
        self, sources: dict[str, str], names: dict[str, str], call_format: str | None = None
    ) -> None:
        self.sources, self.names, self.call_format = sources, names, call_format
        self._templates = {
            name: _parsed(name, sources[name], names, call_format) for name in sources
        }

    def with_call_format(self, call_format: str | None) -> ChatTemplates:
        """Returns the same templates with a format of earlier calls."""
        return ChatTemplates(self.sources, self.names, call_format)

    @classmethod
    def from_folder(cls, folder: Path, config: Json, names: dict[str, str]) -> ChatTemplates | None:
        """Reads the templates of a folder; returns None without any.

        chat_template.jinja is `default` and additional_chat_templates/NAME.jinja is NAME. If either
        exists, the `chat_template` of tokenizer_config.json is ignored, as in transformers. That
        field is a string, which is `default`, or has several templates by name.

        Raises:
          ValueError: A template is invalid; one sentence.
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
        """Reads one template for all conversations from a Jinja file.

        Raises:
          ValueError: The file cannot be read, or is invalid; one sentence.
        """
        try:
            return cls({DEFAULT: path.read_text(encoding="utf-8")}, names)
        except OSError as error:
            raise ValueError(
                f"--chat-template {path} cannot be read: {error.strerror}; give the path of a "
                "Jinja file"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"--chat-template {path} is not a valid Jinja template: {error}"
            ) from error

    @property
    def has_default(self) -> bool:
        """Reports whether a template for conversations without tools exists."""
        return DEFAULT in self._templates

    def render(self, conversation: Conversation) -> str:
        """Renders a conversation; see `ChatTemplate.render`.

        Raises:
          TemplateFailed: See there; or no template fits the conversation.
        """
        return self._of(bool(conversation.tools)).render(conversation)

    def unread(self, advice: dict[str, Any], has_tools: bool) -> list[str]:
        """Returns the advice that a template does not read; see `ChatTemplate.unread`.

        Raises:
          TemplateFailed: No template fits the conversation.
        """
        return self._of(has_tools).unread(advice)

    def _of(self, has_tools: bool) -> ChatTemplate:
        wanted = (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        known = ", ".join(sorted(self._templates))
        reason = f"the model has no chat template {' or '.join(wanted)}; it has {known:.400}"
        raise TemplateError(reason)


def _sources_in(given: Any) -> dict[str, str]:
    """Returns the templates in tokenizer_config.json."""
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    return given if isinstance(given, dict) else {} if given is None else {DEFAULT: given}


def _parsed(name: str, source: str, names: dict[str, str], call_format: str | None) -> ChatTemplate:
    try:
        return ChatTemplate(source, names, call_format)
    except jinja2.TemplateError as error:
        raise ValueError(f"{name}: {error}") from error
