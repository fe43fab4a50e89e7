"""Drafting in torch without the target's noise, as engines do that do not know it: to be measured.

The text stays that of plain decoding: the target's own choices do not ask how a tree was drafted.
"""

from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from torch_impl.backend import TorchBackend
from torch_impl.device_state import DraftState, Plan
from torch_impl.drafters import Drafted, Drafter, Fed, Prompts, Ranking


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
        self.drafter.prefill(memory, plan, prompts, fed, replace(rank, noise=None))

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
        self.drafter.extend(memory, plan, before, counts, fed, replace(rank, noise=None))

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
        unperturbed = replace(rank, noise=None)
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
