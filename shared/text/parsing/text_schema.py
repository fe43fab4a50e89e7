"""JSON Schema rules that decide if a schema accepts a string or null.

A schema is part of the request and is evaluated on the server's event loop. The work for one value
is therefore bounded, nothing is fetched, and expressions are matched in linear time. Unsupported
rules (a `$ref` to another document, `format`, an expression with look-around) accept every value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from shared.text.grammar_source import InvalidGrammarError
from shared.text.json_schema_refs import resolve_pointer

MAX_STEPS = 1 << 12  # schemas and enumerated values that are evaluated for one value
MAX_DEPTH = 64
MAX_MATCHED = 256  # characters of an expression and of the text that it is matched with
_STEPS_OF_A_MATCH = MAX_STEPS // 4  # an expression may compile for 0.1 s


class TooMuchWork(Exception):
    """The schema exceeds the work that is allowed for one value."""


class ParameterSchemas:
    """Schemas of a function's parameters.

    Args:
      document: Schema of all arguments; references are resolved in it.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._steps_left = MAX_STEPS
        whole: Any = document
        for _ in range(MAX_DEPTH):
            if not (isinstance(whole, Mapping) and "$ref" in whole):
                break
            whole = self._target(whole["$ref"])
        whole = whole if isinstance(whole, Mapping) else {}
        properties = whole.get("properties")
        self.properties = properties if isinstance(properties, Mapping) else {}
        self._others = whole.get("additionalProperties", True)

    def accepts(self, key: str, value: str | None) -> bool:
        """Returns True if a value is valid as this parameter.

        Raises:
          TooMuchWork: The evaluation exceeds `MAX_STEPS` or `MAX_DEPTH`.
        """
        self._steps_left = MAX_STEPS
        return self._accepts(self.properties.get(key, self._others), value, 0)

    def _accepts(self, schema: Any, value: str | None, depth: int) -> bool:
        self._spend(1)
        if depth > MAX_DEPTH:
            raise TooMuchWork
        if not isinstance(schema, Mapping):
            return schema is not False

        def accepts(part: Any) -> bool:
            return self._accepts(part, value, depth + 1)

        if "$ref" in schema and not accepts(self._target(schema["$ref"])):
            return False
        if not _is_of_type(schema.get("type"), value):
            return False
        if not (self._is_listed(schema, value) and self._has_form(schema, value)):
            return False
        return (
            all(accepts(part) for part in _parts(schema, "allOf"))
            and ("anyOf" not in schema or any(accepts(part) for part in _parts(schema, "anyOf")))
            and ("oneOf" not in schema or sum(map(accepts, _parts(schema, "oneOf"))) == 1)
            and not ("not" in schema and accepts(schema["not"]))
            and (
                "if" not in schema
                or accepts(schema.get("then" if accepts(schema["if"]) else "else"))
            )
        )

    def _is_listed(self, schema: Mapping[str, Any], value: str | None) -> bool:
        listed = schema.get("enum")
        if isinstance(listed, list):
            self._spend(len(listed))
            if value not in listed:
                return False
        return "const" not in schema or schema["const"] == value

    def _has_form(self, schema: Mapping[str, Any], value: str | None) -> bool:
        if value is None:
            return True
        least, most = schema.get("minLength"), schema.get("maxLength")
        if isinstance(least, int | float) and len(value) < least:
            return False
        if isinstance(most, int | float) and len(value) > most:
            return False
        pattern = schema.get("pattern")
        if not isinstance(pattern, str) or max(len(pattern), len(value)) > MAX_MATCHED:
            return True
        self._spend(_STEPS_OF_A_MATCH)
        return _matches(pattern, value)

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TooMuchWork

    def _target(self, reference: Any) -> Any:
        """Returns the target of a reference; a schema that accepts every value if there is none."""
        if not (isinstance(reference, str) and reference.startswith("#")):
            return True
        self._spend(len(reference) // 8)  # some for each of its names
        try:
            return resolve_pointer(self._document, reference)
        except InvalidGrammarError:
            return True


def _parts(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key, [])
    return parts if isinstance(parts, list) else []


def _is_of_type(types: Any, value: str | None) -> bool:
    name = "null" if value is None else "string"
    return types is None or types == name or (isinstance(types, list) and name in types)


def _matches(pattern: str, text: str) -> bool:
    matcher = _compiled(pattern)
    return matcher is None or matcher(text)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> Callable[[str], bool] | None:
    """Compiles an expression without backtracking; returns None if that is not possible."""
    # The engine process imports this module, and runs without the libraries of the server.
    library = import_module("pydantic_core")
    try:
        validator = library.SchemaValidator(library.core_schema.str_schema(pattern=pattern))
    except library.SchemaError:
        return None
    return cast("Callable[[str], bool]", validator.isinstance_python)
