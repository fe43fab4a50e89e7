"""Tile classes of the latent attention kernels; `kernels.tiles` reads them from the tables of a
GPU.
"""

from dataclasses import dataclass
from typing import ClassVar

from kernels.tile_tables import check_at_least, check_powers_of_two

LATENT_COLUMNS = 128
"""Maximum latent columns of a loaded block in `latent_attention`."""
COMBINED, COMBINED_COLUMNS, COMBINED_HEADS = 8, 4, 8
"""Splits that `latent_combine` loads per step, and columns and heads of a program."""
SPLIT_LANES, SPLIT_PROGRAMS = 32, 132
"""Maximum lanes and programs of tiles with several programs, which bound the partial results."""
SM90_LANES, SM90_RANK, SM90_ROPE = 64, 512, 64
"""Lanes of a program of `latent_attention_sm90`, and its columns of latents and rope keys."""
SM90_TILE = 64
"""Positions of a tile of it."""


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


@dataclass(frozen=True, kw_only=True)
class LatentAttentionTiles:
    """Tiles of `latent_attention.attend_latent`.

    Attributes:
      lanes: (Row, head) pairs of a program; fewer if a request cannot have that many.
      programs: Programs of a launch. If lanes need fewer, several share the positions of a request
        (split-KV).
      warps, stages: Warps and pipeline stages of the kernel.

    With `SM90_LANES` lanes, `latent_attention_sm90` processes the calls that it supports, and
    programs have `SPLIT_LANES` lanes in others.
    """

    sizes: ClassVar = ("item_bytes", "rows", "requests", "rank")
    """Bytes of an element of q, maximum pairs of a request, requests, and columns of the latent."""

    lanes: int
    programs: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        # WGMMA requires a warpgroup, and its results have at least 16 lanes here.
        check_powers_of_two(self, {"lanes": 16, "warps": 4})
        check_at_least(self, programs=1, stages=1)
        if self.lanes > SM90_LANES:
            raise ValueError(f"lanes must be at most {SM90_LANES}, got {self.lanes}")
        if self.programs > 1 and (self.lanes > SPLIT_LANES or self.programs > SPLIT_PROGRAMS):
            raise ValueError(
                f"tiles with several programs must have at most {SPLIT_LANES} lanes and "
                f"{SPLIT_PROGRAMS} programs, got {self.lanes} and {self.programs}"
            )

    def programs_of(self, pairs: int, requests: int) -> tuple[int, int, int]:
        """Returns the lanes of a program, the blocks of lanes of a request, and the programs that
        share the positions of a block.

        Args:
          pairs: Maximum (row, head) pairs of a request.
          requests: Number of requests.
        """
        lanes = min(self.lanes, SPLIT_LANES, _padded(pairs))
        blocks = -(-pairs // lanes)
        return lanes, blocks, max(1, self.programs // (blocks * requests))


def splits_of(capacity: int, near: int, split: int, far_split: int) -> int:
    """Returns the number of splits of a page table, which bounds the partial results of a lane.

    Args:
      capacity: Positions of a page table.
      near, split, far_split: See `shared.spec.reduction_order.LatentAttentionOrder`.
    """
    near = min(capacity, near)
    return -(-near // split) + -(-(capacity - near) // far_split)


def most_splits(
    pairs: int, requests: int, capacity: int, near: int, split: int, far_split: int
) -> int:
    """Returns the maximum partial results of a lane with any tiles: none if no programs share the
    positions of a block.

    Args:
      pairs: Maximum (row, head) pairs of a request.
      requests: Number of requests.
      capacity, near, split, far_split: See `splits_of`.
    """
    sharing = SPLIT_PROGRAMS // (-(-pairs // SPLIT_LANES) * requests)
    return splits_of(capacity, near, split, far_split) if sharing > 1 else 0


def sm90_blocks(pairs: int, requests: int) -> int:
    """Returns the maximum blocks of `SM90_LANES` lanes of a call.

    Args:
      pairs: (Row, head) pairs of all requests.
      requests: Number of requests; each can have a block with fewer lanes.
    """
    return pairs // SM90_LANES + requests


def latent_bytes(
    pairs: int,
    most_pairs: int,
    requests: int,
    capacity: int,
    rank: int,
    near: int,
    split: int,
    far_split: int,
    *,
    copies_lanes: bool = False,
) -> int:
    """Returns the maximum bytes of partial results, or of blocks of `latent_attention_sm90`, with
    any tiles.

    Args:
      pairs, most_pairs: (Row, head) pairs of all requests, and the maximum of a request.
      requests: Number of requests.
      capacity, near, split, far_split: See `splits_of`.
      rank: Columns of the latent.
      copies_lanes: Whether queries and outputs are copied into blocks and out of them.
    """
    parts = most_splits(most_pairs, requests, capacity, near, split, far_split) * pairs
    has_blocks = most_pairs > SPLIT_LANES and rank == SM90_RANK
    blocks = sm90_blocks(pairs, requests) if has_blocks else 0
    lane = (2 * SM90_RANK + SM90_ROPE) * 2 if copies_lanes else 0
    totals = min(blocks, SPLIT_PROGRAMS) * rank * 4
    return max(parts * (rank + 2) * 4, SM90_LANES * (totals + blocks * lane))


def block_widths(rank: int, rope: int) -> tuple[int, int]:
    """Returns the columns of a loaded block of latents, and of rope keys; powers of two."""
    return min(LATENT_COLUMNS, _padded(rank)), _padded(rope)


def _padded(size: int) -> int:
    """Returns the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
