"""Interface of a tool-call format, implemented by one module for each format."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.text.grammar_source import InvalidGrammarError
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, ReadCall, TextCursor


@dataclass(frozen=True, kw_only=True)
class CallableFunction:
    """Function that may be called.

    Attributes:
      schema: JSON schema of the arguments; None: any object.
      pattern: Regular expression of the whole text of the only argument; None: any value.
    """

    name: str
    schema: dict[str, Any] | None
    pattern: str | None = None


Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""

Rules = Callable[[Sequence[CallableFunction], bool], list[str]]
"""Returns the Lark rules of calls; the second argument is True if several calls are allowed."""


def new_call_id() -> str:
    """Returns an id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """Format of tool calls.

    A parser receives one character at a time, so its output does not depend on chunk borders. It
    emits output as soon as it is certain. Text that turns out to be no call is content.

    JSON arguments are streamed once the name and their start are read. If such a call breaks off
    later, the arguments end there and the rest is text. Other arguments are emitted when the call
    is complete, because they are JSON only then; if it breaks off, all of it is text.

    Attributes:
      name: Value of `--tool-call-parser`.
      description: Form of a call, for documentation and startup messages.
      markers: Texts of every chat template that writes or describes the format.
      openings: Tags that begin calls; empty if the calls are the whole output.
      loose_openings: Tags that begin a call as well, unless a grammar constrains the calls.
      marks: Delimiters that a tokenizer may have as special tokens and the parser reads.
      read_calls: Parses the calls after an opening tag, or at the beginning of the output.
      rules: Rules of `inner`, the text after an opening tag, or of `calls`, the whole output.
      separator: Expression of the text between two openings; None: one opening has all calls.
      other_text: Rule `other_text` of text that does not begin like a call, for formats without a
        tag.
      write: Returns the text of calls as the model writes it.
      new_id: Returns an id for a call; some chat templates require a form.
    """

    name: str
    description: str
    markers: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    loose_openings: tuple[str, ...] = ()
    marks: tuple[str, ...]
    read_calls: ReadCall
    rules: Rules
    separator: str | None = None
    other_text: str = ""
    write: Callable[[Sequence[Call]], str]
    new_id: Callable[[], str] = new_call_id

    def read(self, source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
        """Parses the content of an output."""
        if not self.openings:
            yield from self.read_calls(source, output, "")
            yield from source.rest(output)
            return
        openings = self.openings
        if not output.are_calls_constrained:
            openings += self.loose_openings
        tags = output.content_tags
        while lead := (yield from source.up_to((*openings, *tags), output)):
            if lead.endswith(tags):
                continue
            if not (yield from self.read_calls(source, output, lead)):
                output.note_malformed()


def to_json(value: Any) -> str:
    """Returns JSON with the separators of `tojson` in chat templates."""
    return json.dumps(value, ensure_ascii=False)


def object_schema(tool: CallableFunction) -> dict[str, Any]:
    """Returns the schema of a function's arguments.

    Raises:
      InvalidGrammarError: The schema does not describe an object, or the function has a pattern.
    """
    schema = {} if tool.schema is None else tool.schema
    if schema.get("type", "object") != "object":
        raise InvalidGrammarError(f"the parameters of the function {tool.name} must be an object")
    if tool.pattern is not None:
        reason = f"the grammar of the tool {tool.name} is not supported in this tool call format"
        raise InvalidGrammarError(f"{reason}; send the tool with the format text")
    return {**schema, "type": "object"}


def any_of(prefix: str, tools: Sequence[CallableFunction]) -> str:
    """Returns the alternatives of numbered rules, one for each function."""
    return " | ".join(f"{prefix}_{number}" for number in range(len(tools)))
