"""Tile classes of the latent attention kernels; `kernels.tiles` reads them from the tables of a
GPU.
"""

from dataclasses import dataclass
from typing import ClassVar

from kernels.tile_tables import check_at_least, check_powers_of_two


@dataclass(frozen=True, kw_only=True)
class HeadProductTiles:
    """Tiles of `head_product`.

    Attributes:
      rows, columns: Rows and outputs of a program, all of one head; fewer if a call has fewer.
      depth: Inputs per step; fewer if the inputs are no multiple of it.
      warps, stages: Warps and pipeline stages of the kernel.
    """

    sizes: ClassVar = ("item_bytes", "rows", "heads", "outputs")
    """Bytes of a weight element, rows and heads of a call, and outputs of a head."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        # Tensor cores require at least 16 of each.
        check_powers_of_two(self, {"rows": 16, "columns": 16, "depth": 16, "warps": 1})
        check_at_least(self, stages=1)

    def block_of(self, rows: int, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Returns the rows and outputs of a program, and the inputs per step, of a call."""
        return (
            min(self.rows, _padded(rows)),
            min(self.columns, _padded(outputs)),
            min(self.depth, max(16, inputs & -inputs)),
        )


def _padded(size: int) -> int:
    """Returns the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
