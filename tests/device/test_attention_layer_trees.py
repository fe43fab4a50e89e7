"""Rows of draft trees in the attention layer, as kernels: bits of plain decoding."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.boundary.workspace import MOST_PARTS
from shared.spec.attention import with_sliding_window
from shared.spec.attention_layer import Angles
from tests.support.attention_layer_kernels import (
    SHARED,
    SHORT,
    Found,
    How,
    arrays_of,
    call_with,
    given,
    run_pallas,
    run_triton,
)
from tests.support.cases.attention.attention_layer import CASES, PER_ROW, MixCase, tree_case
from tests.support.kernels import INTERPRET, KERNELS, in_languages

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., Found]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


def decoded(case: MixCase, request: int, row: int) -> MixCase:
    """The row as plain decoding computes it: its ancestors at consecutive positions."""
    nodes = np.flatnonzero(case.rows.window[case.row_starts[request] + row])
    alone = case.only(request, row)
    until, table = int(alone.rows.until[0]), alone.rows.page_table[0]
    page, place = len(case.k_pages[0]), max(until, int(alone.rows.first[0])) + np.arange(len(nodes))
    (source, source_at), (target, target_at) = (
        (table[x // page], x % page) for x in (until + nodes, place)
    )
    pools = [x.copy() for x in (case.k_pages, case.v_pages)]
    for old, new in zip((case.k_pages, case.v_pages), pools, strict=True):
        new[target, target_at] = old[source, source_at]
    now = np.full(1, place[-1], np.int32)
    rows = replace(alone.rows, places=now, until=now + 1, window=np.zeros((1, 0), bool))
    return replace(alone, rows=rows, k_pages=pools[0], v_pages=pools[1])


def written_by(case: MixCase, got: Found) -> MixCase:
    """The case after a kernel has written the keys and values of its rows."""
    return replace(case, k_pages=got.pools[0], v_pages=got.pools[1])


def num_moved(case: MixCase, how: How, rows: Sequence[tuple[int, int]], run: Callable) -> int:
    """Checks rows against plain decoding, and counts those that it has at other positions."""
    got, moved = run(case, how), 0
    for request, row in rows:
        alone = decoded(written_by(case, got), request, row)
        if INTERPRET and run is run_pallas:  # XLA rounds arrays of one row otherwise on a CPU
            alone = replace(alone, max_rows=case.max_rows)
        flat = case.row_starts[request] + row
        moved += alone.rows.places[0] != case.rows.places[flat]
        wanted = run(alone, how).out[0]
        np.testing.assert_allclose(wanted, got.out[flat], rtol=0, atol=tolerance_of(how, run))
    return moved


def tolerance_of(how: How, run: Callable) -> float:
    """XLA rounds products of other shapes otherwise on a CPU."""
    is_separate = how.tiles is not None and how.tiles.context_lanes > 0
    return 2e-6 if INTERPRET and run is run_pallas and is_separate else 0


SEPARATE = {"placed": True, "context_lanes": 32, "tree_rows": 3, "path_rows": 2, "programs": 3}
SEPARATE |= {"splits": 1}
"""Separate programs for the context."""
TOGETHER = [None, {"placed": True}, {"programs": 5, "splits": 1}]
ORDER = replace(SHORT, split=16)


def each_config(compiled):
    """Each configuration in Triton, and those of `compiled` in Pallas, which XLA compiles."""
    configs = in_languages([*TOGETHER, SEPARATE], compiled)
    return pytest.mark.parametrize(("run", "tiles"), configs, indirect=["run"], ids=str)


def how_of(tiles: dict | None) -> How:
    return How(True, ORDER, tiles=tiles and replace(SHARED, lanes=16, **tiles))


@each_config([TOGETHER[0], TOGETHER[2]])
def test_tree_row_bits_equal_plain_decoding(tiles: dict | None, run) -> None:
    """Windows cross tiles, so nodes and their positions in plain decoding differ in tile."""
    case = tree_case([16, 9], [27, 105], nodes=16, columns=9, half=not INTERPRET)
    rows = [(0, 5), (0, 11), (0, 15), (1, 4), (1, 8)]
    assert num_moved(case, how_of(tiles), rows, run) >= 4


@pytest.mark.parametrize(
    ("run", "tiles"), in_languages([TOGETHER[2], SEPARATE], TOGETHER), indirect=["run"], ids=str
)
def test_wide_tree_row_bits_equal_plain_decoding(tiles: dict, run) -> None:
    """512 pairs, in 32 programs, and trees of other sizes."""
    sizes = {"nodes": 64, "heads": (8, 1), "columns": 10, "half": not INTERPRET}
    case = tree_case([64, 1, 33], [27, 40, 80], **sizes)
    rows = [(0, 15), (0, 40), (0, 63), (1, 0), (2, 32)]
    assert num_moved(case, how_of(tiles), rows, run) >= 4


@pytest.mark.parametrize(
    ("run", "tiles"), in_languages([None, SEPARATE], TOGETHER), indirect=["run"], ids=str
)
@pytest.mark.parametrize("size", [2, 20])
def test_sliding_window_tree_row_bits_equal_plain_decoding(
    size: int, tiles: dict | None, run
) -> None:
    """The smaller window is shorter than paths of the trees."""
    case = tree_case([16, 9], [27, 105], nodes=16, columns=9, half=not INTERPRET)
    depths = case.rows.window.sum(axis=1)
    case = replace(case, rows=with_sliding_window(case.rows, size))
    rows = [(0, 5), (0, 11), (0, 15), (1, 4), (1, 8)]
    assert any(depths[case.row_starts[request] + row] > 2 for request, row in rows)
    assert num_moved(case, how_of(tiles), rows, run) >= 4


@each_config([TOGETHER[1]])
def test_tree_level_bits_equal_whole_tree(tiles: dict | None, run) -> None:
    """Rows of the last nodes only, as of a draft step; others are in the pools."""
    case, how = tree_case([16, 9], [27, 105], nodes=16, columns=9), how_of(tiles)
    whole = run(case, how)
    starts = case.row_starts
    flat = np.concatenate([np.arange(start + 6, stop) for start, stop in pairwise(starts)])
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


TREES = {name: case for name, case in CASES.items() if case.rows.window.shape[1]}
TOGETHER_TILES = replace(SHARED, lanes=16, placed=True, splits=1)
WIDE = {"context_lanes": 64, "tree_rows": 1, "programs": 5}
SPLITS = How(True, SHORT, 64, replace(TOGETHER_TILES, **SEPARATE))
SPANS = SPLITS._replace(max_parts=2)
MORE_SPANS = How(True, ORDER, 3, replace(TOGETHER_TILES, **WIDE))
SEPARATE_CASES = {f"{name}, splits": (name, SPLITS) for name in TREES}
for _name in ("wide windows", "large pages, many splits", "sinks, many splits"):
    SEPARATE_CASES |= {f"{_name}, spans": (_name, SPANS), f"{_name}, few": (_name, MORE_SPANS)}


@pytest.mark.parametrize(("run", "key"), in_languages(SEPARATE_CASES, ()), indirect=["run"])
def test_tree_separate_programs_bitwise_equal(key: str, run) -> None:
    name, how = SEPARATE_CASES[key]
    want = run(TREES[name], how._replace(tiles=TOGETHER_TILES))
    got, error = run(TREES[name], how), tolerance_of(how, run)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=error)
    np.testing.assert_array_equal(got.pools, want.pools)
    assert not np.asarray(got.arrivals).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("run", "tiles"), in_languages([SEPARATE], ()), indirect=["run"], ids=str)
def test_tree_nan_reaches_only_visible_rows(bad: float, tiles: dict, run) -> None:
    """Rows of one program and step attend to the node, and others do not."""
    case, node, how = CASES["trees"], 2, how_of(tiles)
    qkv = case.qkv.copy()
    qkv[node, -1] = bad
    got, want = run(replace(case, qkv=qkv), how), run(case, how)
    spoiled = case.rows.window[:, node] & (case.rows.request == 0)
    assert 1 <= spoiled.sum() < 6
    np.testing.assert_array_equal(~np.isfinite(got.out).all(axis=1), spoiled)
    np.testing.assert_array_equal(got.out[~spoiled], want.out[~spoiled])


@pytest.mark.parametrize(("D", "gated"), [(128, False), (256, True), (80, False)])
def test_pallas_separate_tree_programs_lower_for_gpu(D: int, gated: bool) -> None:
    sizes = {"D": D, "gated": gated, "page": 64, "half": True}
    case = tree_case([16, 9], [27, 105], nodes=16, columns=9, **sizes)
    how = How(True, tiles=replace(SHARED, lanes=16, **SEPARATE))
    new, attends = given(case, how, "pallas")
    arrays = {
        name: jax.ShapeDtypeStruct(
            x.shape, jnp.bfloat16 if name in ("projected", "kv") else x.dtype
        )
        for name, x in arrays_of(case).items()
        if x is not None
    }
    shape = (len(case.qkv), case.heads.num_kv_heads * case.group, D)
    arrays["q"] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arrays["layer"] = jax.ShapeDtypeStruct((1,), jnp.int32)
    kernel = KERNELS["pallas"]["attention_layer"].attention_layer
    program = jax.jit(partial(call_with, kernel, **new, **attends, max_parts=MOST_PARTS))
    traced = program.trace(arrays)
    # Pallas lowers an atomic addition of an integer array to that of floats.
    assert re.findall(r":(\w+\[.*?\]) = atomic_rmw", str(traced.jaxpr)) == ["i32[]"]
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 1
    assert "attention_layer_trees" in lowered
