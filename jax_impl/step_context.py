"""Context shared by all kinds of steps, and functions used by several of them."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.device_state import DeviceState, Fields, Plan
from jax_impl.drafters import Drafter, Ranking
from jax_impl.model import Model
from jax_impl.model_weights import VisionEncoderWeights
from jax_impl.ops.attention.attention import AttentionRows, with_mrope
from jax_impl.ops.sampling import logprobs
from shared.boundary.backend import BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind


class StepContext(NamedTuple):
    """Context of a step: everything that it reads except the device state.

    Attributes:
      model: Target model.
      drafter: None without speculation.
      tower: Vision encoder; None for a text-only model.
      capacity: Numbers of slots, pages and snapshots.
    """

    model: Model
    drafter: Drafter | None
    tower: VisionEncoderWeights | None
    capacity: BackendLimits

    def extends_drafter(self, program: Program) -> bool:
        """Returns True if the step extends the drafter; else the draft KV gets a gap."""
        is_prefill = program.work is StepKind.PREFILL
        return self.drafter is not None and (is_prefill or not program.shape.is_plain)

    def samples(self, program: Program) -> bool:
        """Returns True if drafts are sampled from the drafter, for rejection sampling."""
        return program.drafts_on_device and self.capacity.accept_rule != "exact"

    def streams(self, program: Program) -> tuple[int, ...]:
        """Returns the residual streams (auxiliary hidden states) that the drafter reads."""
        return (
            self.drafter.streams
            if self.drafter is not None and self.extends_drafter(program)
            else ()
        )


def ranking(
    context: StepContext,
    state: DeviceState,
    plan: Plan,
    lengths: Int[jax.Array, " B"],
    width: int,
    is_sampled: bool,
) -> Ranking:
    """Returns the ranking of candidates after `lengths` committed tokens."""
    vocabulary = context.model.vocabulary
    return Ranking(plan.sampling, state.seen, plan.slots, lengths, width, is_sampled, vocabulary)


def logprobs_of(
    context: StepContext,
    plan: Plan,
    program: Program,
    logits: Float[jax.Array, "R share"] | None,
    row_of: Int[jax.Array, "B W"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
) -> Fields:
    """Returns the logprob fields of a result from this rank's shard of the logits.

    The result is empty if the program has no logprobs.
    """
    if not program.has(ProgramFeature.LOGPROBS):
        return {}
    assert logits is not None  # read by a program with logprobs
    k, vocabulary = context.capacity.max_logprobs, context.model.vocabulary
    reported = logprobs.output_logprobs(logits, row_of, tokens, counts, plan.reports, k, vocabulary)
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def with_image_mrope(
    context: StepContext, state: DeviceState, plan: Plan, rows: AttentionRows
) -> AttentionRows:
    """Adds the M-RoPE positions of text rows that follow the images of their slots."""
    if state.images is None:
        return rows
    return with_mrope(rows, state.images.deltas[plan.slots])
