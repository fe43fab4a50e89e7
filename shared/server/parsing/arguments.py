"""Arguments of tool calls: JSON, and unquoted values converted by the schema."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from shared.server.parsing.text_schema import ParameterSchemas, TooMuchWork

MAX_LITERAL = 1 << 15  # characters of a Python literal, which is read in some 50 ms


def from_json(text: str) -> Any:
    """The value that a JSON text is.

    Raises:
      ValueError: It is no JSON, is nested too deeply, or has a number beyond float64.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def to_json(value: Any) -> str:
    """A value as JSON text, which is UTF-8 also where the value has half a surrogate pair.

    Raises:
      ValueError: JSON has no such number.
      TypeError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def argument_json(text: str, key: str, schemas: ParameterSchemas) -> str:
    """Returns the JSON text of a parameter's value, see `read_argument`.

    JSON with a number beyond float64 has no value here, and stays as it is written.
    """
    value = read_argument(text, key, schemas)
    is_last_resort = value == text and not _takes(schemas, key, text)
    return text if is_last_resort and _is_json(text) else to_json(value)


def _takes(schemas: ParameterSchemas, key: str, value: Any) -> bool:
    try:
        return schemas.takes(key, value)
    except TooMuchWork:
        return False


def _is_json(text: str) -> bool:
    """Returns True if a text is JSON, whatever the size of its numbers."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def read_argument(text: str, key: str, schemas: ParameterSchemas) -> Any:
    """The value of a parameter that stands without quotes.

    `null` is null where the schema takes null. Else what the schema takes as a text is a text: a
    parameter without a schema too. Else it is read as JSON, else as a literal of Python, which
    models write as well (`True`, `['a']`), and else it is a text all the same.
    """
    try:
        if text == "null" and schemas.takes(key, None):
            return None
        if schemas.takes(key, text):
            return text
    except TooMuchWork:
        pass
    for read in (from_json, _from_python):
        is_read, value = _tried(read, text)
        if is_read:
            return value
    return text


def _tried(read: Callable[[str], Any], text: str) -> tuple[bool, Any]:
    try:
        return True, read(text)
    except ValueError:
        return False, None


def _from_python(text: str) -> Any:
    """The JSON value that a literal of Python is.

    Raises:
      ValueError: It is no such literal, or is too long or nested too deeply.
    """
    if len(text) > MAX_LITERAL:
        raise ValueError("too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text.strip())
        return from_json(to_json(value))
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no literal") from error


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} exceeds float64")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
