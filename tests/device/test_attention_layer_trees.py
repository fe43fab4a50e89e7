"""Rows of draft trees in the attention layer, as kernels: bits of plain decoding."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shared.spec.attention_layer import Angles
from tests.support.attention_layer_kernels import (
    SHARED,
    SHORT,
    Found,
    How,
    run_pallas,
    run_triton,
)
from tests.support.cases.attention.attention_layer import PER_ROW, MixCase, tree_case
from tests.support.kernels import INTERPRET, KERNELS

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., Found]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


def decoded(case: MixCase, request: int, row: int) -> MixCase:
    """The row as plain decoding computes it: its ancestors at consecutive positions."""
    nodes = np.flatnonzero(case.rows.window[case.row_starts[request] + row])
    alone = case.only(request, row)
    until, table = int(alone.rows.until[0]), alone.rows.page_table[0]
    page, place = len(case.k_pages[0]), until + np.arange(len(nodes))
    (source, source_at), (target, target_at) = (
        (table[x // page], x % page) for x in (until + nodes, place)
    )
    pools = [x.copy() for x in (case.k_pages, case.v_pages)]
    for old, new in zip((case.k_pages, case.v_pages), pools, strict=True):
        new[target, target_at] = old[source, source_at]
    now = np.full(1, place[-1], np.int32)
    rows = replace(alone.rows, places=now, until=now + 1, window=np.zeros((1, 0), bool))
    return replace(alone, rows=rows, k_pages=pools[0], v_pages=pools[1])


each_config = pytest.mark.parametrize(
    "tiles", [None, {"placed": True}, {"programs": 5, "splits": 1}], ids=str
)


def how_of(tiles: dict | None) -> How:
    chosen = tiles and replace(SHARED, lanes=16, **tiles)
    return How(True, replace(SHORT, split=16), tiles=chosen)


@each_config
def test_tree_row_bits_equal_plain_decoding(tiles: dict | None, run) -> None:
    """Windows cross tiles, so nodes and their positions in plain decoding differ in tile."""
    how = how_of(tiles)
    case = tree_case([16, 9], [27, 105], nodes=16, columns=9, half=not INTERPRET)
    got = run(case, how)
    written = replace(case, k_pages=got.pools[0], v_pages=got.pools[1])
    num_moved = 0
    for request, row in [(0, 5), (0, 11), (0, 15), (1, 4), (1, 8)]:
        alone = decoded(written, request, row)
        if INTERPRET and run is run_pallas:  # XLA rounds arrays of one row otherwise on a CPU
            alone = replace(alone, max_rows=case.max_rows)
        flat = case.row_starts[request] + row
        num_moved += alone.rows.places[0] != case.rows.places[flat]
        np.testing.assert_array_equal(run(alone, how).out[0], got.out[flat])
    assert num_moved >= 4


@each_config
def test_tree_level_bits_equal_whole_tree(tiles: dict | None, run) -> None:
    """Rows of the last nodes only, as in a draft step; the pools have the others."""
    case, how = tree_case([16, 9], [27, 105], nodes=16, columns=9), how_of(tiles)
    whole = run(case, how)
    flat = np.concatenate([np.arange(begin + 6, end) for begin, end in pairwise(case.row_starts)])
    request, places = case.rows.request[flat], case.rows.places[flat]
    at = (case.rows.page_table[request, places // 16], places % 16)
    pools = [x.copy() for x in whole.pools]
    for old, new in zip((case.k_pages, case.v_pages), pools, strict=True):
        new[at] = old[at]
    kept = {name: getattr(case.rows, name)[flat] for name in (*PER_ROW, "request")}
    level = replace(
        case,
        qkv=case.qkv[flat],
        angles=Angles(case.angles.cos[flat], case.angles.sin[flat]),
        rows=replace(case.rows, **kept),
        row_starts=np.array([0, 10, 13], np.int32),
        k_pages=pools[0],
        v_pages=pools[1],
    )
    got = run(level, how)
    np.testing.assert_array_equal(got.out, whole.out[flat])
    np.testing.assert_array_equal(got.pools[:, 1:], whole.pools[:, 1:])
