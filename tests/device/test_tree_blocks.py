"""Blocks of the programs of `attention_layer_trees`, and the tiles that select it."""

import pytest

from kernels.tile_tables import Line, Table
from kernels.tiles import TREE_LANES, DecodeAttentionTiles
from kernels.tree_blocks import attention_layer_tiles, tree_blocks


def tree_tiles(**changes: int) -> DecodeAttentionTiles:
    fields = {"lanes": 16, "programs": 4, "splits": 1, "ones": 32, "placed": True}
    fields |= {"described": False, "warps": 4, "stages": 2, "registers": 0, "context_lanes": 32}
    return DecodeAttentionTiles(**fields | changes)


@pytest.mark.parametrize(
    ("tree_rows", "context_lanes", "max_rows", "group", "blocks"),
    [
        (2, 32, 32, 4, (2, 16, 32, 4, 4)),
        (2, 64, 33, 4, (2, 17, 64, 8, 3)),
        (3, 32, 16, 4, (3, 6, 32, 2, 3)),
        (8, 16, 16, 16, (1, 16, 16, 1, 16)),
        (4, 32, 3, 4, (4, 1, 16, 1, 1)),
        (1, 64, 64, 1, (1, 64, 16, 16, 4)),
    ],
)
def test_tree_blocks_cover_pairs(tree_rows, context_lanes, max_rows, group, blocks) -> None:
    tiles = tree_tiles(tree_rows=tree_rows, context_lanes=context_lanes)
    got = tree_blocks(tiles, nodes=64, max_rows=max_rows, group=group)
    assert got == blocks
    assert got.rows * group <= TREE_LANES
    assert got.wide * got.rows * group <= got.lanes


@pytest.mark.parametrize(
    ("nodes", "max_rows", "group", "context_lanes"),
    [(0, 16, 4, 32), (64, 65, 4, 32), (64, 16, 17, 32), (64, 16, 4, 0)],
)
def test_tree_blocks_of_unsupported_rows_none(nodes, max_rows, group, context_lanes) -> None:
    tiles = tree_tiles(context_lanes=context_lanes)
    assert tree_blocks(tiles, nodes=nodes, max_rows=max_rows, group=group) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"placed": False}, "tiles with context_lanes must be placed"),
        ({"context_lanes": 48}, "context_lanes must be one of 0, 16, 32, 64, got 48"),
        ({"path_rows": 3}, "path_rows must be a power of two from 1, got 3"),
        ({"tree_rows": 0}, "tree_rows must be at least 1, got 0"),
        ({"path_stages": 0}, "path_stages must be at least 1, got 0"),
    ],
)
def test_tree_tiles_reject_invalid_values(changes: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        tree_tiles(**changes)


def test_attention_layer_tiles_of_trees_use_own_line() -> None:
    chains = Line({"nodes": 0}, tree_tiles(context_lanes=0))
    table = Table((chains, Line({}, tree_tiles())))
    sizes = {"item_bytes": 2, "rows": 128, "requests": 1, "head_size": 128}
    for nodes, lanes in ((0, 0), (32, 32)):
        tiles = attention_layer_tiles(table, nodes=nodes, **sizes)
        assert tiles is not None
        assert tiles.context_lanes == lanes
