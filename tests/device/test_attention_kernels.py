"""Attention kernel against the specification: on a GPU, or interpreted."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.pallas_gpu.attention import attention as pallas
from kernels.tiles import MEASURED, AttentionTiles, Tiles
from shared.drafts.dflash_config import BlockConfig
from shared.spec.dflash import block_rows
from shared.spec.reduction_order import ATTENTION, AttentionOrder
from tests.support.cases.attention.attention import CASES, Case, specified, tree_case
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS

pytestmark = pytest.mark.usefixtures("interpreted")

# Float32 on both sides: the sums have another order, and a GPU's exp2 errs by some 1e-7.
FLOAT32 = 1e-5


pallas_attend = jax.jit(
    partial(pallas.attend, interpret=INTERPRET),
    static_argnames=("max_rows", "span", "split", "tile", "scale", "tiles"),
    compiler_options=OPTIONS,
)
TILES = {name: Tiles.load(f"{name}_gpu", MEASURED).attention for name in ("pallas", "triton")}


def cut(
    kernel: str,
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
) -> dict:
    """Returns keyword arguments of a kernel, as `ops` does or with another order or tile config."""
    item_bytes, group = 2 if case.half else 4, case.q.shape[1] // case.k_pages.shape[2]
    sizes = {"item_bytes": item_bytes, "rows": case.max_rows * group, "head_size": case.q.shape[2]}
    return {
        "max_rows": case.max_rows,
        **order.sizes_for(item_bytes),
        "scale": case.q.shape[2] ** -0.5,
        "tiles": tiles or TILES[kernel].of(**sizes),
    }


def pools_of(case: Case) -> np.ndarray:
    """The case's layer, between two that hold no numbers."""
    kv = np.stack([case.k_pages, case.v_pages])
    return np.stack([np.full_like(kv, np.nan), kv, np.full_like(kv, np.nan)])


def run_pallas(
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
) -> np.ndarray:
    dtype = jnp.bfloat16 if case.half else jnp.float32
    q, kv = (jnp.asarray(x, dtype) for x in (case.q, pools_of(case)))
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    layer = jnp.ones(1, jnp.int32)
    out = pallas_attend(q, None, kv, layer, *rows, **cut("pallas", case, order, tiles))
    return np.asarray(out, np.float32).reshape(case.q.shape)


def run_triton(
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
) -> np.ndarray:
    device = "cuda" if ON_GPU else "cpu"
    # Triton's interpreter computes nonsense in bfloat16.
    dtype = (torch.bfloat16 if ON_GPU else torch.float16) if case.half else torch.float32
    q, kv = (torch.tensor(x).to(device, dtype) for x in (case.q, pools_of(case)))
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    rest = [torch.tensor(x, device=device) for x in rows]
    attend, given = KERNELS["triton"]["attention"].attend, cut("triton", case, order, tiles)
    out = attend(q, None, kv, 1, *rest, **given)
    return out.float().cpu().numpy().reshape(case.q.shape)


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


TREE = CASES["tree"]


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_spec(name: str, run) -> None:
    case = CASES[name]
    # Half precision: weights (at most 1) and results (below 4 here) have 8 bits.
    tolerance = 2e-2 if case.half else FLOAT32
    np.testing.assert_allclose(run(case), specified(case), atol=tolerance, rtol=0)


def test_attention_chain_without_mask_matches_spec(run) -> None:
    tree = tree_case(num_nodes=[7, 3, 1], lengths=[60, 109, 31], chain=True)
    is_real = np.arange(len(tree.q)) < tree.num_rows
    node = np.where(is_real, np.arange(len(tree.q)) - tree.row_starts[tree.request], -1)
    until = (tree.until + node + 1).astype(np.int32)
    chain = replace(tree, until=until, window=np.zeros((len(tree.q), 0), bool))
    np.testing.assert_allclose(run(chain), specified(tree), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 12])
def test_attention_draft_block_matches_spec(window, is_causal, run) -> None:
    block = BlockConfig(
        size=7,
        mask_id=0,
        windows=(window,),
        causal=(is_causal,),
        from_anchor=False,
        first_slot=1,
        parts=(),
    )
    lengths, draft_from = np.array([60, 109, 31]), np.array([0, 100, 31])
    (rows,) = block_rows(block, lengths, draft_from, TREE.page_table)
    ints = (x.astype(np.int32) for x in (7 * np.arange(4), rows.first, rows.until))
    case = Case(
        *(TREE.q[:21], TREE.k_pages, TREE.v_pages, TREE.page_table, *ints, rows.window, 7, False)
    )
    np.testing.assert_allclose(run(case), specified(case), atol=FLOAT32, rtol=0)


def test_attention_ignores_nan_in_invisible_positions(run) -> None:
    case = tree_case(num_nodes=[3, 7, 0], lengths=[37, 18, 0], draft_from=(20, 0, 0))
    used = np.zeros(case.k_pages.shape[:2], bool)
    for request, (low, high) in enumerate([(20, 40), (0, 25)]):
        positions = np.arange(low, high)
        used[case.page_table[request, positions // 16], positions % 16] = True
    k_pages, v_pages = (
        np.where(used[..., None, None], x, np.float32(np.nan)) for x in (case.k_pages, case.v_pages)
    )
    got = run(replace(case, k_pages=k_pages, v_pages=v_pages))
    np.testing.assert_allclose(got, specified(case), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_attention_nan_reaches_only_visible_rows(bad: float, run) -> None:
    node = 1
    v_pages = TREE.v_pages.copy()
    v_pages[TREE.page_table[0, (30 + node) // 16], (30 + node) % 16] = bad
    got = run(replace(TREE, v_pages=v_pages))
    spoiled = TREE.window[:, node] & (TREE.request == 0)
    assert 1 <= spoiled.sum() < 6
    assert not np.isfinite(got[spoiled]).any()
    np.testing.assert_array_equal(got[~spoiled], run(TREE)[~spoiled])


def test_attention_padding_rows_are_zero(run) -> None:
    assert not run(TREE)[TREE.num_rows :].any()
    idle = replace(TREE, row_starts=0 * TREE.row_starts, until=0 * TREE.until)
    assert not run(replace(idle, window=idle.window & False)).any()


def test_attention_row_is_batch_invariant(run) -> None:
    case = CASES["large pages, many splits"]
    together = run(case)
    for request, row in [(0, 0), (0, 6), (1, 9), (2, 16)]:
        only = slice(request, request + 1), slice(row, row + 1)
        alone = Case(
            *(case.q[only[1]], case.k_pages, case.v_pages, case.page_table[only[0]]),
            *(np.array([0, 1], np.int32), case.first[only[1]], case.until[only[1]]),
            *(case.window[only[1]], 1, False),
        )
        np.testing.assert_array_equal(run(alone)[0], together[row])


class Searches:
    """Notes every module that is looked for: that of a dialect for each operation anew."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, *_: object) -> None:
        self.names.append(name)


@pytest.mark.parametrize(
    ("D", "dtype", "page", "max_rows"),
    [(16, "float32", 1, 1), (128, "bfloat16", 64, 16), (256, "float32", 16, 64)],
)
def test_pallas_attention_lowers_for_gpu(
    D: int, dtype: str, page: int, max_rows: int, monkeypatch
) -> None:
    # The interpreter accepts operations and sizes that the lowering rejects.
    searched = Searches()
    monkeypatch.setattr(sys, "meta_path", [searched, *sys.meta_path])
    R, B, columns = 2 * max_rows, 2, 512 // page
    ints = [(B, columns), (B + 1,), (R,), (R,)]
    arrays = [
        *(jax.ShapeDtypeStruct(s, dtype) for s in [(R, 10, D), (R, 24 * D), (3, 2, 9, page, 2, D)]),
        *(jax.ShapeDtypeStruct(s, "int32") for s in [(1,), *ints]),
        jax.ShapeDtypeStruct((R, max_rows), "bool"),
    ]
    item_bytes = jnp.dtype(dtype).itemsize
    order = ATTENTION.sizes_for(item_bytes)
    tiles = TILES["pallas"].of(item_bytes=item_bytes, rows=max_rows * 5, head_size=D)
    attend = jax.jit(partial(pallas.attend, max_rows=max_rows, **order, scale=0.1, tiles=tiles))
    lowered = attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 1
    assert not [name for name in searched.names if name.endswith(".tt")]


OTHER_TILES = [
    AttentionTiles(lanes=lanes, ones=ones, described=0, unroll=unroll, warps=warps, stages=stages)
    for lanes, ones, unroll, warps, stages in [(16, 16, 2, 8, 1), (32, 64, 1, 2, 3)]
]


def test_attention_bits_independent_of_tile_config(run) -> None:
    case = CASES["half precision"]
    want = run(case)
    for tiles in OTHER_TILES:
        np.testing.assert_array_equal(run(case, tiles=tiles), want)


@pytest.mark.parametrize(
    "changed",
    [{"span": 256}, {"split": 64}, {"tile_float32": 32}],
    ids=lambda changed: next(iter(changed)),
)
def test_attention_reduction_order_changes_bits_within_tolerance(changed: dict, run) -> None:
    case = CASES["large pages, many splits"]
    got = run(case, order=replace(ATTENTION, **changed))
    np.testing.assert_allclose(got, specified(case), atol=FLOAT32, rtol=0)
    assert (got != run(case)).any()
