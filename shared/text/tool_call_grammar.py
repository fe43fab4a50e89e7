"""Grammars of tool calls, in each format that models write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.text.delimiters import CALL, CALL_END, FUNCTION_END, PARAMETER_END, PYTHON_TAG
from shared.text.grammar import InvalidGrammarError, literal, schema_rule, serialized
from shared.text.json_schema_refs import UnsupportedKeyword, resolve_ref, standalone, unquoted

TEXT = r"/(.|\n)*/"
_ELEMENT_TEXT = [
    rf"element_text[suffix={literal(PARAMETER_END)}]: {TEXT}",
    r'any_parameter: "<parameter=" /[^<>\n]+/ ">\n" element_text "\n"',
]
"""Unquoted text: everything up to the first end of a parameter."""
_BARE_TEXT = r"BARE_TEXT: /[^{\s](.|\n)*/ & ~/<\|python_tag\|>\s*\{(.|\n)*/"
"""Text that does not begin like a call, for formats whose calls are the whole output."""


@dataclass(frozen=True, kw_only=True)
class CallableFunction:
    """Function that may be called.

    Attributes:
      schema: JSON schema of the arguments; None: any object.
    """

    name: str
    schema: dict[str, Any] | None


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the argument schema of a constrained call; without parameters it allows none."""
    return parameters or {"properties": {}, "additionalProperties": False}


def grammar_of(
    style: str,
    tools: Sequence[CallableFunction],
    *,
    many: bool,
    free: str | None,
    answer: str | None,
) -> str:
    """Builds the grammar of an output with tool calls.

    Args:
      style: A name of `STYLES`.
      tools: Functions that may be called.
      many: Several calls may follow one another.
      free: "text": any text is allowed next to calls. "answer": the output follows `answer`
        instead of calling. None: a call is required.
      answer: Grammar of an output without calls.

    Raises:
      GrammarRefused: A schema is too large, or has a keyword that the format cannot enforce.
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
    """Returns the start rule of outputs that may be text; text that begins like a call is one."""
    if style not in _TAGGED:
        return "calls | BARE_TEXT |", [_BARE_TEXT]
    lead_rules = [f"text: {TEXT}", f"lead[suffix={literal(CALL)}]: {TEXT}"]
    lead_rules.append("spoken: lead inner")
    return ("spoken* text" if many else "spoken text | text"), lead_rules


def _call(body: str) -> list[str]:
    """Returns the rules of a call between tags."""
    return [
        f"call: {literal(CALL)} inner",
        f"inner: {literal(chr(10))} ({body}) {literal(chr(10) + CALL_END)}",
    ]


def _functions(tools: Sequence[CallableFunction], key: str) -> Iterator[str]:
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        yield f"f_{number}: {literal(head)} a_{number} {literal('}')}"
        yield schema_rule(f"a_{number}", _object_schema(tool))


def _any(prefix: str, tools: Sequence[CallableFunction]) -> str:
    return " | ".join(f"{prefix}_{number}" for number in range(len(tools)))


def _tagged(tools: Sequence[CallableFunction]) -> list[str]:
    """Returns rules of `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""
    return [*_call(_any("f", tools)), *_functions(tools, "arguments")]


def _bare(tools: Sequence[CallableFunction]) -> list[str]:
    """Returns rules of `{"name": ..., "parameters": ...}` after an optional tag."""
    return [f"call: {_any('f', tools)}", *_functions(tools, "parameters")]


def _elements(tools: Sequence[CallableFunction]) -> list[str]:
    """Returns rules of `<function=NAME><parameter=KEY>...</parameter></function>` in a call."""
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
    """Returns the parts within a call of a function, and their rules."""
    whole = resolve_ref(schema, schema)
    if "properties" not in whole:
        raise InvalidGrammarError(
            f"the function {name} has no properties, which this tool call format requires"
        )
    parts, rules = [], []
    for place, (key, value) in enumerate(whole["properties"].items()):
        rule = f"p_{number}_{place}"
        try:
            rules += _parameter(rule, key, value, schema)
        except UnsupportedKeyword as error:
            reason = f"{error} of {key} of the function {name} is not supported in this tool call"
            raise InvalidGrammarError(f"{reason} format") from error
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


def _object_schema(tool: CallableFunction) -> dict[str, Any]:
    schema = {} if tool.schema is None else tool.schema
    if schema.get("type", "object") != "object":
        raise InvalidGrammarError(f"the parameters of the function {tool.name} must be an object")
    return {**schema, "type": "object"}


_TAGGED = ("hermes", "qwen", "qwen3_coder")
STYLES: Mapping[str, Any] = {
    "hermes": _tagged,
    "qwen": _tagged,
    "qwen3_coder": _elements,
    "llama3": _bare,
}
