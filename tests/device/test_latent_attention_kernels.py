"""Latent attention kernels against the specification: on a GPU, or interpreted."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.latent_tiles import LatentAttentionTiles
from kernels.pallas_gpu.attention import latent_attention as pallas
from kernels.tiles import MEASURED, Tiles
from shared.spec.reduction_order import LATENT_ATTENTION, LatentAttentionOrder
from tests.support.attend_latent_cases import (
    CASES,
    AttendCase,
    attend_case,
    specified,
)
from tests.support.cases.attention.attention import Case, prompt_case, tree_case
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU, in_languages, in_pallas

pytestmark = pytest.mark.usefixtures("interpreted")

# Float32 on both sides: the sums have another order, and a GPU's exp2 errs by some 1e-7.
FLOAT32 = 1e-5
pallas_attend = jax.jit(
    partial(pallas.attend_latent, interpret=INTERPRET),
    static_argnames=("rank", "max_rows", "near", "split", "far_split", "tile", "scale", "tiles"),
    compiler_options=AS_WRITTEN,
)
TILES = {name: Tiles.load(f"{name}_gpu", MEASURED).latent_attention for name in KERNELS}
Run = Callable[..., np.ndarray]


def settings(
    kernel: str,
    case: AttendCase,
    order: LatentAttentionOrder,
    changes: dict[str, int],
) -> dict:
    """Returns keyword arguments of a kernel, as `ops` does or with other tiles."""
    rows, item_bytes = case.rows, 2 if case.rows.half else 4
    pairs, requests = rows.max_rows * rows.q.shape[1], len(rows.page_table)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "requests": requests, "rank": case.rank}
    return {
        "rank": case.rank,
        "max_rows": rows.max_rows,
        **order.sizes_for(item_bytes),
        "scale": case.scale,
        "tiles": replace(TILES[kernel].of(**sizes), **changes),
    }


def arrays_of(case: AttendCase) -> dict[str, np.ndarray]:
    """Returns queries, pools with the case's layer between two without numbers, and rows."""
    rows, none = case.rows, np.full_like(case.rows.k_pages, np.nan)
    names = ("q", "page_table", "row_starts", "first", "until", "window")
    pool = np.stack([none, rows.k_pages, none])[:, None]
    return {"pool": pool, **{name: getattr(rows, name) for name in names}}


def run_pallas(case: AttendCase, order: Any = LATENT_ATTENTION, **changes: int) -> np.ndarray:
    arrays, layer = arrays_of(case), jnp.ones(1, jnp.int32)
    dtype = jnp.bfloat16 if case.rows.half else jnp.float32
    arrays |= {name: jnp.asarray(arrays[name], dtype) for name in ("q", "pool")}
    given = settings("pallas", case, order, changes)
    return np.asarray(pallas_attend(layer=layer, **arrays, **given), np.float32)


def run_triton(case: AttendCase, order: Any = LATENT_ATTENTION, **changes: int) -> np.ndarray:
    device = "cuda" if ON_GPU else "cpu"
    # Triton's interpreter computes nonsense in bfloat16.
    dtype = (torch.bfloat16 if ON_GPU else torch.float16) if case.rows.half else torch.float32
    arrays = {name: torch.tensor(x).to(device) for name, x in arrays_of(case).items()}
    arrays |= {name: arrays[name].to(dtype) for name in ("q", "pool")}
    attend = KERNELS["triton"]["latent_attention"].attend_latent
    out = attend(layer=1, **arrays, **settings("triton", case, order, changes))
    return out.float().cpu().numpy()


RUNS: dict[str, Run] = {"pallas": run_pallas, "triton": run_triton}


@pytest.fixture(params=in_pallas(KERNELS, {"triton"}))
def run(request: pytest.FixtureRequest) -> Run:
    """The kernels of both; Pallas is interpreted in the matrix, and by default in its own tests."""
    return RUNS[request.param]


TREE = CASES["tree"]
ALONE, SHARED = {"programs": 1}, {"programs": 64}
FAR = replace(LATENT_ATTENTION, near=512, far_split=256)
"""Order with far splits in short requests."""


@pytest.mark.parametrize("changes", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(
    ("language", "name"), in_languages(CASES, {"tree", "padded latent", "half precision"})
)
def test_latent_attention_matches_spec(language: str, name: str, changes: dict[str, int]) -> None:
    case = CASES[name]
    # Half precision: weights (at most 1) and results (below 4 here) have 8 bits.
    tolerance = 2e-2 if case.rows.half else FLOAT32
    got = RUNS[language](case, **changes)
    np.testing.assert_allclose(got, specified(case), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("changes", "near"),
    [(ALONE, 8192), ({"programs": 6}, 256), ({"lanes": 32, "programs": 12}, 512)],
    ids=["alone", "two programs, far splits", "wide, far splits"],
)
def test_latent_attention_bits_independent_of_programs(
    changes: dict[str, int], near: int, run: Run
) -> None:
    case, order = CASES["large pages, many splits"], replace(FAR, near=near)
    np.testing.assert_array_equal(run(case, order, **changes), run(case, order))


def only(case: AttendCase, request: int, rows: slice, start: int = 0) -> AttendCase:
    """Returns some rows of a request, as a batch of their own; the last row is padding."""
    given = case.rows
    taken = [given.q, given.first, given.until, given.window]
    q, first, until, window = (np.concatenate([x[rows], x[:1] * 0]) for x in taken)
    count = len(q) - 1
    alone = Case(
        q=q,
        k_pages=given.k_pages,
        v_pages=given.v_pages,
        page_table=given.page_table[request : request + 1],
        row_starts=np.array([0, count], np.int32),
        first=first,
        until=until,
        window=window,
        max_rows=count,
        half=given.half,
    )
    return replace(case, rows=alone)


@pytest.mark.parametrize("changes", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("language", KERNELS)
def test_latent_attention_row_is_batch_invariant(changes: dict[str, int], language: str) -> None:
    case, run = CASES["half precision"], RUNS[language]
    together = run(case)
    starts = case.rows.row_starts
    for request, row in [(0, starts[1] - 1), (1, starts[1] + 1), (2, starts[2])]:
        alone = run(only(case, request, slice(row, row + 1)), **changes)
        np.testing.assert_array_equal(alone[0], together[row])


def decoded(case: AttendCase, request: int, row: int) -> AttendCase:
    """Returns a row as plain decoding computes it: its ancestors at consecutive positions."""
    rows = only(case, request, slice(row, row + 1)).rows
    nodes, until = np.flatnonzero(rows.window[0]), int(rows.until[0])
    page, places = rows.k_pages.shape[1], until + np.arange(len(nodes))
    (source, source_at), (target, target_at) = (
        (rows.page_table[0, x // page], x % page) for x in (until + nodes, places)
    )
    pages = rows.k_pages.copy()
    pages[target, target_at] = rows.k_pages[source, source_at]
    end = rows.until + np.array([len(nodes), 0], np.int32)
    rows = replace(rows, k_pages=pages, until=end, window=np.zeros((2, 0), bool))
    return replace(case, rows=rows)


@pytest.mark.parametrize("changes", [ALONE, SHARED, ALONE | {"lanes": 32}], ids=str)
def test_latent_tree_row_bits_equal_plain_decoding(changes: dict[str, int], run: Run) -> None:
    """Windows cross tiles and splits, so nodes and their positions in decoding differ in both."""
    order = replace(LATENT_ATTENTION, near=256, split=64, far_split=256)
    lengths, how = [59, 505], {"nodes": 40, "columns": 35, "half": not INTERPRET}
    case = attend_case(tree_case, 5, (32, 16), num_nodes=[40, 9], lengths=lengths, **how)
    got, starts, num_moved = run(case, order, **changes), case.rows.row_starts, 0
    for request, row in [(0, 5), (0, 15), (0, 39), (1, 4), (1, 8)]:
        flat = starts[request] + row
        alone = decoded(case, request, flat)
        if INTERPRET:  # products of fewer lanes are rounded otherwise on a CPU
            alone = replace(alone, rows=replace(alone.rows, max_rows=case.rows.max_rows))
        num_moved += alone.rows.until[0] != lengths[request] + row + 1
        np.testing.assert_array_equal(run(alone, order, **changes)[0], got[flat])
    assert num_moved >= 4


def test_latent_attention_bits_independent_of_chunking(run: Run) -> None:
    case = attend_case(prompt_case, 5, (32, 16), chunks=[(0, 70)], page=16)
    whole = run(case, **ALONE)
    for rows in (slice(0, 33), slice(33, 34), slice(34, 70)):
        np.testing.assert_array_equal(run(only(case, 0, rows))[:-1], whole[rows])


def test_latent_attention_bits_independent_of_pages(run: Run) -> None:
    case = CASES["large pages, many splits"]
    rows, order = case.rows, np.random.default_rng(1).permutation(len(case.rows.k_pages) - 1)
    place = np.concatenate([[0], 1 + order])
    pages = np.empty_like(rows.k_pages)
    pages[place] = rows.k_pages
    moved = replace(rows, k_pages=pages, page_table=place[rows.page_table].astype(np.int32))
    np.testing.assert_array_equal(run(replace(case, rows=moved)), run(case))


def test_latent_attention_small_pages_equal_large(run: Run) -> None:
    large = attend_case(tree_case, 4, (32, 16), num_nodes=[7, 3], lengths=[200, 90], page=64)
    rows = large.rows
    count = len(rows.k_pages)
    pages = rows.k_pages.reshape(4 * count, 16, *rows.k_pages.shape[2:])
    table = (4 * rows.page_table[:, :, None] + np.arange(4)).reshape(len(rows.page_table), -1)
    small = replace(rows, k_pages=pages, page_table=table.astype(np.int32))
    np.testing.assert_array_equal(run(replace(large, rows=small)), run(large))


@pytest.mark.parametrize("changes", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_latent_attention_nan_reaches_only_visible_rows(
    bad: float, changes: dict[str, int], run: Run
) -> None:
    node, rows = 1, TREE.rows
    pages = rows.k_pages.copy()
    pages[rows.page_table[0, (30 + node) // 16], (30 + node) % 16, :, 3] = bad
    got = run(replace(TREE, rows=replace(rows, k_pages=pages)), **changes)
    spoiled = rows.window[:, node] & (rows.request == 0)
    assert 1 <= spoiled.sum() < 6
    assert not np.isfinite(got[spoiled]).all(axis=(1, 2)).any()
    np.testing.assert_array_equal(got[~spoiled], run(TREE, **changes)[~spoiled])


def test_latent_attention_ignores_nan_in_unwritten_positions(run: Run) -> None:
    rows = TREE.rows
    used = np.zeros(rows.k_pages.shape[:2], bool)
    for request, length in enumerate((37, 21, 120)):
        positions = np.arange(length)
        used[rows.page_table[request, positions // 16], positions % 16] = True
    pages = np.where(used[..., None, None], rows.k_pages, np.float32(np.nan))
    got = run(replace(TREE, rows=replace(rows, k_pages=pages)))
    np.testing.assert_array_equal(got, run(TREE))


@pytest.mark.parametrize("changes", [ALONE, SHARED], ids=["alone", "shared"])
def test_latent_attention_padding_rows_are_zero(changes: dict[str, int], run: Run) -> None:
    rows = TREE.rows
    assert not run(TREE, **changes)[rows.num_rows :].any()
    idle = replace(rows, row_starts=0 * rows.row_starts, until=0 * rows.until)
    idle = replace(idle, window=idle.window & False)
    assert not run(replace(TREE, rows=idle), **changes).any()


@pytest.mark.parametrize(
    "changed",
    [{"split": 64}, {"near": 512}, {"tile_float32": 32}],
    ids=lambda changed: next(iter(changed)),
)
def test_latent_attention_order_changes_bits_within_tolerance(changed: dict, run: Run) -> None:
    case = CASES["large pages, many splits"]
    got = run(case, order=replace(LATENT_ATTENTION, **changed))
    np.testing.assert_allclose(got, specified(case), atol=FLOAT32, rtol=0)
    assert (got != run(case)).any()


@pytest.mark.skipif(not ON_GPU, reason="the interpreters have other products and functions")
@pytest.mark.parametrize("changes", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_latent_attention_bits_equal_in_both_languages(name: str, changes: dict[str, int]) -> None:
    case = CASES[name]
    np.testing.assert_array_equal(run_pallas(case, **changes), run_triton(case, **changes))


def test_latent_attention_tiles_share_positions_of_few_lanes() -> None:
    tiles = LatentAttentionTiles(lanes=32, programs=132, warps=8, stages=2)
    assert tiles.programs_of(10, 1) == (16, 1, 132)
    assert tiles.programs_of(80, 8) == (32, 3, 5)
    assert tiles.programs_of(40_960, 1) == (32, 1280, 1)


@pytest.mark.parametrize("programs", [1, 132])
@pytest.mark.parametrize(("rank", "rope"), [(16, 8), (80, 24), (512, 64)])
def test_pallas_latent_attention_lowers_for_gpu(rank: int, rope: int, programs: int) -> None:
    # The interpreter accepts operations and sizes that the lowering rejects.
    R, heads, B, page, columns = 6, 20, 2, 64, 16
    ints = [(1,), (B, columns), (B + 1,), (R,), (R,)]
    arrays = [
        jax.ShapeDtypeStruct((R, heads, rank + rope), "bfloat16"),
        jax.ShapeDtypeStruct((3, 1, 9, page, 1, rank + rope), "bfloat16"),
        *(jax.ShapeDtypeStruct(shape, "int32") for shape in ints),
        jax.ShapeDtypeStruct((R, 3), "bool"),
    ]
    tiles = LatentAttentionTiles(lanes=32, programs=programs, warps=4, stages=2)
    attend = partial(pallas.attend_latent, rank=rank, max_rows=3, scale=0.1, tiles=tiles)
    attend = jax.jit(partial(attend, **LATENT_ATTENTION.sizes_for(2)))
    lowered = attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == (2 if programs > 1 else 1)


ON_A_GPU = pytest.mark.skipif(not ON_GPU, reason="no interpreter has WGMMA and TMA")
SM90, NARROW = 64, 32
"""Lanes of the kernel with WGMMA and TMA, and of the other."""
sm90_case = partial(attend_case, sizes=(512, 64), page=64, half=True)
SM90_CASES = {
    "prompts": sm90_case(prompt_case, 20, chunks=[(0, 70), (1000, 1033), (20, 21)]),
    "many blocks": sm90_case(prompt_case, 128, chunks=[(900, 1000)]),
    "request without rows": sm90_case(prompt_case, 5, chunks=[(70, 74), (0, 0), (1530, 1532)]),
}
EACH = pytest.mark.parametrize("language", KERNELS)


def run_alone(
    language: str, case: AttendCase, lanes: int, order: LatentAttentionOrder = LATENT_ATTENTION
) -> np.ndarray:
    """Runs a kernel with programs that read all positions of their lanes."""
    return RUNS[language](case, order, lanes=lanes, programs=1)


def test_latent_tiles_of_64_lanes_have_narrow_blocks() -> None:
    tiles = LatentAttentionTiles(lanes=64, programs=1, warps=8, stages=2)
    assert tiles.programs_of(40_960, 1) == (32, 1280, 1)


@EACH
def test_latent_attention_of_64_lanes_falls_back(language: str) -> None:
    """Latents of 24 columns are not supported by the kernel."""
    case = attend_case(tree_case, 10, (24, 8), num_nodes=[7, 4], lengths=[30, 17], columns=3)
    got, want = (run_alone(language, case, lanes) for lanes in (SM90, NARROW))
    np.testing.assert_array_equal(got, want)


@ON_A_GPU
@pytest.mark.parametrize("order", [LATENT_ATTENTION, FAR], ids=["near", "far"])
@pytest.mark.parametrize("name", SM90_CASES)
@EACH
def test_latent_attention_sm90_bitwise_equal(
    name: str, order: LatentAttentionOrder, language: str
) -> None:
    case = SM90_CASES[name]
    got, want = (run_alone(language, case, lanes, order) for lanes in (SM90, NARROW))
    np.testing.assert_array_equal(got, want)


@ON_A_GPU
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@EACH
def test_latent_attention_sm90_nan_reaches_only_visible_rows(bad: float, language: str) -> None:
    case, position = SM90_CASES["prompts"], 1010
    rows = case.rows
    pages = rows.k_pages.copy()
    pages[rows.page_table[1, position // 64], position % 64, :, 3] = bad
    got = run_alone(language, replace(case, rows=replace(rows, k_pages=pages)), SM90)
    spoiled = (rows.until > position) & (rows.request == 1)
    assert 1 <= spoiled.sum() < 33
    assert not np.isfinite(got[spoiled]).all(axis=(1, 2)).any()
    np.testing.assert_array_equal(got[~spoiled], run_alone(language, case, SM90)[~spoiled])


@ON_A_GPU
@EACH
def test_latent_attention_sm90_ignores_unwritten_positions(language: str) -> None:
    case = SM90_CASES["prompts"]
    rows = case.rows
    used = np.zeros(rows.k_pages.shape[:2], bool)
    for request, length in enumerate((70, 1033, 21)):
        positions = np.arange(length)
        used[rows.page_table[request, positions // 64], positions % 64] = True
    pages = np.where(used[..., None, None], rows.k_pages, np.float32(np.nan))
    broken: AttendCase = replace(case, rows=replace(rows, k_pages=pages))
    got, want = (run_alone(language, each, SM90) for each in (broken, case))
    np.testing.assert_array_equal(got, want)


@ON_A_GPU
@pytest.mark.parametrize("name", SM90_CASES)
def test_latent_attention_sm90_bits_equal_in_both_languages(name: str) -> None:
    got, want = (run_alone(language, SM90_CASES[name], SM90) for language in ("pallas", "triton"))
    np.testing.assert_array_equal(got, want)
