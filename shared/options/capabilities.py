"""Response of `GET /capabilities`: methods, unsupported combinations and fields.

The rules are `shared.options.rules`; `docs/compatibility.md` shows them as matrices.
"""

from typing import Any

from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS
from shared.options.request_fields import NOT_SERVED, NotServed
from shared.options.rules import RULES
from shared.options.setup import Example

DRAFTERS = (*ALGORITHMS, *JOINED_ALGORITHMS)


def to_json(is_strict: bool) -> dict[str, Any]:
    """Returns the part of the response that does not depend on the model.

    Args:
      is_strict: Whether ignored fields are unsupported too.
    """
    listed = [rule.to_json() for rule in RULES if rule.example is not None]
    refused = [field for field in NOT_SERVED if is_strict or not field.is_advice]
    ignored = [_ignored_json(field) for field in NOT_SERVED if field not in refused]
    fields = {"unsupported": [*listed, *map(_field_json, refused)], "ignored": ignored}
    return {"drafters": list(DRAFTERS), **fields}


def _ignored_json(field: NotServed) -> dict[str, Any]:
    neutral = list(field.neutral)
    return {"field": field.name, "endpoints": list(field.endpoints), "neutral": neutral}


def _field_json(field: NotServed) -> dict[str, Any]:
    """Returns an unsupported field; fields mean the same for all drafters, so one is shown."""
    example = Example(drafter=ALGORITHMS[0], request=((field.name, field.example),))
    return {"reason": field.reason, "hint": field.way_out, "example": example.to_json()}
