"""Limits of the kernels of both backends, as plain data that startup checks without a GPU."""

from kernels.latent_tiles import SM90_RANK, SM90_ROPE, SM90_TILE
from shared.spec.reduction_order import SQUARES

HEAD_SIZES = (*range(16, 257, 16), 512)
"""Attention head dimensions: multiples of 16, the fewest columns that tensor cores support."""

DELTA_SIZES = (16, 32, 64, 128)
"""Key and value sizes of a GDN head, and head sizes of Mamba2."""

MAMBA2_STATE_SIZES = (*DELTA_SIZES, 256)
"""State sizes of a Mamba2 head."""

LATENT_COLUMNS = (512, 64)
"""Maximum columns of latents and of rope keys: shared memory of a block has two tiles of them."""

MOST_NODES = 64
"""Maximum nodes of a tree: the bits of one or two words in `attention_layer` and `gdn_layer`."""

EXPERTS_UNIT = 16
"""Unit of the inputs and intermediate sizes of experts."""

MOST_SEPARATE_BLOCKS = 512
"""Maximum blocks of a GEMM with programs for each segment, which counts arrivals at each block."""

MOST_ROW_WARPS = 8
"""Maximum warps of a program that reads one row."""

MOST_VALUE_ROWS = 256
"""Maximum rows of `norm_values` in one kernel: of many rows, a norm and a copy are faster."""


def row_warps(size: int) -> int:
    """Returns the warps of a program that reads one row of `size` elements: a power of two."""
    return 1 << (max(1, min(MOST_ROW_WARPS, size // 512)).bit_length() - 1)


def arrivals_of_experts(rows: int, hidden: int) -> int:
    """Returns the number of arrival counters of an MoE block, zero before and after a launch."""
    return rows * -(-hidden // SQUARES.chunk)


def fits_latent_sm90(page: int, size: int, nodes: int, rank: int, tile: int) -> bool:
    """Returns whether `latent_attention_sm90` supports the sizes: 512 latent columns and 64 of rope
    keys, pages of whole tiles, rows without tree windows.

    Args:
      page: Positions of a page.
      size, rank: Columns of a cached row, and of its latent.
      nodes: Width of the tree window.
      tile: Positions of a tile.
    """
    is_wide = (rank, size) == (SM90_RANK, SM90_RANK + SM90_ROPE)
    return is_wide and tile == SM90_TILE and page % tile == 0 and nodes == 0
