"""The order of sums: what of a GPU kernel's cut decides the bits of its results.

A float32 sum depends on the order of its terms. An order is therefore part of the numerics, like a
formula: it is the same in both languages, for every GPU and for every batch, and is never tuned.
What only decides how fast the same sums are found is a kernel's tiles (`kernels/tiles.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionOrder:
    """The order of the sums over the positions of a row, of `shared.spec.attention.attend`.

    The positions are cut into splits, a split into tiles, both from position 0 on, so that the cut
    depends on nothing but where the row stands. The tiles of a split are summed one after the
    other, and then the splits.

    Attributes:
      split: Positions of a split.
      tile: Positions of a tile.
      tile_float32: The same in float32, which is for comparisons: without a matrix unit, large
        tiles take minutes to compile.
    """

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

    def tile_of(self, item_bytes: int) -> int:
        """Positions of a tile for keys of so many bytes each."""
        return self.tile_float32 if item_bytes == 4 else self.tile


ATTENTION = AttentionOrder(split=512, tile=64, tile_float32=16)
