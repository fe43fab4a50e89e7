"""Ranges of a parameter's outputs that tensor-parallel ranks share."""

from dataclasses import dataclass

VOCAB_GROUP = 64
"""Neighbouring tokens that stay on one rank: sampling kernels sum their weights as one group."""


@dataclass(frozen=True)
class ShardedRange:
    """A range of a parameter's outputs that is sharded over TP ranks.

    Attributes:
      size: Outputs.
      unit: Outputs that stay together, such as those of a head.
      repeats: True if units are replicated when there are fewer than ranks; otherwise the last
        ranks have fewer outputs, or none.
    """

    size: int
    unit: int = 1
    repeats: bool = False

    def share(self, count: int) -> int:
        """Returns the outputs of each of `count` ranks, including padding of the last ones."""
        return self.unit * -(-self._units // count)

    def run(self, rank: int, count: int) -> tuple[int, int]:
        """Returns the range (first, end) of a rank's outputs."""
        if self.repeats and self._units < count:
            first = self.unit * (rank * self._units // count)
        else:
            first = rank * self.share(count)
        return min(first, self.size), min(first + self.share(count), self.size)

    @property
    def _units(self) -> int:
        return -(-self.size // self.unit)


def vocab_section(vocab: int) -> ShardedRange:
    """Returns the TP section of a vocabulary, split in whole groups."""
    return ShardedRange(vocab, VOCAB_GROUP)
