"""Tools of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from shared.server.protocol.chat_messages import MAX_NAME_LENGTH, MAX_TOOLS, FunctionName
from shared.server.protocol.fields import Nested, Strict, Text, type_of
from shared.server.protocol.structured import (
    AllowedChoice,
    AllowedTools,
    NamedTool,
    Pattern,
    choice_kind,
    named,
    nested,
)
from shared.text.grammar_worker import OutputFormat
from shared.text.parsing.input_decoder import INPUT

CUSTOM = "custom"


class FunctionTool(Strict):
    """Function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: Nested | None = None
    strict: bool | None = None


class TextInput(Strict):
    """Input format of any text."""

    type: Literal["text"]


class GrammarInput(Strict):
    """Input format of the texts that a grammar matches."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Pattern


def _format_kind(value: Any) -> str:
    return "<grammar>" if type_of(value) == "grammar" else "<text>"


InputFormat = Annotated[
    Annotated[TextInput, Tag("<text>")] | Annotated[GrammarInput, Tag("<grammar>")],
    Discriminator(_format_kind),
]
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


class CustomTool(Strict):
    """Tool with a text as its input, which the model calls as a function with one string."""

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: InputFormat | None = None

    @property
    def input_format(self) -> OutputFormat | None:
        """Constraint of the input; None: any text."""
        if not isinstance(self.format, GrammarInput):
            return None
        return OutputFormat(kind=self.format.syntax, value=self.format.definition)

    @property
    def function(self) -> FunctionTool:
        """Function that the model calls; a grammar is part of its description."""
        given = self.format
        note = None
        if isinstance(given, GrammarInput):
            note = f"The input must match this {_SYNTAXES[given.syntax]}:\n{given.definition}"
        return FunctionTool(
            type="function",
            name=self.name,
            description="\n\n".join(filter(None, (self.description, note))) or None,
            parameters={
                "type": "object",
                "properties": {INPUT: {"type": "string"}},
                "required": [INPUT],
                "additionalProperties": False,
            },
            strict=note is not None,
        )


def join_names(namespace: str, name: str) -> str:
    """Returns the name by which the model calls a function of a namespace."""
    return f"{namespace}.{name}"


def _member_kind(value: Any) -> str:
    return "<custom>" if type_of(value) == CUSTOM else "<function>"


NamespaceMember = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(_member_kind),
]


class NamespaceTool(Strict):
    """Functions and custom tools that share a namespace."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[list[NamespaceMember], Field(min_length=1, max_length=MAX_TOOLS)]

    @field_validator("tools")
    @classmethod
    def _check_names(
        cls, tools: list[NamespaceMember], info: ValidationInfo
    ) -> list[NamespaceMember]:
        for tool in tools:
            if len(joined := join_names(info.data.get("name", ""), tool.name)) > MAX_NAME_LENGTH:
                raise PydanticCustomError(
                    "names",
                    "has the function {name}, which is too long; shorten the names of namespace "
                    "and function to {most} characters together",
                    {"name": joined, "most": MAX_NAME_LENGTH - 1},
                )
        return tools

    @property
    def members(self) -> list[FunctionTool | CustomTool]:
        """Tools under the names by which the model calls them; each has the common description."""
        return [
            tool.model_copy(
                update={
                    "name": join_names(self.name, tool.name),
                    "description": "\n\n".join(filter(None, (self.description, tool.description))),
                }
            )
            for tool in self.tools
        ]


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind in ("namespace", CUSTOM):
        return f"<{kind}>"
    return "<function>" if kind in (None, "function") else "<server>"


def _reject_tool(value: Any) -> Any:
    kind = str(value["type"])[:80]
    is_search = kind == "web_search"
    hint = "turn web search off in the client" if is_search else "send it as a function"
    raise PydanticCustomError(
        "tool",
        "has the type {kind}, and only functions, custom tools and namespaces are supported; "
        "{hint}",
        {"kind": kind, "hint": hint},
    )


_RejectedTool = Annotated[Any, PlainValidator(_reject_tool), WithJsonSchema({"not": {}})]
ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[_RejectedTool, Tag("<server>")],
    Discriminator(_tool_kind),
]


class ChosenTool(NamedTool):
    """Tool choice that requires a call of one function or custom tool."""

    type: Literal["function", "custom"]


class ChosenTools(AllowedTools):
    """Subset of the request's tools that the output may call."""

    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ChosenSubset(AllowedChoice):
    """Tool choice that restricts calls to a subset of the tools; the prompt lists all tools."""

    allowed_tools: ChosenTools


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ChosenTool, BeforeValidator(named), Tag("<named>")]
    | Annotated[ChosenSubset, BeforeValidator(nested), Tag("<allowed>")],
    Discriminator(choice_kind),
]
