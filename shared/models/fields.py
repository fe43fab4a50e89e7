"""Fields of a config.json, each read with one sentence for what it must be."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


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
    if isinstance(loaded, dict):
        return loaded
    raise ValueError(f"{path} must hold a JSON object, got {type(loaded).__name__}")


def is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether it is of these types; true and false are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def positive(text: Json, field: str, default: int | None = None, place: str = "config.json") -> int:
    """A whole number above 0; the default where it is absent or null."""
    value = default if text.get(field) is None else text[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} in {place} must be a positive integer, got {value!r}")
    return value


def count(text: Json, field: str) -> int:
    """A whole number, 0 where it is absent or null."""
    value = text.get(field) or 0
    if not is_number(value, int) or value < 0:
        raise ValueError(f"{field} in config.json must be a whole number, got {value!r}")
    return value


def number(text: Json, field: str, default: float) -> float:
    """A finite number above 0; the default where it is absent."""
    value = text.get(field, default)
    if not is_number(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{field} in config.json must be a positive number, got {value!r}")
    return float(value)


def object_of(text: Json, field: str, place: str = "config.json") -> Json:
    """An object, empty where it is absent or null."""
    value = text.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{field} in {place} must be an object, got {value!r}")
    return value or {}
