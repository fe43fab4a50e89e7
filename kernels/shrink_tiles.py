"""Tiles of the shrink and the expand of LoRA adapters; they affect speed only."""

from dataclasses import dataclass

from shared.spec.reduction_order import ShrinkOrder

FEW_ROWS = 32
"""Rows of a GEMM tile that loads several adapters at once."""
ROWS_WITHIN_GEMM = 1
"""Most rows of a shrink within a GEMM of Pallas. For more rows, and in Triton, a kernel of its own
was faster on an H200.
"""
_RANKS_AT_ONCE = 64
"""Ranks of these adapters."""
_SPLIT_ROWS = 128
"""Rows of a call that divides the inputs of a row among programs."""
_DEPTH = 128
_MULTIPROCESSORS, _FEWEST, _MOST_UNITS = 132, 4, 256
"""Multiprocessors, fewest programs and most units of a shrink within a GEMM."""


@dataclass(frozen=True)
class ShrinkTiles:
    """Tiles of a call.

    Attributes:
      rows, ranks, depth: Rows and rows of A of a program, and inputs per step.
      splits: Programs that share the inputs of a row, and partial sums of the result.
      chunks: Chunks of inputs of a program.
      warps, stages: Warps and pipeline stages of the kernel.
    """

    rows: int
    ranks: int
    depth: int
    splits: int
    chunks: int
    warps: int
    stages: int

    @classmethod
    def of(cls, R: int, ranks: int, K: int, order: ShrinkOrder) -> "ShrinkTiles":
        """Returns the tiles for `R` rows, the rows of A of all parts, and `K` inputs."""
        chunks = -(-K // order.chunk)
        if R <= _SPLIT_ROWS:
            rows = min(64, max(16, 1 << (R - 1).bit_length()))
            return cls(rows, 16, _DEPTH, chunks, 1, warps=4, stages=5)
        return cls(64, block_of_ranks(ranks), _DEPTH, 1, chunks, warps=4, stages=3)

    @classmethod
    def of_experts(cls, slots: int, ranks: int, K: int, order: ShrinkOrder) -> "ShrinkTiles":
        """Returns the tiles for the slots of experts in a tile of their GEMMs."""
        chunks = -(-K // order.chunk)
        if slots <= 16:
            return cls(slots, 16, _DEPTH, chunks, 1, warps=4, stages=4)
        return cls(slots, block_of_ranks(ranks), _DEPTH, 1, chunks, warps=4, stages=3)


def block_of_ranks(ranks: int) -> int:
    """Returns the ranks that a program for many rows computes at once."""
    return 64 if ranks % 64 == 0 else 32 if ranks % 32 == 0 else 16


def is_within_gemm(R: int, units: int) -> bool:
    """Returns whether a GEMM of `R` rows computes the shrink, of at most `units` units."""
    return R <= FEW_ROWS and units <= _MOST_UNITS


def programs_ahead(units: int, blocks: int) -> int:
    """Returns the programs of a shrink within a GEMM of some blocks.

    Those of the last, partial wave of blocks leave multiprocessors idle.
    """
    return min(units, max(_FEWEST, -blocks % _MULTIPROCESSORS))


def adapters_at_once(slots: int, rank: int) -> int:
    """Returns the adapters that a GEMM tile of few rows loads at once, of all adapter slots."""
    return max(1, min(slots, _RANKS_AT_ONCE // rank))
