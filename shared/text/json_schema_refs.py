"""Parts of a JSON schema: targets of `$ref`, and the values of unquoted text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from shared.text.grammar_source import InvalidGrammarError

MAX_DEPTH = 64
_TOO_DEEP = f"a schema nests references more than {MAX_DEPTH} deep"
NOTES = {"description", "title", "default", "examples", "deprecated", "$comment"}
"""Keywords without a constraint."""

_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OF_VALUES = {"const", "enum", *NOTES}
_OF_TEXTS = {"minLength", "maxLength", "pattern", "format"}


class UnsupportedKeyword(ValueError):
    """Error of a keyword that cannot constrain unquoted text."""


@dataclass(frozen=True, kw_only=True)
class UnquotedValue:
    """Allowed values of a parameter whose strings have no quotes.

    Attributes:
      is_text: Any string is allowed.
      choices: Allowed strings.
      value: Schema of allowed JSON values; None: none.
    """

    is_text: bool
    choices: tuple[str, ...]
    value: Any


def resolve_pointer(document: Any, pointer: str) -> Any:
    """Returns the target of a pointer such as `#/$defs/A` in a document.

    Raises:
      GrammarRefused: The target does not exist.
    """
    part = document
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and step in part:
            part = part[step]
        elif isinstance(part, list) and _is_index(step) and int(step) < len(part):
            part = part[int(step)]
        else:
            raise InvalidGrammarError(f"{pointer:.100} does not exist in its schema")
    return part


def _is_index(step: str) -> bool:
    return step.isdecimal() and len(step) < 10  # int() raises for thousands of digits


def standalone(schema: Any, document: Any) -> dict[str, Any]:
    """Returns a part of a document as a document of its own, with the targets of its pointers."""
    numbers: dict[str, int] = {}
    targets: dict[str, Any] = {}

    def move(part: Any) -> Any:
        if isinstance(part, list):
            return [move(each) for each in part]
        if not isinstance(part, dict):
            return part
        moved = {key: move_of(key, value) for key, value in part.items()}
        if _points_within(part):
            moved["$ref"] = place(part["$ref"])
        return moved

    def move_of(key: str, value: Any) -> Any:
        if key in _OF_NAMES and isinstance(value, dict):
            return {name: move(each) for name, each in value.items()}
        return value if key in _OF_VALUES else move(value)

    def place(pointer: str) -> str:
        if pointer not in numbers:
            number = numbers[pointer] = len(numbers)
            targets[str(number)] = move(resolve_pointer(document, pointer))
        return f"#/$defs/{numbers[pointer]}"

    moved = move(schema)
    return {**moved, "$defs": targets} if targets else moved


def resolve_ref(schema: Any, document: Any) -> Any:
    """Replaces the `$ref` of a schema, or the only part of its `allOf`, by its target.

    Raises:
      GrammarRefused: References are circular, or a target does not exist.
      NotKept: Both sides constrain a string by the same keyword.
    """
    for _ in range(MAX_DEPTH):
        if _points_within(schema):
            key, part = "$ref", resolve_pointer(document, schema["$ref"])
        elif isinstance(schema, dict) and len(schema.get("allOf", ())) == 1:
            key, part = "allOf", schema["allOf"][0]
        else:
            return schema
        rest = {name: value for name, value in schema.items() if name != key}
        if not isinstance(part, dict):
            part = {} if part else {"not": {}}
        twice = {name for name in part.keys() & rest.keys() if part[name] != rest[name]} - NOTES
        if twice and "string" in (part.get("type"), rest.get("type")):
            raise UnsupportedKeyword(min(twice))
        if twice:  # JSON: the grammar applies both
            return schema
        schema = {**part, **rest}
    raise InvalidGrammarError(_TOO_DEEP)


def unquoted(schema: Any, document: Any, depth: int = 0) -> UnquotedValue:
    """Returns the allowed values of a schema whose strings have no quotes.

    Raises:
      GrammarRefused, NotKept: As in `resolve_ref`; or a keyword cannot constrain unquoted text.
    """
    if depth > MAX_DEPTH:
        raise InvalidGrammarError(_TOO_DEEP)
    schema = resolve_ref(schema, document)
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    kind = schema.get("type")
    constraints = schema.keys() - NOTES
    union = next((key for key in ("anyOf", "oneOf") if constraints == {key}), None)
    if isinstance(kind, list):
        union, parts = "anyOf", [{**schema, "type": each} for each in kind]
    elif union is not None:
        parts = schema[union]
    else:
        return _leaf(schema, kind, constraints)
    read = [unquoted(part, document, depth + 1) for part in parts]
    values = [each.value for each in read if each.value is not None]
    choices = tuple(choice for each in read for choice in each.choices)
    is_text = any(each.is_text for each in read)
    if not (is_text or choices):
        return UnquotedValue(is_text=False, choices=(), value=schema)
    return UnquotedValue(
        is_text=is_text, choices=choices, value={union: values} if values else None
    )


def _leaf(schema: dict[str, Any], kind: Any, constraints: set[str]) -> UnquotedValue:
    if kind not in (None, "string"):
        return UnquotedValue(is_text=False, choices=(), value=schema)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    lasting = constraints - {"type", "const", "enum"}
    if unknown := sorted(lasting if kind == "string" else lasting & _OF_TEXTS):
        raise UnsupportedKeyword(unknown[0])
    if listed is None:
        is_text = not lasting  # a constraint of another type implies another type
        return UnquotedValue(is_text=is_text, choices=(), value=None if is_text else schema)
    texts = tuple(choice for choice in listed if isinstance(choice, str))
    others = [] if kind else [choice for choice in listed if not isinstance(choice, str)]
    return UnquotedValue(is_text=False, choices=texts, value={"enum": others} if others else None)


def _points_within(schema: Any) -> bool:
    pointer = schema.get("$ref") if isinstance(schema, dict) else None
    return isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))
