"""Tiles of `attention_layer`, and blocks of the programs of `attention_layer_trees`, equal in both
languages.
"""

from dataclasses import replace
from typing import NamedTuple

from kernels.tile_tables import Table
from kernels.tiles import BLOCKS, MOST_LANES, MOST_TREE_LANES, TREE_LANES, DecodeAttentionTiles

_MOST_WIDE = 16
"""Maximum blocks of the window that share a program of the context."""


class TreeBlocks(NamedTuple):
    """Blocks of the (query head, node) pairs of a request and KV head.

    Attributes:
      rows, blocks: Nodes of a program of the window, and such programs.
      lanes: Pairs of a program of the context.
      wide: Blocks of the window of a program of the context.
      wide_blocks: Programs of the context for each share of its positions.
    """

    rows: int
    blocks: int
    lanes: int
    wide: int
    wide_blocks: int


def attention_layer_tiles(
    table: Table[DecodeAttentionTiles], *, rows: int, nodes: int, **sizes: int
) -> DecodeAttentionTiles | None:
    """Returns the tiles of `attention_layer`; None if there are too many pairs for it.

    Each row of a tree reads the nodes of its own path, so programs of a tree have few pairs.

    Args:
      table: Tiles of `attention_layer`.
      rows: Maximum (query head, row) pairs of a request and KV head.
      nodes: Width of the tree window.
      sizes: Other sizes of the call.
    """
    if rows > (MOST_TREE_LANES if nodes else MOST_LANES):
        return None
    tiles = table.of(rows=rows, nodes=nodes, **sizes)
    if not nodes or tiles.lanes == TREE_LANES:
        return tiles
    return replace(table.of(rows=TREE_LANES, nodes=nodes, **sizes), placed=tiles.placed)


def tree_blocks(
    tiles: DecodeAttentionTiles, *, nodes: int, max_rows: int, group: int
) -> TreeBlocks | None:
    """Returns the blocks; None if `attention_layer` attends to context and window in one program.

    Args:
      tiles: Tile config.
      nodes: Width of the tree window.
      max_rows: Maximum rows of a request.
      group: Query heads per KV head.
    """
    if not nodes or not tiles.context_lanes or group > TREE_LANES:
        return None
    rows = min(tiles.tree_rows, TREE_LANES // group)
    blocks = -(-max_rows // rows)
    if blocks > BLOCKS:  # of which each has a counter
        return None
    wide = min(tiles.context_lanes // (group * rows), _up(blocks), _MOST_WIDE)
    lanes = max(TREE_LANES, _up(wide * rows * group))
    return TreeBlocks(
        rows=rows, blocks=blocks, lanes=lanes, wide=wide, wide_blocks=-(-blocks // wide)
    )


def _up(number: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (number - 1).bit_length()
