"""Tile class of MoE blocks; `kernels.tiles` reads it from the tables of a GPU."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kernels.tile_tables import check_at_least, check_powers_of_two


@dataclass(frozen=True, kw_only=True)
class ExpertsTiles:
    """Tiles of a MoE block: of `router.route` and of `experts`.

    Attributes:
      grouped: Whether rows of one expert share a tile (grouped GEMM). Otherwise each slot of a row
        is a tile, and the down GEMM adds a row's slots too.
      slots: Slots of a tile.
      swapped: Swap-AB: outputs, not slots, are the wide side of the tensor core.
      columns, depth: Outputs of a program of the gate-up GEMM, and inputs per step.
      warps, stages: Warps and pipeline stages of its kernel. If TMA copies weights, a warp has at
        least 16 outputs.
      down_columns, down_depth, down_warps, down_stages: The same for the down GEMM.
      sum_columns, sum_warps: Outputs of a program that adds a row's slots, and its warps.
      router_rows, router_depth: Rows of a program that computes logits, of which one selects for
        all, and inputs per step.
      router_warps, router_stages: Warps and pipeline stages of its kernel.
      group_rows: Rows per step of the search for an expert's slots.
      copies_packed: Whether TMA copies blocks of a packed weight, and in Triton of bfloat16 too, if
        a kernel of that form supports the call. The depths are then those of its stages.
    """

    sizes: ClassVar = ("item_bytes", "rows", "inner")
    """Bytes of a weight element, rows of a call, and inner size of an expert."""

    grouped: bool
    slots: int
    swapped: bool
    columns: int
    depth: int
    warps: int
    stages: int
    down_columns: int
    down_depth: int
    down_warps: int
    down_stages: int
    sum_columns: int
    sum_warps: int
    router_rows: int
    router_depth: int
    router_warps: int
    router_stages: int
    group_rows: int
    copies_packed: bool = False

    def __post_init__(self) -> None:
        # Tensor cores require at least 16 of each, and squares are summed by 64.
        least = {"columns": 16, "depth": 16, "warps": 1}
        least |= {"slots": 8 if self.copies_packed else 16}
        of_down = 32 if self.copies_packed else 64
        least |= {"down_columns": of_down, "down_depth": 16, "down_warps": 1}
        least |= {"sum_columns": 64, "sum_warps": 1}
        least |= {"router_rows": 1, "router_depth": 16, "router_warps": 1, "group_rows": 16}
        check_powers_of_two(self, least)
        stages = 2 if self.copies_packed else 1
        check_at_least(self, stages=stages, down_stages=stages, router_stages=1)

    @property
    def loaded(self) -> "ExpertsTiles":
        """Returns the tiles of a kernel that loads blocks of a weight without TMA."""
        if not self.copies_packed:
            return self
        stages, down_stages = min(self.stages, 4), min(self.down_stages, 4)
        return replace(
            self,
            copies_packed=False,
            slots=max(self.slots, 16),
            stages=stages,
            down_stages=down_stages,
            down_columns=max(self.down_columns, 64),
        )
