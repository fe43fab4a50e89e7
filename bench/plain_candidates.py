"""Drafting in torch without the target's noise, as engines do that do not know it: to be measured.

The text stays that of plain decoding: the target's own choices do not ask how a tree was drafted.
"""

from dataclasses import dataclass, fields, replace

from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from torch_impl.backend import TorchBackend
from torch_impl.device_state import DraftState, Plan
from torch_impl.drafters import Drafted, Drafter, Fed, Prompts, Ranking
from torch_impl.ops import sampling
from torch_impl.ops.sampling import Ranked


@dataclass(frozen=True)
class PlainRanking(Ranking):
    """Ranks by the processed logits alone, and weighs as without a temperature."""

    @classmethod
    def of(cls, rank: Ranking) -> "PlainRanking":
        """In the place of `rank`."""
        return cls(**{field.name: getattr(rank, field.name) for field in fields(rank)})

    def __call__(
        self, logits: Float[Tensor, "B k vocab"], paths: Int[Tensor, "B k path"], depth: int
    ) -> Ranked:
        """See `Ranking`."""
        # Only of sampled drafts are the processed logits kept; their noise is not asked for.
        found = Ranking.__call__(replace(self, is_sampled=True), logits, paths, depth)
        assert found.processed is not None
        ids = sampling.top_candidates(found.processed, self.width)
        weights = sampling.log_softmax(found.processed).gather(1, ids.long())
        kept = found.processed if self.is_sampled else None
        return Ranked(ids.view_as(found.ids), weights.view_as(found.weights), kept)

    def chain(
        self, logits: Float[Tensor, "B S vocab"], is_weighed: bool
    ) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
        """See `Ranking`; each the likeliest of its place."""
        drafts, _, processed = Ranking.chain(replace(self, is_sampled=True), logits, False)
        assert processed is not None  # of sampled drafts
        weights = processed.log_softmax(dim=2).gather(2, drafts.long()[:, :, None])[:, :, 0]
        return drafts, weights if is_weighed else None, processed if self.is_sampled else None


@dataclass(frozen=True)
class PlainCandidates:
    """A `torch_impl.drafters.Drafter` whose candidates are another one's likeliest tokens."""

    drafter: Drafter

    @property
    def streams(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self.drafter.streams

    @property
    def sizes(self) -> DraftSizes:
        """See `Drafter`."""
        return self.drafter.sizes

    def prefill(
        self, memory: DraftState, plan: Plan, prompts: Prompts, fed: Fed, rank: Ranking
    ) -> None:
        """See `Drafter`."""
        self.drafter.prefill(memory, plan, prompts, fed, PlainRanking.of(rank))

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        fed: Fed,
        rank: Ranking,
    ) -> None:
        """See `Drafter`."""
        self.drafter.extend(memory, plan, before, counts, fed, PlainRanking.of(rank))

    def draft(
        self,
        memory: DraftState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        shape: TreeShape,
        rank: Ranking,
    ) -> Drafted:
        """See `Drafter`."""
        unperturbed = PlainRanking.of(rank)
        return self.drafter.draft(memory, plan, newest, lengths, shape, unperturbed)


def rank_plainly(backend: TorchBackend) -> None:
    """Makes a backend that has not run a step draft without noise.

    Raises:
      ValueError: Nothing drafts on its device.
    """
    machine = backend._queue._machine
    if machine.drafter is None:
        raise ValueError("candidates=plain needs a drafter on the device")
    backend._queue._machine = replace(machine, drafter=PlainCandidates(machine.drafter))
