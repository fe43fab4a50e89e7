"""The attention kernels against the specification: on a GPU for real, elsewhere interpreted.

And that `ops` takes them on a GPU, and nowhere else.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.attention
import torch_impl.ops.attention
from kernels.pallas_gpu import attention as pallas
from kernels.tiles import MEASURED, AttentionTiles, Tiles
from shared.drafts.block import BlockConfig
from shared.spec.dflash import block_rows
from shared.spec.numerics import ATTENTION, AttentionOrder
from tests.support.cases.attention import CASES, Case, specified, tree_case

ON_GPU = torch.cuda.is_available()
# Float32 on both sides: the sums have another order, and a GPU's exp2 errs by some 1e-7.
FLOAT32 = 1e-5
KERNELS = {"pallas": pallas}


@contextmanager
def triton_interpreter() -> Iterator[None]:
    """Without a GPU, Triton is imported and run as its interpreter, in this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with triton_interpreter():
        yield


# Where Triton is missing its cases do not exist; tests/conftest.py counts them in the summary.
if importlib.util.find_spec("triton") is not None:
    assert ON_GPU or "triton" not in sys.modules, "too late to choose Triton's interpreter"
    with triton_interpreter():
        KERNELS["triton"] = importlib.import_module("kernels.triton_gpu.attention")


INTERPRET = jax.default_backend() == "cpu"
pallas_attend = jax.jit(
    partial(pallas.attend, interpret=INTERPRET),
    static_argnames=("max_rows", "split", "tile", "tiles", "k_offset", "v_offset"),
    # The interpreted kernel is compiled once a shape and hardly runs.
    compiler_options={"xla_backend_optimization_level": 0} if INTERPRET else None,
)
OPERATIONS = ["attention", "layers", "linear", "sampling"]
RECORDER = SimpleNamespace(attend=lambda *arrays, **given: given)
TILES = {name: Tiles.load(f"{name}_gpu", MEASURED).attention for name in ("pallas", "triton")}


def cut(
    kernel: str,
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
) -> dict:
    """What a kernel is given besides the arrays, as `ops` does or with another order or tiles."""
    item_bytes, group = 2 if case.half else 4, case.q.shape[1] // case.k_pages.shape[2]
    return {
        "max_rows": case.max_rows,
        "split": order.split,
        "tile": order.tile_of(item_bytes),
        "tiles": tiles or TILES[kernel].of(item_bytes=item_bytes, rows=case.max_rows * group),
    }


def run_pallas(
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
    **offsets: int,
) -> np.ndarray:
    dtype = jnp.bfloat16 if case.half else jnp.float32
    floats = [jnp.asarray(x, dtype) for x in (case.q, case.k_pages, case.v_pages)]
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    out = pallas_attend(*floats, *rows, **cut("pallas", case, order, tiles), **offsets)
    return np.asarray(out, np.float32)


def run_triton(
    case: Case,
    order: AttentionOrder = ATTENTION,
    tiles: AttentionTiles | None = None,
    **offsets: int,
) -> np.ndarray:
    device = "cuda" if ON_GPU else "cpu"
    # Triton's interpreter computes nonsense in bfloat16.
    dtype = (torch.bfloat16 if ON_GPU else torch.float16) if case.half else torch.float32
    floats = [torch.tensor(x).to(device, dtype) for x in (case.q, case.k_pages, case.v_pages)]
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    rest = [torch.tensor(x, device=device) for x in rows]
    given = cut("triton", case, order, tiles)
    out = KERNELS["triton"].attend(*floats, *rest, **given, **offsets)
    return out.float().cpu().numpy()


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


TREE = CASES["tree"]


@pytest.mark.parametrize("name", CASES)
def test_a_row_sees_the_committed_positions_and_its_ancestors(name: str, run) -> None:
    case = CASES[name]
    # Half precision: weights (at most 1) and results (below 4 here) have 8 bits.
    tolerance = 2e-2 if case.half else FLOAT32
    np.testing.assert_allclose(run(case), specified(case), atol=tolerance, rtol=0)


def test_a_chain_needs_no_mask(run) -> None:
    tree = tree_case(num_nodes=[7, 3, 1], lengths=[60, 109, 31], chain=True)
    is_real = np.arange(len(tree.q)) < tree.num_rows
    node = np.where(is_real, np.arange(len(tree.q)) - tree.row_starts[tree.request], -1)
    until = (tree.until + node + 1).astype(np.int32)
    chain = replace(tree, until=until, window=np.zeros((len(tree.q), 0), bool))
    np.testing.assert_allclose(run(chain), specified(tree), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 12])
def test_rows_of_a_block_see_what_lies_behind_them_too(window, is_causal, run) -> None:
    block = BlockConfig(size=7, mask_id=0, windows=(window,), causal=(is_causal,))
    lengths, draft_from = np.array([60, 109, 31]), np.array([0, 100, 31])
    (rows,) = block_rows(block, lengths, draft_from, TREE.page_table)
    ints = (x.astype(np.int32) for x in (7 * np.arange(4), rows.first, rows.until))
    case = Case(
        *(TREE.q[:21], TREE.k_pages, TREE.v_pages, TREE.page_table, *ints, rows.window, 7, False)
    )
    np.testing.assert_allclose(run(case), specified(case), atol=FLOAT32, rtol=0)


def test_what_no_row_sees_harms_nobody(run) -> None:
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
def test_a_value_that_is_no_number_reaches_only_the_rows_that_see_it(bad: float, run) -> None:
    node = 1
    v_pages = TREE.v_pages.copy()
    v_pages[TREE.page_table[0, (30 + node) // 16], (30 + node) % 16] = bad
    got = run(replace(TREE, v_pages=v_pages))
    spoiled = TREE.window[:, node] & (TREE.request == 0)
    assert 1 <= spoiled.sum() < 6
    assert not np.isfinite(got[spoiled]).any()
    np.testing.assert_array_equal(got[~spoiled], run(TREE)[~spoiled])


def test_padding_is_zero(run) -> None:
    assert not run(TREE)[TREE.num_rows :].any()
    idle = replace(TREE, row_starts=0 * TREE.row_starts, until=0 * TREE.until)
    assert not run(replace(idle, window=idle.window & False)).any()


def test_a_layer_is_read_where_it_lies_in_a_larger_pool(run) -> None:
    P, other = len(TREE.k_pages), np.full_like(TREE.k_pages, np.nan)
    pool = np.concatenate([other, TREE.v_pages, other, TREE.k_pages])
    got = run(replace(TREE, k_pages=pool, v_pages=pool), k_offset=3 * P, v_offset=P)
    np.testing.assert_array_equal(got, run(TREE))


def test_a_rows_bits_depend_on_neither_batch_nor_neighbours(run) -> None:
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


@pytest.mark.parametrize(
    ("D", "dtype", "page", "max_rows"),
    [(16, "float32", 1, 1), (128, "bfloat16", 64, 16), (256, "float32", 16, 64)],
)
def test_pallas_lowers_for_a_gpu(D: int, dtype: str, page: int, max_rows: int) -> None:
    # The interpreter takes operations and sizes that the lowering refuses.
    R, B, columns = 2 * max_rows, 2, 512 // page
    ints = [(B, columns), (B + 1,), (R,), (R,)]
    arrays = [
        *(jax.ShapeDtypeStruct(s, dtype) for s in [(R, 10, D), *[(9, page, 2, D)] * 2]),
        *(jax.ShapeDtypeStruct(s, "int32") for s in ints),
        jax.ShapeDtypeStruct((R, max_rows), "bool"),
    ]
    item_bytes = jnp.dtype(dtype).itemsize
    order = {"split": ATTENTION.split, "tile": ATTENTION.tile_of(item_bytes)}
    tiles = TILES["pallas"].of(item_bytes=item_bytes, rows=max_rows * 5)
    attend = jax.jit(partial(pallas.attend, max_rows=max_rows, **order, tiles=tiles))
    lowered = attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 2


OTHER_TILES = [
    AttentionTiles(lanes=lanes, ones=16, warps=warps, stages=stages, combine_warps=combine_warps)
    for lanes, warps, stages, combine_warps in [(16, 8, 1, 2), (32, 2, 3, 4)]
]


def test_tiles_leave_the_bits_as_they_are(run) -> None:
    case = CASES["half precision"]
    want = run(case)
    for tiles in OTHER_TILES:
        np.testing.assert_array_equal(run(case, tiles=tiles), want)


@pytest.mark.parametrize(
    "changed",
    [{"split": 64}, {"tile_float32": 32}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_order_gives_right_results_with_other_bits(changed: dict, run) -> None:
    got = run(TREE, order=replace(ATTENTION, **changed))
    np.testing.assert_allclose(got, specified(TREE), atol=FLOAT32, rtol=0)
    assert (got != run(TREE)).any()


def on_a_gpu(monkeypatch, ops: ModuleType, kernel: ModuleType | None) -> Callable:
    """The op as it is bound where there is a GPU."""
    others = dict.fromkeys(OPERATIONS, None)
    kernels = ops.Kernels(
        **others | {"attention": kernel}, tiles=Tiles.load("pallas_gpu", MEASURED)
    )
    monkeypatch.setattr(ops, "KERNELS", kernels)
    return ops.kernel_or_plain(ops.attention.kernel_attend, ops.attention.plain_attend)


def test_jax_takes_the_kernel_in_programs_for_a_gpu_only(monkeypatch) -> None:
    traced = traced_op(on_a_gpu(monkeypatch, jax_impl.ops, pallas))
    kernels = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert kernels == {"cpu": 0, "cuda": 2}


def test_jax_takes_no_kernel_where_the_plain_ops_are_asked_for(monkeypatch) -> None:
    op = on_a_gpu(monkeypatch, jax_impl.ops, pallas)
    with jax_impl.ops.plain():
        assert "pallas_call" not in str(traced_op(op).jaxpr)
        assert jax_impl.ops.kernel_names() == []
    assert "pallas_call" in str(traced_op(op).jaxpr)
    assert jax_impl.ops.kernel_names() == OPERATIONS


def test_torch_takes_no_kernel_on_a_cpu(monkeypatch) -> None:
    op = on_a_gpu(monkeypatch, torch_impl.ops, None)  # would fail if it were called
    got = op(*map(torch.from_numpy, op_arguments(TREE)), TREE.max_rows)[: TREE.num_rows]
    np.testing.assert_allclose(got, specified(TREE)[: TREE.num_rows], atol=FLOAT32, rtol=0)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda")


def test_torch_takes_the_kernel_on_a_gpu_unless_the_plain_ops_are_asked_for(monkeypatch) -> None:
    op = on_a_gpu(monkeypatch, torch_impl.ops, RECORDER)
    q = torch.zeros(22, 4, 16).as_subclass(OnGpu)
    pages = SimpleNamespace(shape=(25, 16, 2, 16))
    given = op(q, pages, pages, *(None,) * 6, 7)
    assert given == {
        "max_rows": 7,
        "split": ATTENTION.split,
        "tile": ATTENTION.tile_float32,
        "tiles": TILES["pallas"].of(item_bytes=4, rows=14),
    }
    with torch_impl.ops.plain():
        assert torch_impl.ops.kernels_on(q.device) is None


@pytest.mark.parametrize("ops", [jax_impl.ops, torch_impl.ops], ids=["jax", "torch"])
def test_a_kernel_refuses_other_head_sizes_by_name_on_a_gpu_only(ops, monkeypatch) -> None:
    on_a_gpu(monkeypatch, ops, pallas)
    name = {jax_impl.ops: "platform", torch_impl.ops: "type"}[ops]
    gpu = {"platform": "gpu", "type": "cuda"}[name]
    ops.attention.check_head_size(80, SimpleNamespace(**{name: "cpu"}))
    for size in pallas.HEAD_SIZES:
        ops.attention.check_head_size(size, SimpleNamespace(**{name: gpu}))
    with pytest.raises(ValueError, match="head size must be one of .* got 80"):
        ops.attention.check_head_size(80, SimpleNamespace(**{name: gpu}))
    with ops.plain():
        ops.attention.check_head_size(80, SimpleNamespace(**{name: gpu}))


def test_a_machine_without_a_gpu_has_no_kernels() -> None:
    for ops, has_gpu in ((torch_impl.ops, ON_GPU), (jax_impl.ops, not INTERPRET)):
        assert ops.kernel_names() == (OPERATIONS if has_gpu else [])
        assert (ops.attention.attend is ops.attention.plain_attend) == (not has_gpu)


def traced_op(attend: Callable) -> jax.stages.Traced:
    op = partial(attend, most_rows=TREE.max_rows)
    return jax.jit(op).trace(*map(jnp.asarray, op_arguments(TREE)))


def op_arguments(case: Case) -> list[np.ndarray]:
    """What `ops.attention.attend` takes, but `most_rows`."""
    return [value for value in case.arguments.values() if isinstance(value, np.ndarray)]


def test_the_kernels_have_one_signature() -> None:
    for kernel in KERNELS.values():
        assert kernel.HEAD_SIZES == pallas.HEAD_SIZES
        names = [p for p in inspect.signature(kernel.attend).parameters if p != "interpret"]
        assert names == list(inspect.signature(pallas.attend).parameters)[: len(names)]
        assert len(names) == 14
