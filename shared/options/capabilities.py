"""Response of `GET /capabilities`: methods, unsupported combinations and fields.

The rules are `shared.options.rules`; `docs/compatibility.md` shows them as matrices.
"""

from typing import Any

from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS
from shared.options.rule_context import Example
from shared.options.rules import RULES
from shared.options.unsupported_fields import UNSUPPORTED_FIELDS, UnsupportedField

DRAFTERS = (*ALGORITHMS, *JOINED_ALGORITHMS)


def to_json(is_strict: bool) -> dict[str, Any]:
    """Returns the part of the response that does not depend on the model.

    Args:
      is_strict: Whether ignored fields are unsupported too.
    """
    listed = [rule.to_json() for rule in RULES if rule.example is not None]
    refused = [field for field in UNSUPPORTED_FIELDS if is_strict or not field.is_advice]
    ignored = [_ignored_json(field) for field in UNSUPPORTED_FIELDS if field not in refused]
    fields = {"unsupported": [*listed, *map(_field_json, refused)], "ignored": ignored}
    return {"drafters": list(DRAFTERS), **fields}


def _ignored_json(field: UnsupportedField) -> dict[str, Any]:
    neutral = list(field.neutral)
    return {"field": field.name, "endpoints": list(field.endpoints), "neutral": neutral}


def _field_json(field: UnsupportedField) -> dict[str, Any]:
    """Returns an unsupported field; fields mean the same for all drafters, so one is shown."""
    example = Example(drafter=ALGORITHMS[0], request=((field.name, field.example),))
    shown = {**example.to_json(), "endpoints": list(field.endpoints)}
    return {"reason": field.reason, "hint": field.hint, "example": shown}
