"""Which of the ranks that run a model together a backend is."""

from dataclasses import dataclass, replace
from typing import Any

from shared.boundary.mailboxes import Mailboxes


@dataclass(frozen=True)
class Ranks:
    """A rank among those that run one model, each with its share of every product's outputs.

    Attributes:
      rank: Which of them; 0 has the engine. Of ranks that are devices of one process it is 0.
      count: How many there are.
      mailboxes: Through which processes on one host exchange what they compute on a CPU; None where
        there is one rank, or where ranks are devices of one process.
      meeting: Where ranks of hosts that share no memory find each other, as host:port; None where
        they do share it.
      on_device: What a backend has made on this rank's GPU, by which its steps exchange there.

    Raises:
      ValueError: There is no such rank, or mailboxes are of another number of ranks.
    """

    rank: int
    count: int
    mailboxes: Mailboxes | None
    meeting: str | None = None
    on_device: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"a rank must be 0 to {self.count - 1}, got {self.rank}")
        if self.mailboxes is not None and self.mailboxes.count != self.count:
            raise ValueError(
                f"the mailboxes are of {self.mailboxes.count} ranks, not of {self.count}"
            )

    def on(self, device: Any) -> "Ranks":
        """The same ranks, which exchange by what a backend has made on a GPU."""
        return replace(self, on_device=device)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.count == 1


ALONE = Ranks(0, 1, None)
"""The rank of a model that one device runs."""
