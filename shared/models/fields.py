"""Fields of a config.json, each read with one sentence for what it must be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

CONFIG = "config.json"
MOST_LEVELS = 64
"""Of objects and lists in one another; a file that has more is no config."""

MOST = (1 << 31) - 1
"""Of whole numbers: the largest that the device counts with."""

MOST_NAMED = 1 << 14
"""Of layers, or of a layer's experts, each of which has tensors of its own name."""

LARGEST = 2.0**127
"""Of other numbers: about the largest float32."""

LISTED = {int: "whole numbers", str: "names"}
"""What a list may hold, in words."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: It holds something else, or cannot be read.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(loaded).__name__}")
    if _is_deeper(loaded, MOST_LEVELS):
        raise ValueError(f"{path} must not be nested in more than {MOST_LEVELS} levels")
    return loaded


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


def is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether it is of these types; true and false are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def positive(
    text: Json, field: str, default: int | None = None, place: str = CONFIG, most: int = MOST
) -> int:
    """Returns a whole number above 0; the default where it is absent or null, if there is one."""
    value = _given(text, field, default)
    is_one = is_number(value, int) and value > 0
    return _bounded(value, field, place, is_one, "a positive integer", most)


def count(text: Json, field: str, most: int = MOST, place: str = CONFIG) -> int:
    """A whole number, 0 where it is absent or null."""
    value = _given(text, field, 0)
    is_one = is_number(value, int) and value >= 0
    return _bounded(value, field, place, is_one, "a whole number", most)


def number(
    text: Json,
    field: str,
    default: float | None = None,
    above: float = 0.0,
    most: float = LARGEST,
) -> float:
    """Returns a number above a bound and up to another; the default where it is absent."""
    value = text.get(field, default)
    is_one = is_number(value, (int, float)) and value > above
    noun = f"a number above {above:g}" if above else "a positive number"
    return float(_bounded(value, field, CONFIG, is_one, noun, most))


def flag(text: Json, field: str, default: bool = False, place: str = CONFIG) -> bool:
    """True or false; the default where it is absent or null."""
    value = _given(text, field, default)
    return _checked(value, field, place, isinstance(value, bool), "be true or false")


def word(text: Json, field: str, default: str, place: str = CONFIG) -> str:
    """A text; the default where it is absent or null."""
    value = _given(text, field, default)
    return _checked(value, field, place, isinstance(value, str), "be a text")


def listed(text: Json, field: str, kind: type, place: str = CONFIG) -> list[Any] | None:
    """A list of whole numbers or of names; None where it is absent or null.

    Args:
      kind: Of what it holds, one of `LISTED`.
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
    """An object, empty where it is absent or null."""
    value = text.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{field} in {place} must be an object, got {value!r}")
    return value or {}
