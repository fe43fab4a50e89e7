"""Calls whose parameters are written one by one, strings without quotes and other values as JSON.

The text of a value has no type, so the schema of its function converts it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.text.call_formats.call_format import CallableFunction, object_schema, to_json
from shared.text.grammar_source import InvalidGrammarError, literal, schema_rule
from shared.text.json_schema_refs import UnsupportedKeyword, resolve_ref, standalone, unquoted
from shared.text.parsing import arguments as values
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor
from shared.text.parsing.text_schema import ParameterSchemas

MAX_NAME = 256  # characters of a function or a parameter


@dataclass(frozen=True, kw_only=True)
class ParameterTags:
    """Texts around the key and the value of a parameter.

    Attributes:
      begin: Text before the key.
      after_key: Text between key and value.
      before_end: Text between the value and its end.
      end: Closing tag of the value.
      separator: Text after each parameter, which a parser does not require.
      are_lines_optional: Line breaks in these texts are optional.
    """

    begin: str
    after_key: str
    before_end: str = ""
    end: str
    separator: str
    are_lines_optional: bool = False

    def rule(self, text: str) -> str:
        """Returns a part of a Lark rule that matches one of these texts."""
        if not self.are_lines_optional:
            return literal(text)
        parts = [literal(part) for part in text.split("\n")]
        return ' "\\n"? '.join(part for part in parts)


def read_parameters(
    source: TextCursor, output: OutputBuilder, schema: dict[str, Any], tags: ParameterTags
) -> ParserStep[str | None]:
    """Returns the arguments as JSON; None if a parameter is not complete.

    White space between the parts of `after_key` is optional.
    """
    schemas, entries = ParameterSchemas(schema), []
    while (yield from source.expect(tags.begin)):
        key_end, *others = tags.after_key.split("\n")
        key = yield from source.until(key_end, MAX_NAME)
        for other in filter(None, others):
            key = key if key and (yield from source.expect(other)) else None
        text = (yield from _read_value(source, output, tags.end, key, schemas)) if key else None
        if key is None or text is None:
            return None
        entries.append(f"{values.to_json(key)}: {values.argument_json(text, key, schemas)}")
    return f"{{{', '.join(entries)}}}"


def _read_value(
    source: TextCursor, output: OutputBuilder, end: str, key: str, schemas: ParameterSchemas
) -> ParserStep[str | None]:
    """Reads a value; one within the reasoning ends with the reasoning, and is then no value."""
    text = ""
    while char := (yield from source.next()):
        text += char
        if output.is_thinking and text.endswith(output.reasoning_end):
            source.put_back(output.reasoning_end)
            return None
        if char != ">":
            continue
        value = text.removesuffix(end)
        if value != text and (
            not output.are_calls_constrained or values.is_whole(value, key, schemas)
        ):
            return value
    return None


def parameter_rules(tools: Sequence[CallableFunction], tags: ParameterTags) -> list[str]:
    """Returns rules `p_0`, `p_1`, ... of the parameters of each function.

    Raises:
      InvalidGrammarError: A schema has a keyword that the format cannot enforce.
    """
    key = rf"{literal(tags.begin)} /[^<>\n\"]+/ {tags.rule(tags.after_key)}"
    made = [
        rf"value_text[suffix={literal(tags.end)}]: /(.|\n)*/",
        f"any_parameter: {key} value_text {tags.rule(tags.separator)}",
    ]
    for number, tool in enumerate(tools):
        parts = ["any_parameter*"]
        if tool.pattern is not None:
            made.append(_text_parameter(number, tool, tool.pattern, tags))
            parts = [f"p_{number}_0"]
        elif tool.schema is not None:
            parts, rules = _parts(number, tool.name, object_schema(tool), tags)
            made += rules
        made.append(f"p_{number}: {' '.join(parts) or literal('')}")
    return made


def _parts(
    number: int, name: str, schema: dict[str, Any], tags: ParameterTags
) -> tuple[list[str], list[str]]:
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
            rules += _parameter(rule, key, value, schema, tags)
        except UnsupportedKeyword as error:
            reason = f"{error} of {key} of the function {name} is not supported in this tool call"
            raise InvalidGrammarError(f"{reason} format") from error
        parts.append(rule if key in whole.get("required", []) else f"{rule}?")
    return parts, rules


def _parameter(
    rule: str, key: str, schema: Any, document: dict[str, Any], tags: ParameterTags
) -> list[str]:
    begin = f"{literal(tags.begin + key)} {tags.rule(tags.after_key)}"
    separator = tags.rule(tags.separator)
    allowed = unquoted(schema, document)
    if allowed.is_text:
        return [f"{rule}: {begin} value_text {separator}"]
    options, rules = list(map(literal, allowed.choices)), []
    if allowed.value is not None:
        options.append(f"v_{rule}")
        rules.append(schema_rule(f"v_{rule}", standalone(allowed.value, document)))
    end = literal(tags.before_end + tags.end)
    return [f"{rule}: {begin} ({' | '.join(options)}) {end} {separator}", *rules]


def _text_parameter(number: int, tool: CallableFunction, pattern: str, tags: ParameterTags) -> str:
    """Returns the rule of the only parameter, a text that matches the pattern of a function.

    Text and closing tag are one terminal, because a terminal is as long as possible. A parser ends
    the text at the first closing tag, so the text does not contain it.
    """
    assert tool.schema is not None, "a function with a pattern has one argument"
    (key,) = tool.schema["properties"]
    end = re.escape(tags.before_end + tags.end).replace("\\\n", r"\n")
    is_whole = f"/(?:{_in_slashes(pattern)}){_in_slashes(end)}/"
    ends_early = rf"/(.|\n)*{_in_slashes(re.escape(tags.end))}(.|\n)+/"
    begin = f"{literal(tags.begin + key)} {tags.rule(tags.after_key)}"
    rule = f"p_{number}_0: {begin} T_{number} {tags.rule(tags.separator)}"
    return f"{rule}\nT_{number}: {is_whole} & ~{ends_early}"


def _in_slashes(expression: str) -> str:
    """Returns an expression for use between slashes."""
    return re.sub(r"\\(.)|/", lambda found: r"\/" if found[0][-1] == "/" else found[0], expression)


def written_value(value: Any) -> str:
    """Returns the text of a value: a string as it is, other values as JSON."""
    return value if isinstance(value, str) else to_json(value)
