"""Grammars of calls of tools, in each of the formats that models write them in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.text.grammar import GrammarRefused, literal, schema_rule, serialized
from shared.text.marks import CALL, CALL_END, FUNCTION_END, PARAMETER_END, PYTHON_TAG

TEXT = r"/(.|\n)*/"
_BARE_TEXT = r"BARE_TEXT: /[^{\s](.|\n)*/ & ~/<\|python_tag\|>\s*\{(.|\n)*/"
"""What is no call of those that are the whole text, and does not begin as one."""

_STRING_KEYS = {"type", "description", "title", "default", "examples", "enum", "const"}
"""What a text that stands without quotes can be held to."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that may be called.

    Attributes:
      schema: Of its arguments; None: any object.
    """

    name: str
    schema: dict[str, Any] | None


def grammar_of(
    style: str, tools: Sequence[Tool], *, many: bool, free: str | None, answer: str | None
) -> str:
    """A grammar of an answer that calls tools.

    Args:
      style: A name of `STYLES`.
      tools: Those that may be called.
      many: Several calls may follow one another.
      free: "text" where the answer may be any text beside its calls, "answer" where it may be of
        another grammar instead of them; None: it must call.
      answer: That other grammar.

    Raises:
      GrammarRefused: A schema asks for what the format cannot be held to, or is too large.
    """
    rules = STYLES[style](tools)
    others: list[dict[str, Any]] = []
    start = "calls"
    if free == "text":
        start, own = _beside_text(style, many)
        rules = [*rules, *own]
    elif free == "answer":
        assert answer is not None
        first, *others = json.loads(answer)["grammars"]
        others = [{**first, "name": "answer"}, *others]
        start = "calls | @answer"
    separator = "MORE" if style in _TAGGED else '";"'
    first = "call" if style in _TAGGED else f"{literal(PYTHON_TAG)}? call"
    calls = f"calls: {first} ({separator} call)*" if many else f"calls: {first}"
    more = [r"MORE: /\n{0,2}/"] if style in _TAGGED and many else []
    lark = "\n".join([f"start: {start}", calls, *more, *rules])
    return serialized([{"lark_grammar": lark}, *others])


def _beside_text(style: str, many: bool) -> tuple[str, list[str]]:
    """The start of answers that may be text: whatever begins as a call is one."""
    if style not in _TAGGED:
        return "calls | BARE_TEXT |", [_BARE_TEXT]
    own = [f"text: {TEXT}", f"lead[suffix={literal(CALL)}]: {TEXT}"]
    own.append("spoken: lead inner")
    return ("spoken* text" if many else "spoken text | text"), own


def _call(body: str) -> list[str]:
    """The rules of a call between tags."""
    return [
        f"call: {literal(CALL)} inner",
        f"inner: {literal(chr(10))} ({body}) {literal(chr(10) + CALL_END)}",
    ]


def _functions(tools: Sequence[Tool], key: str) -> Iterator[str]:
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        yield f"f_{number}: {literal(head)} a_{number} {literal('}')}"
        yield schema_rule(f"a_{number}", _object_schema(tool))


def _any(prefix: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{prefix}_{number}" for number in range(len(tools)))


def _tagged(tools: Sequence[Tool]) -> list[str]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""
    return [*_call(_any("f", tools)), *_functions(tools, "arguments")]


def _bare(tools: Sequence[Tool]) -> list[str]:
    """`{"name": ..., "parameters": ...}`, the whole text but for a tag before it."""
    return [f"call: {_any('f', tools)}", *_functions(tools, "parameters")]


def _elements(tools: Sequence[Tool]) -> list[str]:
    """`<tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call>`."""
    rules = _call(_any("f", tools))
    for number, tool in enumerate(tools):
        schema = _object_schema(tool)
        parts = []
        for place, (key, value) in enumerate(_properties(tool.name, schema)):
            rule = f"p_{number}_{place}"
            rules += _parameter(rule, tool.name, key, value)
            parts.append(rule if key in schema.get("required", []) else f"{rule}?")
        begin, end = literal(f"<function={tool.name}>\n"), literal(FUNCTION_END)
        rules.append(f"f_{number}: {begin} {' '.join(parts)} {end}")
    return rules


def _properties(name: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    if "properties" not in schema:
        raise GrammarRefused(
            f"the function {name} names no properties, which this format of calls needs"
        )
    return list(schema["properties"].items())


def _parameter(rule: str, name: str, key: str, value: Any) -> list[str]:
    begin, end = f"<parameter={key}>\n", f"\n{PARAMETER_END}\n"
    if not (isinstance(value, dict) and value.get("type") == "string"):
        own = f"{rule}: {literal(begin)} v_{rule} {literal(end)}"
        return [own, schema_rule(f"v_{rule}", value if isinstance(value, dict) else {})]
    if unknown := sorted(value.keys() - _STRING_KEYS):
        raise GrammarRefused(
            f"{unknown[0]} of {key} of the function {name} cannot be kept in this format of calls"
        )
    choices = [value["const"]] if "const" in value else value.get("enum")
    if choices is not None:
        options = " | ".join(literal(str(choice)) for choice in choices)
        return [f"{rule}: {literal(begin)} ({options}) {literal(end)}"]
    return [f"{rule}: {literal(begin)} v_{rule}", f"v_{rule}[suffix={literal(end)}]: {TEXT}"]


def _object_schema(tool: Tool) -> dict[str, Any]:
    schema = {"type": "object"} if tool.schema is None else tool.schema
    if schema.get("type", "object") != "object":
        raise GrammarRefused(f"the parameters of the function {tool.name} must be an object")
    return {**schema, "type": "object"}


_TAGGED = ("hermes", "qwen", "qwen3_coder")
STYLES: Mapping[str, Any] = {
    "hermes": _tagged,
    "qwen": _tagged,
    "qwen3_coder": _elements,
    "llama3": _bare,
}
