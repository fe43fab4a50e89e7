"""Cache specifications: the arrays that each layer keeps between steps, with one entry per KV
position or per request slot.

The memory plan counts them, and both backends allocate them.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod

from shared.models.sharded_range import ShardedRange

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by the dtype of a model."""


class CacheUnit(Enum):
    """Unit that has one entry of a cache array."""

    POSITION = "a position of a request, stored in its pages"
    SLOT = "a running request or a snapshot"


@dataclass(frozen=True)
class ColumnSection:
    """Columns of a cache entry that TP ranks share; an entry is `[rows, columns]`.

    Attributes:
      size: Number of columns of the whole model.
      units: Heads or other units of these columns, which ranks divide; units fewer than ranks are
        replicated, each on consecutive ranks. None if every rank has all columns.
    """

    size: int
    units: int | None

    def copies(self, count: int) -> int:
        """Returns the consecutive ranks, of `count`, that have the same columns."""
        return count if self.units is None else max(1, count // self.units)

    def share(self, count: int) -> int:
        """Returns the columns of one of `count` ranks."""
        return self.size * self.copies(count) // count


@dataclass(frozen=True)
class CacheArraySpec:
    """Specification of one cache array of a layer.

    Attributes:
      name: Name of the contents.
      per: Unit that has one entry.
      shape: Shape of an entry.
      heads: Axis of `shape` that is sharded over TP ranks; None if every rank has the whole array.
      float32: True if stored in float32 whatever the dtype of the model.
      ranges: Consecutive ranges of the sharded axis, if each of them is sharded by itself; empty if
        the axis is sharded as a whole.
    """

    name: str
    per: CacheUnit
    shape: tuple[int, ...]
    heads: int | None
    float32: bool = False
    ranges: tuple[ShardedRange, ...] = ()

    @property
    def sections(self) -> tuple[ColumnSection, ...]:
        """Sections of the columns of an entry: columns begin at the sharded axis."""
        if self.heads is None:
            return (ColumnSection(prod(self.shape), None),)
        per_unit = prod(self.shape[self.heads + 1 :])
        ranges = self.ranges or (ShardedRange(self.shape[self.heads]),)
        return tuple(ColumnSection(x.size * per_unit, x.size // x.unit) for x in ranges)

    def piece_bytes(self, item: int) -> int:
        """Returns the bytes of an entry in one layer; `item` is the element size of the model's
        dtype.
        """
        return prod(self.shape) * (4 if self.float32 else item)


def cache_bytes(arrays: tuple[CacheArraySpec, ...], item: int) -> int:
    """Returns the bytes of an entry of all arrays in one layer."""
    return sum(array.piece_bytes(item) for array in arrays)
