"""Calls whose parameters are written one by one, strings without quotes and other values as JSON.

The text of a value has no type, so the schema of its function converts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
class KindAttribute:
    """Attribute after a key that states the kind of the value.

    Attributes:
      begin, end: Texts around the attribute's value.
      text: Attribute of a string.
      others: Attributes of values in JSON.
    """

    begin: str
    text: str
    others: tuple[str, ...]
    end: str

    def rule(self, is_text: bool) -> str:
        """Returns a part of a Lark rule that matches the attribute."""
        kinds = (self.text,) if is_text else self.others
        return f"({' | '.join(literal(self.begin + kind + self.end) for kind in kinds)})"

    def read(self, source: TextCursor) -> ParserStep[tuple[str | None, bool | None]]:
        """Reads a key and the attribute; returns the key, and True if the value is a string.

        An unknown attribute is None: the schema decides.
        """
        key = yield from source.until(self.begin, MAX_NAME)
        kind = None if key is None else (yield from source.until(self.end, MAX_NAME))
        known = {self.text: True, **dict.fromkeys(self.others, False)}
        return (None, None) if kind is None else (key, known.get(kind))

    def write(self, value: Any) -> str:
        """Returns the attribute of a value; that of JSON is the one named like its type."""
        is_text = isinstance(value, str)
        kind = self.text if is_text else next(filter(_type_of(value).__eq__, self.others), "")
        return f"{self.begin}{kind or self.others[0]}{self.end}"


@dataclass(frozen=True, kw_only=True)
class ParameterTags:
    """Texts around the key and the value of a parameter.

    Attributes:
      begin: Text before the key.
      after_key: Text between key and value, if `kind` is None.
      kind: Attribute between key and value; None: the schema decides on the kind of a value.
      before_end: Text between the value and its end.
      end: Closing tag of the value.
      separator: Text after each parameter, which a parser does not require.
      are_lines_optional: Line breaks in these texts are optional.
    """

    begin: str
    after_key: str = ""
    kind: KindAttribute | None = None
    before_end: str = ""
    end: str
    separator: str
    are_lines_optional: bool = False

    def head_rule(self, is_text: bool) -> str:
        """Returns a part of a Lark rule that matches the text between key and value."""
        return self.rule(self.after_key) if self.kind is None else self.kind.rule(is_text)

    def write(self, key: str, value: Any) -> str:
        """Returns the text of a parameter."""
        head = self.after_key if self.kind is None else self.kind.write(value)
        text = value if isinstance(value, str) else to_json(value)
        return f"{self.begin}{key}{head}{text}{self.before_end}{self.end}{self.separator}"

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
        key, is_text = yield from _read_head(source, tags)
        if not key:
            return None

        def is_whole(text: str, key: str = key, is_text: bool | None = is_text) -> bool:
            if is_text is not None:
                return is_text or values.is_json(text)
            return values.is_whole(text, key, schemas)

        text = yield from _read_value(source, output, tags.end, is_whole)
        if text is None:
            return None
        if is_text or (is_text is False and values.is_json(text)):
            written = values.to_json(text) if is_text else text.strip()
        else:
            written = values.argument_json(text, key, schemas)
        entries.append(f"{values.to_json(key)}: {written}")
    return f"{{{', '.join(entries)}}}"


def _read_head(
    source: TextCursor, tags: ParameterTags
) -> ParserStep[tuple[str | None, bool | None]]:
    """Reads a key and the text up to its value; see `KindAttribute.read`."""
    if tags.kind is not None:
        return (yield from tags.kind.read(source))
    key_end, *others = tags.after_key.split("\n")
    key = yield from source.until(key_end, MAX_NAME)
    for other in filter(None, others):
        key = key if key and (yield from source.expect(other)) else None
    return key, None


def _read_value(
    source: TextCursor, output: OutputBuilder, end: str, is_whole: Callable[[str], bool]
) -> ParserStep[str | None]:
    """Reads a value; one within the reasoning ends with the reasoning, and is then no value.

    A closing tag ends a value of a constrained call only if the value is whole.
    """
    text = ""
    while char := (yield from source.next()):
        text += char
        if output.is_thinking and text.endswith(output.reasoning_end):
            source.put_back(output.reasoning_end)
            return None
        if char != ">":
            continue
        value = text.removesuffix(end)
        if value != text and (not output.are_calls_constrained or is_whole(value)):
            return value
    return None


def parameter_rules(tools: Sequence[CallableFunction], tags: ParameterTags) -> list[str]:
    """Returns rules `p_0`, `p_1`, ... of the parameters of each function.

    Raises:
      InvalidGrammarError: A schema has a keyword that the format cannot enforce.
    """
    key, end = rf"{literal(tags.begin)} /[^<>\n\"]+/", literal(tags.before_end + tags.end)
    value = f"{tags.head_rule(is_text=True)} value_text"
    if tags.kind is not None:
        value = f"({value} | {tags.head_rule(is_text=False)} any_json {end})"
    made = [
        rf"value_text[suffix={literal(tags.end)}]: /(.|\n)*/",
        f"any_parameter: {key} {value} {tags.rule(tags.separator)}",
        *([] if tags.kind is None else [schema_rule("any_json", {})]),
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
    allowed, end = unquoted(schema, document), literal(tags.before_end + tags.end)
    text, options, rules = tags.head_rule(is_text=True), [], []
    if allowed.is_text:
        options.append(f"{text} value_text")
    elif allowed.choices:
        options.append(f"{text} ({' | '.join(map(literal, allowed.choices))}) {end}")
    # Without an attribute, a text may have the form of any JSON.
    if allowed.value is not None and not (allowed.is_text and tags.kind is None):
        options.append(f"{tags.head_rule(is_text=False)} v_{rule} {end}")
        rules.append(schema_rule(f"v_{rule}", standalone(allowed.value, document)))
    begin, separator = literal(tags.begin + key), tags.rule(tags.separator)
    return [f"{rule}: {begin} ({' | '.join(options)}) {separator}", *rules]


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
    begin = f"{literal(tags.begin + key)} {tags.head_rule(is_text=True)}"
    rule = f"p_{number}_0: {begin} T_{number} {tags.rule(tags.separator)}"
    return f"{rule}\nT_{number}: {is_whole} & ~{ends_early}"


def _in_slashes(expression: str) -> str:
    """Returns an expression for use between slashes."""
    return re.sub(r"\\(.)|/", lambda found: r"\/" if found[0][-1] == "/" else found[0], expression)


def _type_of(value: Any) -> str:
    """Returns the name of a value's JSON type."""
    names = {bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")
