"""What all kinds of step work with, and what more than one of them does."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.device_state import DeviceState, Fields, Plan
from jax_impl.drafters import Drafter, Ranking
from jax_impl.model import Model
from jax_impl.model_weights import TowerWeights
from jax_impl.ops.attention.attention import Rows, turned
from jax_impl.ops.sampling import logprobs
from shared.boundary.backend import Capacity
from shared.boundary.program import Extra, Program, Work


class Machine(NamedTuple):
    """All that a step works with beside the state.

    Attributes:
      model: The target.
      drafter: None without one.
      tower: Of a model that sees; None without one.
      capacity: What exists.
    """

    model: Model
    drafter: Drafter | None
    tower: TowerWeights | None
    capacity: Capacity

    def feeds(self, program: Program) -> bool:
        """Whether the drafter follows a step; plain decoding leaves a hole in its KV instead."""
        is_prefill = program.work is Work.PREFILL
        return self.drafter is not None and (is_prefill or not program.shape.is_plain)

    def samples(self, program: Program) -> bool:
        """Whether a step samples its drafts from the drafter, to be judged by a rejection rule."""
        return program.drafts_on_device and self.capacity.accept_rule != "exact"

    def streams(self, program: Program) -> tuple[int, ...]:
        """The residual streams that a step keeps for the drafter."""
        return self.drafter.streams if self.drafter is not None and self.feeds(program) else ()


def ranking(
    machine: Machine,
    state: DeviceState,
    plan: Plan,
    lengths: Int[jax.Array, " B"],
    width: int,
    is_sampled: bool,
) -> Ranking:
    """How candidates are ranked after `lengths` committed tokens."""
    vocabulary = machine.model.vocabulary
    return Ranking(plan.sampling, state.seen, plan.slots, lengths, width, is_sampled, vocabulary)


def logprobs_of(
    machine: Machine,
    plan: Plan,
    program: Program,
    logits: Float[jax.Array, "R share"] | None,
    row_of: Int[jax.Array, "B W"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
) -> Fields:
    """The logprobs among a result's fields; none where the program has none.

    Args:
      logits: This rank's part of them, where the program reads them.
    """
    if not program.has(Extra.LOGPROBS):
        return {}
    assert logits is not None  # a program that has logprobs reads them
    k, vocabulary = machine.capacity.max_logprobs, machine.model.vocabulary
    reported = logprobs.reported(logits, row_of, tokens, counts, plan.reports, k, vocabulary)
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def behind_pictures(machine: Machine, state: DeviceState, plan: Plan, rows: Rows) -> Rows:
    """Rows of text, turned as those of a model that sees, behind the pictures of their slots."""
    if state.pictures is None:
        return rows
    return turned(rows, state.pictures.deltas[plan.slots])
