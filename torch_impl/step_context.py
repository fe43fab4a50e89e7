"""What all kinds of step work with, and what more than one of them does."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.backend import Capacity
from shared.boundary.program import Extra, Program, Work
from torch_impl.device_state import DeviceState, Fields, Plan
from torch_impl.drafters import Drafter, Ranking
from torch_impl.model import Model
from torch_impl.model_weights import TowerWeights
from torch_impl.ops.attention.attention import Rows, turned
from torch_impl.ops.sampling import logprobs


@dataclass(frozen=True)
class Machine:
    """All that a step works with.

    Attributes:
      model: The target.
      drafter: None without one.
      tower: Of a model that sees; None without one.
      capacity: What exists.
      state: The memory of all slots and pages.
    """

    model: Model
    drafter: Drafter | None
    tower: TowerWeights | None
    capacity: Capacity
    state: DeviceState

    def feeds(self, program: Program) -> bool:
        """Whether the drafter follows a step; plain decoding leaves a hole in its KV instead."""
        is_prefill = program.work is Work.PREFILL
        return self.drafter is not None and (is_prefill or not program.shape.is_plain)

    def samples(self, program: Program) -> bool:
        """Whether drafts are sampled from the drafter, and judged by a rejection rule."""
        return program.drafts_on_device and self.capacity.accept_rule != "exact"

    def streams(self, program: Program) -> tuple[int, ...]:
        """The residual streams that a step keeps for the drafter."""
        return self.drafter.streams if self.drafter is not None and self.feeds(program) else ()


def ranking(
    machine: Machine, plan: Plan, lengths: Int[Tensor, " B"], width: int, is_sampled: bool
) -> Ranking:
    """How candidates are ranked after `lengths` committed tokens."""
    return Ranking(
        sampling=plan.sampling,
        counts=machine.state.seen,
        slots=plan.slots,
        lengths=lengths,
        width=width,
        is_sampled=is_sampled,
        vocabulary=machine.model.vocabulary,
    )


def logprobs_of(
    machine: Machine,
    plan: Plan,
    program: Program,
    logits: Float[Tensor, "R share"] | None,
    row_of: Int[Tensor, "B W"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Fields:
    """What a result tells of the tokens, from the logits that this rank has a part of."""
    if not program.has(Extra.LOGPROBS):
        return {}
    assert logits is not None  # a program that has logprobs reads them
    k, vocabulary = machine.capacity.max_logprobs, machine.model.vocabulary
    given = (logits, row_of, tokens, counts, plan.reports, k, vocabulary)
    reported = logprobs.reported(*given)
    return dict(zip(("chosen", "top_ids", "top_values"), reported, strict=True))


def behind_pictures(machine: Machine, plan: Plan, rows: Rows) -> Rows:
    """Rows of text, turned as those of a model that sees, behind the pictures of their slots."""
    pictures = machine.state.pictures
    return rows if pictures is None else turned(rows, pictures.deltas[plan.slots])
