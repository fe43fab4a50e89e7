"""Typed access to the fields of a config.json; each invalid value raises an error that names the
field.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

CONFIG = "config.json"
MOST_LEVELS = 64
"""Maximum nesting depth of objects and lists; deeper files are rejected."""

MOST = (1 << 31) - 1
"""Maximum of integer fields: the largest int32."""

MOST_NAMED = 1 << 14
"""Maximum number of layers, or of experts in a layer; each has tensors of its own name."""

LARGEST = 2.0**127
"""Maximum of other numbers, about the largest float32."""

LISTED = {int: "integers", str: "strings"}
"""Element types of lists, with their names in messages."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
      ValueError: The file cannot be read or contains something else.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(loaded).__name__}")
    if _is_deeper(loaded, MOST_LEVELS):
        raise ValueError(f"{path} must not be nested deeper than {MOST_LEVELS} levels")
    return loaded


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


def is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Returns True if a value has one of these types; booleans do not count as numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def positive(
    text: Json, field: str, default: int | None = None, place: str = CONFIG, most: int = MOST
) -> int:
    """Returns an integer above 0; the default, if there is one, for an absent or null field."""
    value = _given(text, field, default)
    is_one = is_number(value, int) and value > 0
    return _bounded(value, field, place, is_one, "a positive integer", most)


def count(text: Json, field: str, most: int = MOST, place: str = CONFIG) -> int:
    """Returns an integer of at least 0; 0 for an absent or null field."""
    value = _given(text, field, 0)
    is_one = is_number(value, int) and value >= 0
    return _bounded(value, field, place, is_one, "a non-negative integer", most)


def number(
    text: Json,
    field: str,
    default: float | None = None,
    above: float = 0.0,
    most: float = LARGEST,
) -> float:
    """Returns a number above `above` and up to `most`; the default for an absent field."""
    value = text.get(field, default)
    is_one = is_number(value, (int, float)) and value > above
    noun = f"a number above {above:g}" if above else "a positive number"
    return float(_bounded(value, field, CONFIG, is_one, noun, most))


def flag(text: Json, field: str, default: bool = False, place: str = CONFIG) -> bool:
    """Returns a boolean; the default for an absent or null field."""
    value = _given(text, field, default)
    return _checked(value, field, place, isinstance(value, bool), "be true or false")


def word(text: Json, field: str, default: str, place: str = CONFIG) -> str:
    """Returns a string; the default for an absent or null field."""
    value = _given(text, field, default)
    return _checked(value, field, place, isinstance(value, str), "be a string")


def listed(text: Json, field: str, kind: type, place: str = CONFIG) -> list[Any] | None:
    """Returns a list of integers or strings; None for an absent or null field.

    Args:
      text: Fields of the config.json.
      field: Name of the field.
      kind: Element type, a key of `LISTED`.
      place: File or object, for the message.
    """
    value = text.get(field)
    is_one = isinstance(value, list) and all(is_number(each, kind) for each in value)
    return _checked(value, field, place, value is None or is_one, f"list {LISTED[kind]}")


def _given(text: Json, field: str, default: Any) -> Any:
    return default if text.get(field) is None else text[field]


def _bounded(value: Any, field: str, place: str, is_one: bool, noun: str, most: float) -> Any:
    _checked(value, field, place, is_one, f"be {noun}")
    return _checked(value, field, place, value <= most, f"be at most {most:.10g}")


def _checked(value: Any, field: str, place: str, is_right: bool, must: str) -> Any:
    if not is_right:
        raise ValueError(f"{field} in {place} must {must}, got {value!r:.60}")
    return value


def object_of(text: Json, field: str, place: str = CONFIG) -> Json:
    """Returns an object; empty for an absent or null field."""
    value = text.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{field} in {place} must be an object, got {value!r}")
    return value or {}
