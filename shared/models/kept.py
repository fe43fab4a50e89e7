"""What layers keep between steps: named arrays, a piece of each for every position or every slot.

The memory plan counts them, and both backends allocate them.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod


class Per(Enum):
    """What a piece of a plane belongs to."""

    POSITION = "a position of a text, in the pages of its request"
    SLOT = "a running request, and each snapshot of one"


@dataclass(frozen=True)
class Plane:
    """One array that each layer of a kind keeps.

    Attributes:
      name: What it holds.
      per: What has a piece of it.
      shape: Of a piece.
      heads: The axis of `shape` along which ranks share it.
      float32: Kept in float32 whatever the type of the model.
    """

    name: str
    per: Per
    shape: tuple[int, ...]
    heads: int
    float32: bool = False

    def piece_bytes(self, item: int) -> int:
        """Bytes of a piece in one layer; `item` are those of a number in the model's type."""
        return prod(self.shape) * (4 if self.float32 else item)


def kept_bytes(planes: tuple[Plane, ...], item: int) -> int:
    """Bytes of a piece of all planes in one layer."""
    return sum(plane.piece_bytes(item) for plane in planes)
