"""What all kinds of step work with, and what more than one of them does."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.backend import Limits, Program, Work
from torch_impl.device_state import DeviceState, Fields, Plan
from torch_impl.drafters import Drafter, Noise, Ranking
from torch_impl.model import Model
from torch_impl.ops import any_row, sampling


@dataclass(frozen=True)
class Machine:
    """All that a step works with.

    Attributes:
      model: The target.
      drafter: None without one.
      limits: What exists.
      state: The memory of all slots and pages.
    """

    model: Model
    drafter: Drafter | None
    limits: Limits
    state: DeviceState

    def feeds(self, program: Program) -> bool:
        """Whether the drafter follows a step; plain decoding leaves a hole in its KV instead."""
        is_prefill = program.work is Work.PREFILL
        return self.drafter is not None and (is_prefill or not program.shape.is_plain)

    def relays(self, program: Program) -> bool:
        """Whether a step leaves candidates for the next, for which it needs one more noise."""
        return self.feeds(program) and self.drafter.sizes.has_relay

    def streams(self, program: Program) -> tuple[int, ...]:
        """The residual streams that a step keeps for the drafter."""
        return self.drafter.streams if self.feeds(program) else ()


def seen_of(machine: Machine, plan: Plan) -> Int[Tensor, "B vocab"] | None:
    """What the rows have seen, or None where no row has a penalty."""
    if not any_row(plan.sampling.has_penalty):
        return None
    return machine.state.seen[plan.slots]


def ranking(
    machine: Machine,
    plan: Plan,
    lengths: Int[Tensor, " B"],
    noise: Noise | None,
    width: int,
    kept: list[Float[Tensor, "B vocab"]] | None,
) -> Ranking:
    """How candidates are ranked after `lengths` committed tokens, where the noise begins."""
    return Ranking(plan.sampling, lengths, seen_of(machine, plan), noise, width, kept)


def logprobs_of(
    machine: Machine,
    program: Program,
    logits: Float[Tensor, "B W vocab"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Fields:
    if not program.logprobs:
        return {}
    found = sampling.reported(logits, tokens, counts, machine.limits.max_logprobs)
    return dict(zip(("chosen", "top_ids", "top_values"), found, strict=True))
