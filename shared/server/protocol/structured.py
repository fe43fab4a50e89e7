"""Structured output fields of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from shared.server.protocol.chat_messages import MAX_TOOLS, FunctionName
from shared.server.protocol.fields import Nested, Strict, Text
from shared.text.grammar_worker import OutputFormat

MAX_GRAMMAR_LENGTH = 1 << 17
MAX_OPTIONS = 1 << 10
MAX_OPTION_LENGTH = 1 << 12

Pattern = Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Options = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=MAX_OPTION_LENGTH)]],
    Field(min_length=1, max_length=MAX_OPTIONS),
]


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Strict):
    """A schema and what it is called."""

    name: Annotated[Text, Field(max_length=64)] | None = None
    description: Text | None = None
    schema_: Annotated[Nested, Field(alias="schema")]
    strict: bool | None = None  # a text is held to its schema either way


class SchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<schema>" if kind == "json_schema" else "<plain>"


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(_kind),
]


class StructuredOutputs(Strict):
    """vLLM's field, of which one part may be given; a grammar is Lark's or GBNF."""

    json_: Annotated[Nested | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None

    @property
    def form(self) -> OutputFormat:
        """Requested output format.

        Raises:
          ValueError: Nothing is, or several things are.
        """
        schema = {"type": "object"} if self.json_object else None
        asked = [
            OutputFormat(kind=kind, value=value)
            for kind, value in (
                ("schema", self.json_),
                ("schema", schema),
                ("regex", self.regex),
                ("choice", self.choice),
                ("lark", self.grammar),
            )
            if value is not None
        ]
        if len(asked) != 1:
            raise ValueError("must have one of json, json_object, regex, choice and grammar")
        return asked[0]


def form_of(asked: PlainFormat | SchemaFormat) -> OutputFormat | None:
    """Returns the output format of a `response_format`; None for any text."""
    if isinstance(asked, SchemaFormat):
        return OutputFormat(kind="schema", value=asked.json_schema.schema_)
    return (
        OutputFormat(kind="schema", value={"type": "object"})
        if asked.type == "json_object"
        else None
    )


class NamedFunction(Strict):
    """Name of a function."""

    name: FunctionName


class NamedTool(Strict):
    """A call of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Tools of a request of which alone an answer may call some."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> set[str]:
        """The functions that may be called."""
        return {tool.function.name for tool in self.tools}


class AllowedChoice(Strict):
    """Calls of some of the request's tools; all of them stand in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _nested(value: Any) -> Any:
    """A choice as the chat API nests it; the Responses API nests neither tools nor functions."""
    if not isinstance(value, dict):
        return value
    if "allowed_tools" not in value:
        inner = {key: each for key, each in value.items() if key != "type"}
        value = {"type": value.get("type"), "allowed_tools": inner}
    inner = value["allowed_tools"]
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        return value
    return {**value, "allowed_tools": {**inner, "tools": list(map(_named, inner["tools"]))}}


def _named(tool: Any) -> Any:
    """A function as the chat API nests it."""
    if isinstance(tool, dict) and tool.keys() == {"type", "name"}:
        return {"type": tool["type"], "function": {"name": tool["name"]}}
    return tool


def _choice_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "<word>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, BeforeValidator(_named), Tag("<named>")]
    | Annotated[AllowedChoice, BeforeValidator(_nested), Tag("<allowed>")],
    Discriminator(_choice_kind),
]
