"""What works with what, as `GET /capabilities` and `docs/compatibility.md` tell of it.

`python -m shared.options.capabilities` prints the page. The rules are `shared.options.rules`.
"""

import json
from typing import Any

from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS
from shared.options.request_fields import NOT_SERVED, NotServed
from shared.options.rules import RULES
from shared.options.setup import WORDS, Example

DRAFTERS = (*ALGORITHMS, *JOINED_ALGORITHMS)


def to_json(is_strict: bool) -> dict[str, Any]:
    """What `GET /capabilities` answers.

    Args:
      is_strict: Whether advice in requests is refused too.
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
    """No drafter changes what a field means, so the first one stands for all."""
    example = Example(drafter=ALGORITHMS[0], request=((field.name, field.example),))
    return {"reason": field.reason, "hint": field.way_out, "example": example.to_json()}


def to_markdown() -> str:
    """The page `docs/compatibility.md`."""
    lines = [_HEAD.format(drafters=", ".join(f"`{name}`" for name in DRAFTERS))]
    for rule in RULES:
        lines.append(f"- {rule.reason.format(**WORDS)}; {rule.way_out.format(**WORDS)}.")
        example = rule.example
        if example is None:
            lines.append("  The files decide.")
            continue
        model = f" with a {example.model_type} model" if example.model_type else ""
        flags = f" and `{' '.join(example.flags)}`" if example.flags else ""
        lines.append(f"  Example: `{example.drafter}`{model}{flags}.")
    for head, is_advice in ((_FIELDS, False), (_ADVICE, True)):
        lines.append(head)
        for field in NOT_SERVED:
            if field.is_advice == is_advice:
                example = json.dumps(field.example)
                lines.append(f"| `{field.name}` | {', '.join(field.endpoints)} | `{example}` |")
    return "\n".join(lines) + "\n"


_HEAD = """<!-- Made by `python -m shared.options.capabilities`; a test compares. -->
# What works with what

The drafters are {drafters};
a start without `--speculative-algorithm` decodes plainly. Every drafter works with every model
family, page size, overlap depth and field of a request, but for what is listed here. What is listed
is refused at the start by exit code 2, all that applies at once; the running server answers the
same list at `GET /capabilities`, with the bounds of a request. No field of a request that chooses
tokens is refused with any drafter.
"""

_FIELDS = """
Fields of other servers' APIs that would change the answer and are not supported: a value that asks
for something gets HTTP 400 with the field's name, one that asks for nothing is taken.

| field | of | refused, for example |
|---|---|---|"""

_ADVICE = """
Fields that cannot change a token of the answer: the request is served, and the answer lists the
field under `ignored`, in a stream in the first event, as does the log's line of the request. With
`--strict-fields` they get HTTP 400. `reasoning_effort`, `verbosity`, `enable_thinking` and
`thinking` are given to a chat template that reads them, and are ignored where it does not.

| field | of | ignored, for example |
|---|---|---|"""

if __name__ == "__main__":
    print(to_markdown(), end="")
