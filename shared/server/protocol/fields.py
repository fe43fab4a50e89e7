"""Request fields with several accepted forms, shared by the endpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from shared.text.tokenizer import is_text

MAX_COUNT = (1 << 31) - 1  # far above the model's own limits
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 1024  # per request, over all prompts
MAX_BIAS = 100  # absolute value
MAX_USER_LENGTH = 256  # the n-gram drafter stores the name with the user's n-grams
MAX_DEPTH = 64
MAX_TOKEN_IDS = 1 << 14  # of stop_token_ids and logit_bias; a model's own limits are lower


class Strict(BaseModel):
    """Request model in which wrong types, unknown fields, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, frozen=True
    )


def _check_text(value: str) -> str:
    if not is_text(value):
        raise PydanticCustomError("text", "must be valid Unicode text without lone surrogates")
    return value


Text = Annotated[str, AfterValidator(_check_text)]
User = Annotated[Text, Field(max_length=MAX_USER_LENGTH)]


def _check_bool(value: Any) -> Any:
    """Accepts only booleans: a pydantic literal also accepts 0 and 1."""
    if type(value) is not bool:
        raise PydanticCustomError("bool", "must be true or false")
    return value


No = Annotated[Literal[False], BeforeValidator(_check_bool)]
"""Boolean field with false as its only value."""


def check_depth(value: Any) -> Any:
    """Raises an error for nesting deeper than `MAX_DEPTH`, which serializers could not follow."""
    level, depth = [value], 0
    while level := [part for item in level for part in _parts(item)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise PydanticCustomError(
                "depth", "must be nested at most {number} deep", {"number": MAX_DEPTH}
            )
    return value


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


Nested = Annotated[dict[str, Any], AfterValidator(check_depth)]
"""Object that is passed on unchanged."""


def is_id_list(value: Any) -> bool:
    """Returns True if a value is a list of integers, as lists of token ids are."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


ID_FORMAT: dict[str, Any] = {"format": "token-id"}
"""Marks token ids; the model's vocabulary is smaller than the documented maximum."""

ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT, **ID_FORMAT}
_IDS = {"type": "array", "items": ID_SCHEMA, "minItems": 1}
_PROMPT = {"type": "string", "minLength": 1}
PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _PROMPT,
            _IDS,
            {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": MAX_CHOICES},
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_CHOICES},
        ]
    }
)
_ONE_STOP = {"type": "string", "maxLength": MAX_STOP_LENGTH}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOP_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            _ONE_STOP,
            {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            {"type": "null"},
        ]
    }
)
BIAS_SCHEMA = WithJsonSchema(
    {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,19}$", **ID_FORMAT},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_TOKEN_IDS,
    }
)


def read_prompt(value: Any) -> list[str] | list[list[int]]:
    """Parses one or more prompts: all are strings, or all are lists of token ids."""
    prompts = [value] if isinstance(value, str) or (value and is_id_list(value)) else value
    if isinstance(prompts, list) and len(prompts) > MAX_CHOICES:
        raise PydanticCustomError(
            "prompt", "must have at most {number} prompts", {"number": MAX_CHOICES}
        )
    if not isinstance(prompts, list) or not (
        all(map(is_text, prompts)) or all(map(is_id_list, prompts))
    ):
        raise PydanticCustomError(
            "prompt", "must be a string, a list of token ids, or a list of such prompts of one kind"
        )
    if not prompts or not all(prompts):
        raise PydanticCustomError("prompt", "must not be empty")
    return prompts


def read_stops(value: Any) -> list[str]:
    """Parses stop strings: a string, where "" means none, or a list of strings."""
    stops = [] if value in (None, "") else [value] if isinstance(value, str) else value
    few = isinstance(stops, list) and stops[: MAX_STOPS + 1]
    if not isinstance(few, list) or not all(is_text(s) and s for s in few):
        raise PydanticCustomError(
            "stop", "must be a string or a list of strings, none of them empty"
        )
    if len(few) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in few):
        raise PydanticCustomError(
            "stop",
            "must have at most {number} strings of {length} characters",
            {"number": MAX_STOPS, "length": MAX_STOP_LENGTH},
        )
    return stops


def read_bias(value: Any) -> dict[int, float]:
    """Parses biases by token id; the keys are strings in JSON."""
    if not isinstance(value, dict | None):
        raise PydanticCustomError("logit_bias", "must be an object that maps token ids to biases")
    biases = value or {}
    if len(biases) > MAX_TOKEN_IDS:
        raise PydanticCustomError(
            "logit_bias", "must have at most {number} token ids", {"number": MAX_TOKEN_IDS}
        )
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise PydanticCustomError("logit_bias", "must have token ids as its keys")
        # NaN fails this comparison as well.
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError(
                "logit_bias", "must have numbers from -{bound} to {bound}", {"bound": MAX_BIAS}
            )
    if len(set(map(int, biases))) < len(biases):
        raise PydanticCustomError("logit_bias", "must have each token id once")
    return {int(name): float(bias) for name, bias in biases.items()}


def type_of(value: Any) -> Any:
    """Returns the field `type` of an unvalidated object; None for other values."""
    return value.get("type") if isinstance(value, dict) else None


def string_or_list(value: Any) -> str:
    """Returns the tag of content that is a string or a list, for `Discriminator`."""
    return "<list>" if isinstance(value, list) else "<string>"
