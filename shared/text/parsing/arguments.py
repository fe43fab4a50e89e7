"""Arguments of tool calls: JSON, and unquoted values converted by the schema."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from shared.text.parsing.text_schema import ParameterSchemas, TooMuchWork

MAX_LITERAL = 1 << 15  # characters of a Python literal; parsing takes about 50 ms


def from_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ValueError: The text is invalid JSON, is nested too deeply, or has a number beyond float64.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def to_json(value: Any) -> str:
    """Returns a value as JSON text; lone surrogates are escaped, so that the text is valid UTF-8.

    Raises:
      ValueError: A number is NaN or infinite.
      TypeError: The value has no JSON form.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def argument_json(text: str, key: str, schemas: ParameterSchemas) -> str:
    """Returns the JSON text of a parameter's value, see `read_argument`.

    JSON with a number beyond float64 has no value here and is returned as it is written.
    """
    value = read_argument(text, key, schemas)
    is_last_resort = value == text and not _accepts(schemas, key, text)
    return text if is_last_resort and is_json(text) else to_json(value)


def is_whole(text: str, key: str, schemas: ParameterSchemas) -> bool:
    """Returns True if a text is a value that a grammar allows: a string of the schema, or JSON.

    JSON can contain the closing tag of its value within a string.
    """
    return _accepts(schemas, key, text) or is_json(text)


def _accepts(schemas: ParameterSchemas, key: str, value: Any) -> bool:
    try:
        return schemas.accepts(key, value)
    except TooMuchWork:
        return False


def is_json(text: str) -> bool:
    """Returns True if a text is JSON, whatever the size of its numbers."""
    try:
        json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return False
    return True


def read_argument(text: str, key: str, schemas: ParameterSchemas) -> Any:
    """Returns the value of a parameter that is written without quotes.

    `null` is null if the schema accepts null. Other text is a string if the schema accepts a
    string, or if there is no schema. Else the text is parsed as JSON, and then as a Python literal,
    which models write as well (`True`, `['a']`). Text that is neither is a string.
    """
    try:
        if text == "null" and schemas.accepts(key, None):
            return None
        if schemas.accepts(key, text):
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
    """Returns the JSON value of a Python literal.

    Raises:
      ValueError: The text is no such literal, or is too long or nested too deeply.
    """
    if len(text) > MAX_LITERAL:
        raise ValueError(f"a Python literal may have at most {MAX_LITERAL} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escape sequences
            value = ast.literal_eval(text.strip())
        return from_json(to_json(value))
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a Python literal") from error


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} exceeds float64")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
