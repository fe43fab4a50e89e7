"""Context shared by all steps, the record of one step, and functions of several kinds of steps."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.device_state import DeviceState, DraftState, Fields, Plan
from jax_impl.drafters import Drafter, Ranking
from jax_impl.model import Model
from jax_impl.model_weights import VisionEncoderWeights
from jax_impl.ops.attention.attention import AttentionRows, with_mrope
from jax_impl.ops.sampling import logprobs
from shared.boundary.backend import BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind


class StepContext(NamedTuple):
    """Context of all steps: everything that they read except the device state.

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


class Step(NamedTuple):
    """One step of any kind that has rows, which is any kind but an encode step.

    Attributes:
      context: Context of all steps.
      plan: Plan of the step, on the device.
      program: Sizes and features for which the step is compiled.
      lengths: Number of committed tokens of each row before the step.
    """

    context: StepContext
    plan: Plan
    program: Program
    lengths: Int[jax.Array, " B"]

    @classmethod
    def of(cls, context: StepContext, state: DeviceState, plan: Plan, program: Program) -> "Step":
        """Builds the record of a step; a prompt chunk begins at the length of its row."""
        prompt = plan.prompt
        lengths = state.lengths[plan.slots] if prompt is None else prompt.first_positions
        return cls(context, plan, program, lengths)

    @property
    def extends_drafter(self) -> bool:
        """True if the step extends the drafter; else the draft KV gets a gap."""
        is_prefill = self.program.work is StepKind.PREFILL
        return self.context.drafter is not None and (is_prefill or not self.program.shape.is_plain)

    @property
    def samples_drafts(self) -> bool:
        """True if drafts are sampled from the drafter, for rejection sampling."""
        return self.program.drafts_on_device and self.context.capacity.accept_rule != "exact"

    @property
    def streams(self) -> tuple[int, ...]:
        """Residual streams (auxiliary hidden states) that the drafter reads."""
        drafter = self.context.drafter
        return drafter.streams if drafter is not None and self.extends_drafter else ()


def drafter_state(step: Step, state: DeviceState) -> DraftState:
    """Returns the state with which the drafter runs; it has the pools that the drafter reads."""
    assert state.draft is not None
    return state.draft._replace(kv=state.kv) if _reads_target_kv(step) else state.draft


def with_drafter_state(step: Step, state: DeviceState, draft: DraftState) -> DeviceState:
    """Returns the device state after the drafter has run."""
    if _reads_target_kv(step):
        return state._replace(kv=draft.kv, draft=draft._replace(kv=()))
    return state._replace(draft=draft)


def _reads_target_kv(step: Step) -> bool:
    drafter = step.context.drafter
    return drafter is not None and drafter.sizes.reads_target_kv


def ranking(
    step: Step,
    state: DeviceState,
    lengths: Int[jax.Array, " B"],
    width: int,
    is_sampled: bool,
) -> Ranking:
    """Returns the ranking of candidates after `lengths` committed tokens."""
    return Ranking(
        sampling=step.plan.sampling,
        counts=state.seen,
        slots=step.plan.slots,
        lengths=lengths,
        width=width,
        is_sampled=is_sampled,
        vocabulary=step.context.model.vocabulary,
    )


def logprobs_of(
    step: Step,
    logits: Float[jax.Array, "R share"] | None,
    row_of: Int[jax.Array, "B W"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
) -> Fields:
    """Returns the logprob fields of a result from this rank's shard of the logits.

    The result is empty if the program has no logprobs.
    """
    if not step.program.has(ProgramFeature.LOGPROBS):
        return {}
    assert logits is not None  # read by a program with logprobs
    k, vocabulary = step.context.capacity.max_logprobs, step.context.model.vocabulary
    reported = logprobs.output_logprobs(
        logits, row_of, tokens, counts, step.plan.reports, k, vocabulary
    )
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def adapter_slots(step: Step, request: Int[jax.Array, " R"]) -> Int[jax.Array, " R"] | None:
    """Returns the adapter slot of each row, or None if the program takes none.

    Args:
      step: The step.
      request: Row of the plan of each flat row.
    """
    adapters = step.plan.adapters
    return None if adapters is None else adapters[request]


def mrope_deltas(step: Step, state: DeviceState) -> Int[jax.Array, " B"] | None:
    """Returns the M-RoPE position delta of each row, or None for a text-only model."""
    return None if state.images is None else state.images.deltas[step.plan.slots]


def with_image_mrope(step: Step, state: DeviceState, rows: AttentionRows) -> AttentionRows:
    """Adds the M-RoPE positions of text rows that follow the images of their slots."""
    deltas = mrope_deltas(step, state)
    return rows if deltas is None else with_mrope(rows, deltas)
