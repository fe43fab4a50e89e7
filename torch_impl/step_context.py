"""Context shared by all kinds of steps, and functions used by several of them."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.backend import BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from torch_impl.device_state import DeviceState, Fields, Plan
from torch_impl.drafters import Drafter, Ranking
from torch_impl.model import Model
from torch_impl.model_weights import VisionEncoderWeights
from torch_impl.ops.attention.attention import AttentionRows, with_mrope
from torch_impl.ops.sampling import logprobs


@dataclass(frozen=True)
class StepContext:
    """Context of a step.

    Attributes:
      model: Target model.
      drafter: None without speculation.
      tower: Vision encoder; None for a text-only model.
      capacity: Numbers of slots, pages and snapshots.
      state: Device state of all slots and pages.
    """

    model: Model
    drafter: Drafter | None
    tower: VisionEncoderWeights | None
    capacity: BackendLimits
    state: DeviceState

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
    context: StepContext, plan: Plan, lengths: Int[Tensor, " B"], width: int, is_sampled: bool
) -> Ranking:
    """Returns the ranking of candidates after `lengths` committed tokens."""
    return Ranking(
        sampling=plan.sampling,
        counts=context.state.seen,
        slots=plan.slots,
        lengths=lengths,
        width=width,
        is_sampled=is_sampled,
        vocabulary=context.model.vocabulary,
    )


def logprobs_of(
    context: StepContext,
    plan: Plan,
    program: Program,
    logits: Float[Tensor, "R share"] | None,
    row_of: Int[Tensor, "B W"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Fields:
    """Returns the logprob fields of a result from this rank's shard of the logits.

    The result is empty if the program has no logprobs.
    """
    if not program.has(ProgramFeature.LOGPROBS):
        return {}
    assert logits is not None  # read by a program with logprobs
    k, vocabulary = context.capacity.max_logprobs, context.model.vocabulary
    given = (logits, row_of, tokens, counts, plan.reports, k, vocabulary)
    reported = logprobs.output_logprobs(*given)
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def with_image_mrope(context: StepContext, plan: Plan, rows: AttentionRows) -> AttentionRows:
    """Adds the M-RoPE positions of text rows that follow the images of their slots."""
    images = context.state.images
    return rows if images is None else with_mrope(rows, images.deltas[plan.slots])
