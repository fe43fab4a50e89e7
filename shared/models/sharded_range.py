"""Ranges of a parameter's outputs: those that tensor-parallel ranks share, and those that a
checkpoint stores head by head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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


def section_ranges(sizes: Sequence[int], groups: int) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of a tensor that stores its sections group by group, section by section.

    Args:
      sizes: Outputs of each section in one group, in the order of the tensor.
      groups: Number of groups, such as key heads.
    """
    ends, width = [*accumulate(sizes)], sum(sizes)
    return tuple(
        (group * width + end - size, group * width + end)
        for size, end in zip(sizes, ends, strict=True)
        for group in range(groups)
    )
