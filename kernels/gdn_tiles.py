"""Tile classes of GDN and Mamba2 kernels; `kernels.tiles` reads them from the tables of a GPU."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.tile_tables import check_powers_of_two

MOST_TREE_GROUPS = 8
"""Maximum groups of a tree: each has an arrival counter per request and head."""


@dataclass(frozen=True, kw_only=True)
class GDNLayerTiles:
    """Tiles of `gdn_layer`, for GDN and Mamba2.

    Attributes:
      columns: State columns of a program: all if a state has fewer, half for keys of 256.
      warps: Warps of the kernel for chains.
      tree_warps: Same for trees. A program holds two states: of the trunk and of the last visit.
      groups: Programs that share the leaves of a tree. Each visits the paths to its leaves, and
        several may visit the same node.
      prepare_warps: Warps of a separate kernel that prepares rows for the recurrence; 0: none.
      prepare_nodes: Nodes of a program of that kernel.
      commit_columns, commit_warps: Same as `columns` and `warps`, for `commit`.
    """

    sizes: ClassVar = ("nodes", "requests", "delta")
    """Maximum nodes of a request, number of requests, and 1 for GDN, 0 for Mamba2."""

    columns: int
    warps: int
    tree_warps: int
    groups: int
    prepare_warps: int
    prepare_nodes: int
    commit_columns: int
    commit_warps: int

    def __post_init__(self) -> None:
        least = {"columns": 8, "warps": 1}
        least |= {f"commit_{name}": x for name, x in least.items()}
        least |= {"tree_warps": 1, "groups": 1, "prepare_warps": 0, "prepare_nodes": 1}
        check_powers_of_two(self, least)
        if self.groups > MOST_TREE_GROUPS:
            raise ValueError(f"groups must be at most {MOST_TREE_GROUPS}, got {self.groups}")


@dataclass(frozen=True, kw_only=True)
class GDNPrefillTiles:
    """Tiles of `gdn_prefill`.

    Attributes:
      columns: State columns of a program that carries the state; fewer if a head has fewer.
      warps, stages: Warps and pipeline stages of that kernel.
      prepare_warps: Warps of the kernel that prepares chunks.
      rows, row_warps: Rows, up to 64, of a program before and after that kernel, and its warps.
    """

    sizes: ClassVar = ("requests",)
    """Number of requests of a call."""

    columns: int
    warps: int
    stages: int
    prepare_warps: int
    rows: int
    row_warps: int

    def __post_init__(self) -> None:
        # Tensor cores require at least 16 columns.
        least = {"columns": 16, "warps": 1, "prepare_warps": 1, "rows": 1, "row_warps": 1}
        check_powers_of_two(self, least)
        if self.stages < 2:  # Triton 3.6 compiles invalid memory accesses
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.rows > 64:
            raise ValueError(f"rows must be at most 64, got {self.rows}")
