"""Cache specifications: the arrays that each layer keeps between steps, with one entry per KV
position or per request slot.

The memory plan counts them, and both backends allocate them.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by the dtype of a model."""


class CacheUnit(Enum):
    """Unit that has one entry of a cache array."""

    POSITION = "a position of a request, stored in its pages"
    SLOT = "a running request or a snapshot"


@dataclass(frozen=True)
class CacheArraySpec:
    """Specification of one cache array of a layer.

    Attributes:
      name: Name of the contents.
      per: Unit that has one entry.
      shape: Shape of an entry.
      heads: Axis of `shape` that is sharded over TP ranks; None if every rank has the whole array.
      float32: True if stored in float32 whatever the dtype of the model.
    """

    name: str
    per: CacheUnit
    shape: tuple[int, ...]
    heads: int | None
    float32: bool = False

    def piece_bytes(self, item: int) -> int:
        """Returns the bytes of an entry in one layer; `item` is the element size of the model's
        dtype.
        """
        return prod(self.shape) * (4 if self.float32 else item)


def cache_bytes(planes: tuple[CacheArraySpec, ...], item: int) -> int:
    """Returns the bytes of an entry of all arrays in one layer."""
    return sum(plane.piece_bytes(item) for plane in planes)
