"""The order of sums: what of a GPU kernel's cut decides the bits of its results.

A float32 sum depends on the order of its terms. An order is therefore part of the numerics, like a
formula: it is the same in both languages, for every GPU and for every batch, and is never tuned.
What only decides how fast the same sums are found is a kernel's tiles (`kernels/tiles.py`).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32


@dataclass(frozen=True, kw_only=True)
class AttentionOrder:
    """The order of the sums over the positions of a row, of `shared.spec.attention.attend`.

    The positions are cut into spans, a span into splits, a split into tiles, all from position 0
    on, so that the cut depends on nothing but where the row stands. The tiles of a split are summed
    one after the other, then the splits of a span, and then the spans.

    Attributes:
      span: Positions of a span.
      split: Positions of a split.
      tile: Positions of a tile.
      tile_float32: The same in float32, which is for comparisons: without a matrix unit, large
        tiles take minutes to compile.
    """

    span: int
    split: int
    tile: int
    tile_float32: int

    def __post_init__(self) -> None:
        for name in ("tile", "tile_float32"):
            tile = getattr(self, name)
            if tile < 16 or tile & (tile - 1):
                raise ValueError(f"{name} must be a power of two from 16, got {tile}")
            if self.split < tile or self.split % tile:
                raise ValueError(f"split must be a multiple of {name} {tile}, got {self.split}")
        if self.span < self.split or self.span % self.split:
            raise ValueError(f"span must be a multiple of split {self.split}, got {self.span}")

    def sizes_for(self, item_bytes: int) -> dict[str, int]:
        """Positions of a span, a split and a tile for keys of so many bytes each."""
        tile = self.tile_float32 if item_bytes == 4 else self.tile
        return {"span": self.span, "split": self.split, "tile": tile}


ATTENTION = AttentionOrder(span=2048, split=128, tile=64, tile_float32=16)


@dataclass(frozen=True, kw_only=True)
class SquaresOrder:
    """How the squares of a row are summed so that their order does not matter.

    A row is cut into chunks. In a chunk each square becomes a whole number of units, a unit being a
    power of two below the largest square; whole numbers have the same sum in any order. The sums of
    the chunks, float32 again, are added in the same way. The unit follows the row, so that neither
    an embedding of 1e-3 nor a channel of 3e4 loses digits.

    Attributes:
      chunk: Columns of a chunk.
      digits: Binary digits of the largest square of a chunk, in units.
      digits_of_chunks: Binary digits of the largest chunk of a row, in units.
    """

    chunk: int
    digits: int
    digits_of_chunks: int


SQUARES = SquaresOrder(chunk=64, digits=21, digits_of_chunks=20)
"""So that an int32 holds the sum of 256 squares, and that of 512 chunks."""


def sum_in_units(x: Float32[np.ndarray, "... terms"], digits: int) -> Float32[np.ndarray, "..."]:
    """Adds terms that are not negative, in units of the largest; see `SquaresOrder`."""
    exponent = np.clip(x.max(axis=-1).view(np.int32) >> 23, digits + 1, 254)
    scale = ((digits + 254 - exponent) << 23).astype(np.int32).view(np.float32)
    unit = ((exponent - digits) << 23).astype(np.int32).view(np.float32)
    units = np.floor(x * scale[..., None] + np.float32(0.5)).astype(np.int32)
    return units.sum(axis=-1, dtype=np.int32).astype(np.float32) * unit


def chunks_of_squares(x: Float32[np.ndarray, "R size"]) -> Float32[np.ndarray, "R chunks"]:
    """The sum of the squares of each chunk of a row; the last chunk may be shorter."""
    spare = -x.shape[1] % SQUARES.chunk
    padded = np.pad(x * x, ((0, 0), (0, spare))).reshape(len(x), -1, SQUARES.chunk)
    return sum_in_units(padded, SQUARES.digits)


def sum_of_squares(x: Float32[np.ndarray, "R size"]) -> Float32[np.ndarray, " R"]:
    """The sum of the squares of each row, by its chunks."""
    return sum_in_units(chunks_of_squares(x), SQUARES.digits_of_chunks)


@dataclass(frozen=True, kw_only=True)
class RouterOrder:
    """The order of the sums by which a row chooses its experts.

    Attributes:
      segments: The inputs are cut into so many segments, as long as each other but for the last
        ones. A segment is added in one chain, and then the segments in their order.
      digits: Binary digits of the largest weight, in the units that weights are added in; see
        `SquaresOrder`.
    """

    segments: int
    digits: int

    def segment(self, inputs: int) -> int:
        """Inputs of a segment: a multiple of what a matrix unit adds at once."""
        return 16 * -(-inputs // (16 * self.segments))


ROUTER = RouterOrder(segments=4, digits=20)
"""So that an int32 holds the sum of 1,024 weights, of which the largest is 1."""
