"""The attention kernels against the specification: on a GPU for real, elsewhere interpreted.

And that `ops` takes them on a GPU, and nowhere else.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.attention
import torch_impl.ops.attention
from kernels.pallas_gpu import attention as pallas
from shared.drafts.block import BlockConfig
from shared.spec import attention as spec
from shared.spec.dflash import block_rows

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


@dataclass(frozen=True)
class Case:
    """One layer's pools and the rows that read them; float32 but for `half` ones."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    row_starts: np.ndarray
    first: np.ndarray
    until: np.ndarray
    window: np.ndarray
    max_rows: int
    half: bool

    @property
    def request(self) -> np.ndarray:
        row = np.arange(len(self.q))
        found = np.searchsorted(self.row_starts[1:], row, side="right")
        return np.where(row < self.row_starts[-1], found, 0).astype(np.int32)

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])


def specified(case: Case) -> np.ndarray:
    rows = (case.page_table, case.request, case.first, case.until, case.window)
    return spec.attend(case.q, case.k_pages, case.v_pages, *rows)


INTERPRET = jax.default_backend() == "cpu"
pallas_attend = jax.jit(
    partial(pallas.attend, interpret=INTERPRET),
    static_argnames=("max_rows", "k_offset", "v_offset"),
    # The interpreted kernel is compiled once a shape and hardly runs.
    compiler_options={"xla_backend_optimization_level": 0} if INTERPRET else None,
)


def run_pallas(case: Case, **offsets: int) -> np.ndarray:
    dtype = jnp.bfloat16 if case.half else jnp.float32
    floats = [jnp.asarray(x, dtype) for x in (case.q, case.k_pages, case.v_pages)]
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    return np.asarray(pallas_attend(*floats, *rows, max_rows=case.max_rows, **offsets), np.float32)


def run_triton(case: Case, **offsets: int) -> np.ndarray:
    device = "cuda" if ON_GPU else "cpu"
    # Triton's interpreter computes nonsense in bfloat16.
    dtype = (torch.bfloat16 if ON_GPU else torch.float16) if case.half else torch.float32
    floats = [torch.tensor(x).to(device, dtype) for x in (case.q, case.k_pages, case.v_pages)]
    rows = (case.page_table, case.row_starts, case.first, case.until, case.window)
    rest = [torch.tensor(x, device=device) for x in rows]
    out = KERNELS["triton"].attend(*floats, *rest, max_rows=case.max_rows, **offsets)
    return out.float().cpu().numpy()


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


def tree_case(
    *,
    num_nodes: list[int],
    lengths: list[int],
    nodes: int = 7,
    heads: tuple[int, int] = (4, 2),
    D: int = 16,
    page: int = 16,
    columns: int = 8,
    chain: bool = False,
    draft_from: tuple[int, ...] = (0, 0, 0),
    half: bool = False,
) -> Case:
    """Three trees of random form over scattered pages; the last row is padding at least."""
    rng = np.random.default_rng(0)
    B, R = 3, 3 * nodes + 1
    table = 1 + rng.permutation(B * columns).reshape(B, columns).astype(np.int32)
    shape = (1 + B * columns, page, heads[1], D)
    k_pages, v_pages = rng.standard_normal((2, *shape), np.float32)
    trees = [[0, *(n - 1 if chain else rng.integers(n) for n in range(1, nodes))] for _ in range(B)]
    rows, _ = spec.tree_rows(
        np.array(trees, np.int32), np.array(num_nodes), np.array(lengths), table, R
    )
    q = rng.standard_normal((R, heads[0], D), np.float32)
    if half:  # exact in bfloat16 and in float16, so that only the kernel rounds
        q, k_pages, v_pages = (np.round(x * 16) / 16 for x in (q, k_pages, v_pages))
    first = np.array(draft_from)[rows.request]
    starts = np.concatenate([[0], np.cumsum(num_nodes)])
    ints = (x.astype(np.int32) for x in (starts, first, rows.until))
    return Case(q, k_pages, v_pages, table, *ints, rows.window, nodes, half)


TREE = tree_case(num_nodes=[7, 4, 1], lengths=[30, 17, 119])
CASES = {
    "tree": TREE,
    "nothing committed": tree_case(num_nodes=[7, 1, 7], lengths=[0, 0, 64]),
    "whole draft KV later": tree_case(
        num_nodes=[5, 7, 2], lengths=[100, 90, 40], draft_from=(70, 90, 80)
    ),
    "request without rows": tree_case(num_nodes=[4, 0, 2], lengths=[9, 0, 60]),
    "root alone, one position a page": tree_case(
        nodes=1, num_nodes=[1, 1, 1], lengths=[1, 40, 77], page=1, columns=78
    ),
    "large pages, many splits": tree_case(
        num_nodes=[7, 3, 7], lengths=[1100, 509, 512], heads=(2, 1), page=64, columns=18
    ),
    "group of five": tree_case(num_nodes=[3, 2, 7], lengths=[20, 5, 9], heads=(10, 2), D=64),
    "half precision": tree_case(
        num_nodes=[7, 6, 5], lengths=[70, 530, 0], heads=(8, 1), D=64, page=64, columns=9, half=True
    ),
}


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
    attend = jax.jit(partial(pallas.attend, max_rows=max_rows))
    lowered = attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 2


def test_jax_takes_the_kernel_in_programs_for_a_gpu_only(monkeypatch) -> None:
    monkeypatch.setitem(jax_impl.ops.KERNELS, "attention", pallas)
    traced = traced_op()
    kernels = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert kernels == {"cpu": 0, "cuda": 2}


def test_jax_takes_no_kernel_where_the_plain_ops_are_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(jax_impl.ops.KERNELS, "attention", pallas)
    with jax_impl.ops.plain():
        assert "pallas_call" not in str(traced_op().jaxpr)
    assert "pallas_call" in str(traced_op().jaxpr)
    assert jax_impl.ops.KERNELS["attention"] is pallas


def test_torch_takes_no_kernel_on_a_cpu(monkeypatch) -> None:
    monkeypatch.setitem(torch_impl.ops.KERNELS, "attention", None)  # would fail if it were called
    tensors = map(torch.from_numpy, op_arguments(TREE))
    got = torch_impl.ops.attention.attend(*tensors, TREE.max_rows)[: TREE.num_rows]
    np.testing.assert_allclose(got, specified(TREE)[: TREE.num_rows], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("ops", [jax_impl.ops, torch_impl.ops], ids=["jax", "torch"])
def test_a_kernel_refuses_other_head_sizes_by_name_on_a_gpu_only(ops, monkeypatch) -> None:
    monkeypatch.setitem(ops.KERNELS, "attention", pallas)
    name = {jax_impl.ops: "platform", torch_impl.ops: "type"}[ops]
    gpu = {"platform": "gpu", "type": "cuda"}[name]
    ops.attention.check_head_size(80, SimpleNamespace(**{name: "cpu"}))
    for size in pallas.HEAD_SIZES:
        ops.attention.check_head_size(size, SimpleNamespace(**{name: gpu}))
    with pytest.raises(ValueError, match="head size must be one of .* got 80"):
        ops.attention.check_head_size(80, SimpleNamespace(**{name: gpu}))


def test_a_machine_without_a_gpu_has_no_kernels() -> None:
    for ops, has_gpu in ((torch_impl.ops, ON_GPU), (jax_impl.ops, not INTERPRET)):
        assert set(ops.KERNELS) == ({"attention"} if has_gpu else set())


def traced_op() -> jax.stages.Traced:
    op = partial(jax_impl.ops.attention.attend, most_rows=TREE.max_rows)
    return jax.jit(op).trace(*map(jnp.asarray, op_arguments(TREE)))


def op_arguments(case: Case) -> list[np.ndarray]:
    """What `ops.attention.attend` takes, but `most_rows`."""
    where = (case.page_table, case.request, case.row_starts, case.first, case.until, case.window)
    return [case.q, case.k_pages, case.v_pages, *where]


def test_the_kernels_have_one_signature_and_one_order_of_sums() -> None:
    for kernel in KERNELS.values():
        assert kernel.HEAD_SIZES == pallas.HEAD_SIZES
        names = [p for p in inspect.signature(kernel.attend).parameters if p != "interpret"]
        assert names == list(inspect.signature(pallas.attend).parameters)[: len(names)]
        assert len(names) == 11
        assert (kernel.SPLIT, kernel.TILE) == (pallas.SPLIT, pallas.TILE)
