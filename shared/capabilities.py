"""What is refused, and why: a short list of rules that the start holds a setup against.

Rules that need the flags alone are in `shared.config`; those here need the model as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.config import HEAD_ALGORITHMS, Options
from shared.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the rules look at.

    Attributes:
      options: What the start was told.
      model: The checkpoint's config.json.
      has_mtp: Whether the checkpoint holds `mtp.*` tensors.
      head_kind: What the draft model is by its tensors, "EAGLE" or "EAGLE3"; None without one.
    """

    options: Options
    model: ModelConfig
    has_mtp: bool
    head_kind: str | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One combination that does not work.

    Attributes:
      refuses: Whether a setup is one of them.
      reason: Why, with the flag; a format string over the attributes of the setup.
      way_out: What to do instead, a format string too.
    """

    refuses: Callable[[Setup], bool]
    reason: str
    way_out: str


RULES = (
    Rule(
        refuses=lambda s: s.options.speculative.with_mtp and not (s.has_mtp and s.model.has_mtp),
        reason="--speculative-algorithm {options.speculative.speculative_algorithm} drafts with "
        "the checkpoint's own mtp layer, and this {model.family} checkpoint has none",
        way_out="give a draft head with --speculative-algorithm EAGLE or EAGLE3 and "
        "--speculative-draft-model-path, or leave the flag out",
    ),
    Rule(
        refuses=lambda s: (
            s.head_kind is not None
            and s.options.speculative.speculative_algorithm in HEAD_ALGORITHMS
            and s.options.speculative.speculative_algorithm != s.head_kind
        ),
        reason="--speculative-algorithm {options.speculative.speculative_algorithm} does not fit "
        "the draft model, whose tensors are those of an {head_kind} head",
        way_out="give --speculative-algorithm {head_kind}, or another head",
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
        f"{rule.reason}; {rule.way_out}".format(**vars(setup))
        for rule in RULES
        if rule.refuses(setup)
    ]
