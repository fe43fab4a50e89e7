"""What works with what, as `GET /capabilities` and `docs/capabilities.md` tell of it.

`python -m shared.options.capabilities` prints the page. The rules are `shared.options.rules`.
"""

import json
from typing import Any

from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS
from shared.options.request_fields import NOT_SERVED, NotServed
from shared.options.rules import RULES
from shared.options.setup import WORDS, Example

DRAFTERS = (*ALGORITHMS, *JOINED_ALGORITHMS)


def to_json() -> dict[str, Any]:
    """What `GET /capabilities` answers."""
    listed = [rule.to_json() for rule in RULES if rule.example is not None]
    return {"drafters": list(DRAFTERS), "refused": [*listed, *map(_field_json, NOT_SERVED)]}


def _field_json(field: NotServed) -> dict[str, Any]:
    """No drafter changes what a field means, so the first one stands for all."""
    example = Example(drafter=ALGORITHMS[0], request=((field.name, field.example),))
    return {"reason": field.reason, "way_out": field.way_out, "example": example.to_json()}


def to_markdown() -> str:
    """The page `docs/capabilities.md`."""
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
    lines.append(_FIELDS)
    for field in NOT_SERVED:
        example_json = json.dumps({field.name: field.example})
        lines.append(f"| `{field.name}` | {', '.join(field.endpoints)} | `{example_json}` |")
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
Fields of OpenAI's API that no drafter changes and that are not there yet: a value that asks for
something gets HTTP 400 with the field's name, one that asks for nothing is taken.

| field | of | refused, for example |
|---|---|---|"""

if __name__ == "__main__":
    print(to_markdown(), end="")
