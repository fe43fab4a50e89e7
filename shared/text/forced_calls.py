"""Grammars of calls of tools, in each of the formats that models write them in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.text.grammar import GrammarRefused, literal, schema_rule, serialized
from shared.text.marks import CALL, CALL_END, FUNCTION_END, PARAMETER_END, PYTHON_TAG
from shared.text.schema_parts import NotKept, merged, standalone, unquoted

TEXT = r"/(.|\n)*/"
_ELEMENT_TEXT = [
    rf"element_text[suffix={literal(PARAMETER_END)}]: {TEXT}",
    r'any_parameter: "<parameter=" /[^<>\n]+/ ">\n" element_text "\n"',
]
"""What a text without quotes is: all up to the first end of a parameter."""
_BARE_TEXT = r"BARE_TEXT: /[^{\s](.|\n)*/ & ~/<\|python_tag\|>\s*\{(.|\n)*/"
"""What is no call of those that are the whole text, and does not begin as one."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that may be called.

    Attributes:
      schema: Of its arguments; None: any object.
    """

    name: str
    schema: dict[str, Any] | None


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """What the arguments of a held call are: what its function says, else none at all."""
    return parameters or {"properties": {}, "additionalProperties": False}


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
        start, lead_rules = _beside_text(style, many)
        rules = [*rules, *lead_rules]
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
    lead_rules = [f"text: {TEXT}", f"lead[suffix={literal(CALL)}]: {TEXT}"]
    lead_rules.append("spoken: lead inner")
    return ("spoken* text" if many else "spoken text | text"), lead_rules


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
        parts = ["any_parameter*"]
        if tool.schema is not None:
            parts, parameter_rules = _parameters(number, tool.name, _object_schema(tool))
            rules += parameter_rules
        begin, end = literal(f"<function={tool.name}>\n"), literal(FUNCTION_END)
        rules.append(f"f_{number}: {begin} {' '.join(parts)} {end}")
    return [*rules, *_ELEMENT_TEXT]


def _parameters(number: int, name: str, schema: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What stands within a call of a function, and its rules."""
    whole = merged(schema, schema)
    if "properties" not in whole:
        raise GrammarRefused(
            f"the function {name} names no properties, which this format of calls needs"
        )
    parts, rules = [], []
    for place, (key, value) in enumerate(whole["properties"].items()):
        rule = f"p_{number}_{place}"
        try:
            rules += _parameter(rule, key, value, schema)
        except NotKept as error:
            reason = f"{error} of {key} of the function {name} cannot be kept in this format"
            raise GrammarRefused(f"{reason} of calls") from error
        parts.append(rule if key in whole.get("required", []) else f"{rule}?")
    return parts, rules


def _parameter(rule: str, key: str, schema: Any, document: dict[str, Any]) -> list[str]:
    begin, allowed = literal(f"<parameter={key}>\n"), unquoted(schema, document)
    if allowed.is_text:
        return [f'{rule}: {begin} element_text "\\n"']
    options, options_rules = list(map(literal, allowed.choices)), []
    if allowed.value is not None:
        options.append(f"v_{rule}")
        options_rules.append(schema_rule(f"v_{rule}", standalone(allowed.value, document)))
    end = literal(f"\n{PARAMETER_END}\n")
    return [f"{rule}: {begin} ({' | '.join(options)}) {end}", *options_rules]


def _object_schema(tool: Tool) -> dict[str, Any]:
    schema = {} if tool.schema is None else tool.schema
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
