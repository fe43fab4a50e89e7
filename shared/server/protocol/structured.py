"""Structured output fields of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from shared.server.protocol.chat_messages import MAX_TOOLS, FunctionName
from shared.server.protocol.fields import Nested, Strict, Text, type_of
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
    """Output format without a schema: any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Strict):
    """JSON schema with its name."""

    name: Annotated[Text, Field(max_length=64)] | None = None
    description: Text | None = None
    schema_: Annotated[Nested, Field(alias="schema")]
    strict: bool | None = None  # ignored: the schema is always enforced


class SchemaFormat(Strict):
    """Output format of JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _kind(value: Any) -> str:
    kind = type_of(value)
    return "<schema>" if kind == "json_schema" else "<plain>"


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(_kind),
]


class StructuredOutputs(Strict):
    """vLLM's structured output field: one of five constraints; `grammar` is Lark or GBNF."""

    json_: Annotated[Nested | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None

    @property
    def form(self) -> OutputFormat:
        """Requested output format.

        Raises:
          ValueError: No constraint is given, or several are.
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
    """Tool choice that requires a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Subset of the request's tools that the output may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> set[str]:
        """Names of the functions that may be called."""
        return {tool.function.name for tool in self.tools}


class AllowedChoice(Strict):
    """Tool choice that restricts calls to a subset of the tools; the prompt lists all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def nested(value: Any) -> Any:
    """Converts a tool choice of the Responses API, which is flat, to the nested form of chat."""
    if not isinstance(value, dict):
        return value
    if "allowed_tools" not in value:
        inner = {key: each for key, each in value.items() if key != "type"}
        value = {"type": value.get("type"), "allowed_tools": inner}
    inner = value["allowed_tools"]
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        return value
    return {**value, "allowed_tools": {**inner, "tools": list(map(named, inner["tools"]))}}


def named(tool: Any) -> Any:
    """Converts a function of the Responses API to the nested form of chat."""
    if isinstance(tool, dict) and tool.keys() == {"type", "name"}:
        return {"type": tool["type"], "function": {"name": tool["name"]}}
    return tool


def choice_kind(value: Any) -> str:
    """Returns the tag of a tool choice."""
    if not isinstance(value, dict):
        return "<word>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, BeforeValidator(named), Tag("<named>")]
    | Annotated[AllowedChoice, BeforeValidator(nested), Tag("<allowed>")],
    Discriminator(choice_kind),
]


def requires_call(choice: ToolChoice | None) -> bool:
    """Returns True if a tool choice requires a call."""
    is_required = isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool) or is_required


def chosen_names(choice: ToolChoice | None) -> set[str] | None:
    """Returns the functions that a tool choice names; None if it names none."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.names
    return {choice.function.name} if isinstance(choice, NamedTool) else None
