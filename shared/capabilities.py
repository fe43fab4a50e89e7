"""What is refused, and why: a short list of rules that the start holds a setup against.

Rules that need the flags alone are in `shared.config`; those here need the model as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.config import Options
from shared.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the rules look at.

    Attributes:
      options: What the start was told.
      model: The checkpoint's config.json.
      has_mtp: Whether the checkpoint holds `mtp.*` tensors.
    """

    options: Options
    model: ModelConfig
    has_mtp: bool


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One combination that does not work.

    Attributes:
      refuses: Whether a setup is one of them.
      reason: Why, with the flag; a format string over the attributes of the setup.
      way_out: What to do instead.
    """

    refuses: Callable[[Setup], bool]
    reason: str
    way_out: str


RULES = (
    Rule(
        refuses=lambda s: (
            s.options.speculative.speculative_algorithm == "NEXTN"
            and not (s.has_mtp and s.model.has_mtp)
        ),
        reason="--speculative-algorithm NEXTN drafts with the checkpoint's own mtp layer, "
        "and this {model.family} checkpoint has none",
        way_out="leave the flag out",
    ),
    Rule(
        refuses=lambda s: s.options.speculative.topk > 1,
        reason="--speculative-eagle-topk {options.speculative.topk} asks for draft trees, "
        "which are not supported",
        way_out="give 1 or leave the flag out",
    ),
    Rule(
        refuses=lambda s: (s.options.model.context_length or 0) > s.model.context_length,
        reason="--context-length {options.model.context_length} is beyond the model's "
        "{model.context_length} positions",
        way_out="give a smaller one or leave the flag out",
    ),
)


def refusals(setup: Setup) -> list[str]:
    """One sentence for every rule that refuses the setup; an empty list where it can be served."""
    return [
        f"{rule.reason.format(**vars(setup))}; {rule.way_out}"
        for rule in RULES
        if rule.refuses(setup)
    ]
