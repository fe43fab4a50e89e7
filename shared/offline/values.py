"""Conversion of Python values: lists, arrays, generators and numbers of any library."""

from __future__ import annotations

import math
from collections import UserString
from collections.abc import Iterable, Mapping, MappingView, Set
from numbers import Integral, Real
from typing import Any

MAX_DEPTH = 64
"""Most levels of nested lists and objects, the same as over HTTP."""

_NOT_LISTS = (str, bytes, bytearray, memoryview, UserString, Mapping, MappingView, Set)


def plain(value: Any) -> Any:
    """Returns an array, a tensor or a scalar of a library as Python lists and numbers."""
    if isinstance(value, type | str | bytes | bytearray | memoryview):
        return value
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def items_of(value: Any) -> list[Any] | None:
    """Returns the items of a list, an array or a generator, in order; None for other values.

    Strings, bytes, mappings, tables with named columns, sets and views return None, because their
    order or keys would be lost.
    """
    value = plain(value)
    if isinstance(value, _NOT_LISTS) or hasattr(value, "keys") or not isinstance(value, Iterable):
        return None
    return list(value)


def whole_number(value: Any) -> int | None:
    """Returns a whole number of any library as an int; None for anything else, True and False."""
    value = plain(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def number(value: Any) -> int | float | None:
    """Returns a real number of any library; None for anything else, True and False too."""
    value = plain(value)
    if isinstance(value, Integral):
        return whole_number(value)
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return math.inf


def truth(value: Any) -> bool | None:
    """Returns True or False of any library; None for anything else."""
    value = plain(value)
    return value if isinstance(value, bool) else None


def token_ids(value: Any) -> list[int] | None:
    """Returns a list of token ids, from any list of whole numbers; None for anything else."""
    items = items_of(value)
    found = [] if items is None else [whole_number(item) for item in items]
    ids = [each for each in found if each is not None]
    return ids if items is not None and len(ids) == len(items) else None


def as_json(value: Any, name: str, depth: int = 0) -> Any:
    """Returns a value converted to JSON types: dicts with string keys, lists, strings, numbers.

    Raises:
      ValueError: The value has a type that JSON lacks; one sentence that starts with `name`.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} must be nested at most {MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key, name): as_json(each, name, depth + 1) for key, each in value.items()}
    if (found := number(value)) is not None:
        return found
    if (items := items_of(value)) is not None:
        return [as_json(item, name, depth + 1) for item in items]
    if (switch := truth(value)) is not None:
        return switch
    raise ValueError(
        f"{name} has a value of type {type(value).__name__}, which JSON does not support"
    )


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{name} has the key {key!r:.60}; keys must be strings")
    return key
