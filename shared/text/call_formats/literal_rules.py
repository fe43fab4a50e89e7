"""Rules of values that are not written as JSON, such as Python's literals, by a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.text.grammar_source import InvalidGrammarError, json_body, literal
from shared.text.json_schema_refs import NOTES, resolve_ref

MAX_DEPTH = 32
_COMMON = {"type", "$defs", "definitions", *NOTES}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS = {
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": {"items"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Keywords that a rule enforces, by type."""

_INTEGER = r"/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?/"
"""Numbers within float64, because a parser converts them."""
_LARGEST = 10**18 - 1
"""Largest magnitude of a number with a bound on one side."""


@dataclass(frozen=True, kw_only=True)
class Notation:
    """Notation of values.

    Attributes:
      constants: Texts of True, False and None.
      string: Rule of any string.
      write_string: Returns the text of a string.
      write_key: Returns the text of a key of an object, with the text between key and value.
      key: Rule of any key, with the text between key and value.
      separator: Text between entries.
      is_sorted: Entries follow the order of their keys, without regard to case.
    """

    constants: Mapping[Any, str]
    string: str
    write_string: Any
    write_key: Any
    key: str
    separator: str
    is_sorted: bool = False

    def write(self, value: Any) -> str:
        """Returns the text of a JSON value."""
        if value is None or isinstance(value, bool):
            return self.constants[value]
        if isinstance(value, str):
            return self.write_string(value)
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.write, value))}]"
        if isinstance(value, dict):
            return f"{{{self.entries(value, self.write_key)}}}"
        return repr(value)

    def entries(self, value: Mapping[str, Any], write_key: Any) -> str:
        """Returns the text of an object's entries, with another notation of their keys."""
        return self.separator.join(write_key(key) + self.write(x) for key, x in self.ordered(value))

    def ordered(self, entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Returns the entries of an object in the order in which they are written."""
        found = list(entries.items())
        return sorted(found, key=lambda entry: entry[0].lower()) if self.is_sorted else found


@dataclass
class LiteralRules:
    """Lark rules of values in a notation.

    Attributes:
      notation: Notation of the values.
      document: Schema in which references are resolved.
      prefix: Beginning of the names of the rules.
      rules: Rules so far.
    """

    notation: Notation
    document: Any
    prefix: str
    rules: list[str] = field(default_factory=list)
    _by_reference: dict[str, str] = field(default_factory=dict)

    def entries(self, schema: dict[str, Any], write_key: Any) -> str:
        """Adds the rules of an object's entries, without brackets; returns the first one.

        Entries follow the notation's order of `properties`; optional ones may be absent.

        Raises:
          InvalidGrammarError: A keyword is not supported.
        """
        self._check(schema, "object")
        required = schema.get("required", [])
        values = [
            (f"{literal(write_key(key))} {self.value(part)}", key in required)
            for key, part in self.notation.ordered(schema.get("properties", {}))
        ]
        first = later = literal("")
        separator = literal(self.notation.separator)
        for text, is_required in reversed(values):
            new_first, new_later = f"{text} {later}", f"{separator} {text} {later}"
            if not is_required:
                new_first, new_later = f"{new_first} | {first}", f"{new_later} | {later}"
            first, later = self._add(new_first), self._add(new_later)
        return first

    def value(self, schema: Any, depth: int = 0) -> str:
        """Adds the rules of a value; returns the name of its rule.

        Raises:
          InvalidGrammarError: A keyword is not supported, or the schema is nested too deeply.
        """
        if depth > MAX_DEPTH:
            raise InvalidGrammarError(f"a schema is nested more than {MAX_DEPTH} deep")
        pointer = schema.get("$ref") if isinstance(schema, dict) else None
        if pointer is None:
            return self._add(self._body(schema, depth))
        if pointer not in self._by_reference:
            name = self._by_reference[pointer] = self._new_name()
            self.rules.append(f"{name}: {self._body(resolve_ref(schema, self.document), depth)}")
        return self._by_reference[pointer]

    def _body(self, schema: Any, depth: int) -> str:
        if schema is True or schema == {}:
            return "any_value"
        if not isinstance(schema, dict):
            raise InvalidGrammarError("a parameter that allows no value is not supported")
        schema = resolve_ref(schema, self.document)
        if "const" in schema or "enum" in schema:
            listed = [schema["const"]] if "const" in schema else schema["enum"]
            return " | ".join(literal(self.notation.write(each)) for each in listed)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                self._check(schema, union)
                return " | ".join(self.value(part, depth + 1) for part in schema[union])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            self._check(schema, "any value")
            return "any_value"
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return " | ".join(self._typed(kind, schema, depth) for kind in kinds)

    def _typed(self, kind: str, schema: dict[str, Any], depth: int) -> str:
        self._check(schema, kind)
        simple = {
            "string": "string_value",
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": f"{self._constant(True)} | {self._constant(False)}",
            "null": self._constant(None),
        }
        if bounds := _BOUNDS & _KEYWORDS.get(kind, set()) & schema.keys():
            limits = {"minimum": -_LARGEST, "maximum": _LARGEST}
            limits |= {key: schema[key] for key in sorted(bounds)}
            return self._add(json_body({"type": kind, **limits}))
        if kind in simple:
            return simple[kind]
        separator = literal(self.notation.separator)
        if kind == "array":
            item = self.value(schema.get("items", {}), depth + 1)
            return f'"[" ({item} ({separator} {item})*)? "]"'
        if kind == "object" and "properties" in schema:
            return f'"{{" {self.entries(schema, self.notation.write_key)} "}}"'
        if kind == "object":
            values = schema.get("additionalProperties", {})
            entry = f"any_key {self.value(values or {}, depth + 1)}"
            return f'"{{" "}}" | "{{" {entry} ({separator} {entry})* "}}"'
        raise InvalidGrammarError(
            f"the type {kind!r:.40} is not supported in this tool call format"
        )

    def _check(self, schema: dict[str, Any], kind: str) -> None:
        known = _COMMON | _KEYWORDS.get(kind, {kind})
        if len(schema.get("type", "")) and isinstance(schema["type"], list):
            known |= {key for each in schema["type"] for key in _KEYWORDS.get(each, ())}
        if unknown := sorted(schema.keys() - known):
            raise InvalidGrammarError(f"{unknown[0]} is not supported in this tool call format")

    def _constant(self, value: bool | None) -> str:
        return literal(self.notation.constants[value])

    def _new_name(self) -> str:
        return f"{self.prefix}_{len(self.rules)}_{len(self._by_reference)}"

    def _add(self, body: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {body}")
        return name


def common_rules(notation: Notation) -> list[str]:
    """Returns the rules of strings, keys and values without a schema."""
    separator = literal(notation.separator)
    constants = " | ".join(map(literal, notation.constants.values()))
    return [
        f"string_value: {notation.string}",
        f"any_key: {notation.key}",
        f"any_value: string_value | {_NUMBER} | {constants} | any_list | any_object",
        f'any_list: "[" (any_value ({separator} any_value)*)? "]"',
        f'any_object: "{{" (any_key any_value ({separator} any_key any_value)*)? "}}"',
    ]
