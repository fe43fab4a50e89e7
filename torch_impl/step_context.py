"""Context shared by all steps, the record of one step, and functions of several kinds of steps."""

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
    """Context of all steps.

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


@dataclass(frozen=True)
class Step:
    """One step of any kind that has rows, which is any kind but an encode step.

    Attributes:
      context: Context of all steps.
      plan: Plan of the step, on the device.
      program: Sizes and features for which the step is captured.
      lengths: Number of committed tokens of each row before the step.
    """

    context: StepContext
    plan: Plan
    program: Program
    lengths: Int[Tensor, " B"]

    @classmethod
    def of(cls, context: StepContext, plan: Plan, program: Program) -> "Step":
        """Builds the record of a step; a prompt chunk begins at the length of its row."""
        prompt = plan.prompt
        lengths = context.state.lengths[plan.slots] if prompt is None else prompt.first_positions
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


def ranking(step: Step, lengths: Int[Tensor, " B"], width: int, is_sampled: bool) -> Ranking:
    """Returns the ranking of candidates after `lengths` committed tokens."""
    return Ranking(
        sampling=step.plan.sampling,
        counts=step.context.state.seen,
        slots=step.plan.slots,
        lengths=lengths,
        width=width,
        is_sampled=is_sampled,
        vocabulary=step.context.model.vocabulary,
    )


def logprobs_of(
    step: Step,
    logits: Float[Tensor, "R share"] | None,
    row_of: Int[Tensor, "B W"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
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


def adapter_slots(step: Step, request: Int[Tensor, " R"]) -> Int[Tensor, " R"] | None:
    """Returns the adapter slot of each row, or None if the program takes none.

    Args:
      step: The step.
      request: Row of the plan of each flat row.
    """
    adapters = step.plan.adapters
    return None if adapters is None else adapters[request]


def mrope_deltas(step: Step) -> Int[Tensor, " B"] | None:
    """Returns the M-RoPE position delta of each row, or None for a text-only model."""
    images = step.context.state.images
    return None if images is None else images.deltas[step.plan.slots]


def with_image_mrope(step: Step, rows: AttentionRows) -> AttentionRows:
    """Adds the M-RoPE positions of text rows that follow the images of their slots."""
    deltas = mrope_deltas(step)
    return rows if deltas is None else with_mrope(rows, deltas)
