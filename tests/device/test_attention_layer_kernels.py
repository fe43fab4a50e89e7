"""Attention layer between the QKV and output projections, as kernels: on a GPU, or interpreted.

`ops` selects the kernels on a GPU only. The interpreter runs the threads of a program one after
the other, so a missing barrier shows on a GPU only.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.attention.attention
import jax_impl.ops.attention.attention_layer
import torch_impl.ops.attention.attention
import torch_impl.ops.attention.attention_layer
from kernels.tiles import BLOCKS
from shared.boundary.workspace import MOST_PARTS
from shared.spec.assistant import reading_rows
from shared.spec.attention import with_sliding_window
from shared.spec.attention_layer import BOUNDS, row_bounds, tree_paths
from shared.spec.reduction_order import ATTENTION, SQUARES
from tests.support.attention_layer_kernels import (
    APART,
    FUSED,
    SHARED,
    SHORT,
    TILES,
    Found,
    How,
    arrays_of,
    call_with,
    pools_of,
    run_pallas,
    run_triton,
)
from tests.support.cases.attention.attention_layer import (
    CASES,
    EPS,
    MixCase,
    mix_case,
    prompt_case,
    specified,
    table_of,
    tree_case,
)
from tests.support.kernels import (
    INTERPRET,
    KERNELS,
    MODULES,
    ON_GPU,
    OPTIONS,
    bind_kernels,
    in_languages,
)

pytestmark = pytest.mark.usefixtures("interpreted")
slow = partial(pytest.param, marks=pytest.mark.matrix)
# Float32 on both sides: the sums have another order, and a GPU's exp2 errs by some 1e-7.
FLOAT32 = 1e-5
# Of half precision: keys of up to 4 have 8 bits, weights and results too.
HALF = 6e-2


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., Found]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


@cache
def found(run: Callable[..., Found], name: str, how: How = FUSED) -> Found:
    """Returns the result of a kernel for a case, cached for several tests."""
    return run(CASES[name], how)


def real(case: MixCase) -> slice:
    return slice(0, int(case.row_starts[-1]))


# Of Pallas: those of the first line are one program.
COMPILED = ("trees", "nothing committed", "draft KV from an offset", "request without rows")
COMPILED += ("gate, partial rotary", "half precision")
COMPILED += ("soft cap and sinks",)
COMPILED += ("blocks", "blocks of windows", "shared KV, trees")
each_case = pytest.mark.parametrize(
    ("run", "name"), in_languages(CASES, COMPILED), indirect=["run"]
)


@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
@each_case
def test_attention_layer_matches_spec(name: str, how: How, run) -> None:
    case, got = CASES[name], found(run, name, how)
    out, *pools = specified(case)
    tolerance = HALF if case.half else FLOAT32
    np.testing.assert_allclose(got.out, out, atol=tolerance, rtol=0)
    written = np.stack(pools)[:, 1:]  # all but the sink, which kernels leave alone
    np.testing.assert_allclose(got.pools[:, 1:], written, atol=tolerance, rtol=0)
    kept = written == np.stack([case.k_pages, case.v_pages])[:, 1:]
    np.testing.assert_array_equal(got.pools[:, 1:][kept], written[kept])
    assert np.isnan(got.others).all()
    if how.is_fused:
        assert not np.asarray(got.arrivals).any()


@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
def test_rows_at_one_position_match_spec(how: How, run) -> None:
    """Rows of an assistant, which read the KV of its target."""
    rows = reading_rows(np.array([30, 105, 0]), table_of(3, 8, 0), {}, 3)
    case = mix_case(with_sliding_window(rows, 12), 3 * np.arange(4), 3, has_kv=False)
    (out, *pools), got = specified(case), run(case, how)
    np.testing.assert_allclose(got.out, out, atol=FLOAT32, rtol=0)
    np.testing.assert_array_equal(got.pools[:, 1:], np.stack(pools)[:, 1:])


WITHOUT_TREES = {name: case for name, case in CASES.items() if not case.rows.window.shape[1]}


@pytest.mark.parametrize(("run", "name"), in_languages(WITHOUT_TREES, COMPILED), indirect=["run"])
def test_attention_layer_fused_and_split_bitwise_equal(name: str, run) -> None:
    fused, apart = (found(run, name, how) for how in (FUSED, APART))
    # XLA rounds arrays of one row otherwise on a CPU.
    is_rounded = INTERPRET and run is run_pallas and CASES[name].max_rows == 1
    error = FLOAT32 if is_rounded else 0
    np.testing.assert_allclose(fused.out, apart.out, rtol=0, atol=error)
    written = (each.pools[:, 1:] for each in (fused, apart))
    np.testing.assert_allclose(*written, rtol=0, atol=error)


@pytest.mark.parametrize("how", [FUSED, APART] if "triton" in KERNELS else [])
def test_attention_layer_accepts_strided_rows(how: How) -> None:
    """A batch of one has such rows: its request is one number, broadcast to each row."""
    others = lambda x: torch.stack([x, x.logical_not().to(x.dtype)], dim=-1)[..., 0]  # noqa: E731
    want = found(run_triton, "trees", how)
    np.testing.assert_equal(run_triton(FEW, how, others)[:2], want[:2])


UNCUT = {"programs": 1, "splits": 1}


@pytest.mark.parametrize(
    ("name", "span", "max_parts", "cut"),
    [
        ("trees", 64, 64, UNCUT),
        slow("trees", 128, 64, {"splits": 2}),
        ("trees", 64, 2, {"programs": 3, "splits": 1}),
        slow("wide windows", 64, 64, {"lanes": 16, "programs": 64, "splits": 1}),
        slow("gate, partial rotary", 64, 64, {"placed": True}),
        slow("blocks", 64, 64, {"placed": True, "lanes": 16, "splits": 1}),
        slow("questions", 64, 2, {"placed": True, "programs": 8, "splits": 1}),
    ],
    ids=str,
)
def test_attention_layer_bits_independent_of_tile_config(name, span, max_parts, cut, run):
    tiles, order = replace(SHARED, **cut), replace(SHORT, span=span)
    got = found(run, name, How(True, order, max_parts, tiles))
    fewest = replace(SHARED, lanes=16, programs=1, splits=1)
    want = found(run, name, How(True, order, tiles=fewest))
    np.testing.assert_array_equal(got.out, want.out)
    assert not np.asarray(got.arrivals).any()


def test_attention_layer_reduction_order_changes_bits(run) -> None:
    case, tiles = CASES["trees"], replace(SHARED, **UNCUT)
    others = [replace(SHORT, split=16)]
    if run is run_triton or not INTERPRET:  # XLA compiles each order for seconds
        others.append(replace(SHORT, span=128))
    first, *rest = (
        found(run, "trees", How(True, order, 64, tiles)).out for order in [SHORT, *others]
    )
    for got in (first, *rest):
        np.testing.assert_allclose(got, specified(case)[0], atol=FLOAT32, rtol=0)
    assert all((got != first).any() for got in rest)


@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
def test_attention_layer_row_is_batch_invariant(how: How, run) -> None:
    case = CASES["chains"]
    together = found(run, "chains", how)
    for request, row in [(0, 0), (0, 3), (2, 6)]:
        # The pools as the kernels wrote them: bits of the specification's keys are others.
        k_pages, v_pages = together.pools
        alone = replace(case.only(request, row), k_pages=k_pages, v_pages=v_pages)
        if INTERPRET and run is run_pallas:  # XLA rounds arrays of one row otherwise on a CPU
            alone = replace(alone, max_rows=case.max_rows)
        flat = case.row_starts[request] + row
        np.testing.assert_array_equal(run(alone, FUSED).out[0], together.out[flat])


@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
def test_attention_layer_padding_writes_nothing(how: How, run) -> None:
    case = tree_case([2, 0, 7], [0, 0, 0])
    rows = replace(case.rows, is_real=case.rows.is_real & False, until=0 * case.rows.until)
    rows = replace(rows, window=rows.window & False)
    got = run(replace(case, rows=rows), how)
    assert not got.out.any()
    np.testing.assert_array_equal(got.pools, np.stack([case.k_pages, case.v_pages]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_attention_layer_nan_reaches_only_visible_rows(bad: float, run) -> None:
    case, node = CASES["trees"], 2
    qkv = case.qkv.copy()
    qkv[node, -1] = bad  # the new value of a node of the first request
    got, want = run(replace(case, qkv=qkv)), found(run, "trees")
    spoiled = case.rows.window[:, node] & (case.rows.request == 0)
    assert 1 <= spoiled.sum() < 6
    harmed = ~np.isfinite(got.out).all(axis=1)
    np.testing.assert_array_equal(harmed, spoiled)
    np.testing.assert_array_equal(got.out[~spoiled], want.out[~spoiled])


@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
def test_shared_kv_nan_reaches_only_visible_rows(how: How, run) -> None:
    """The value of a node is bad in the pages, where another layer has written it."""
    case, node = CASES["shared KV, trees"], 2
    place = case.rows.places[node]
    v_pages, page = case.v_pages.copy(), case.rows.page_table[0, place // 16]
    v_pages[page, place % 16] = np.nan
    got, want = run(replace(case, v_pages=v_pages), how), found(run, "shared KV, trees", how)
    spoiled = case.rows.window[:, node] & (case.rows.request == 0)
    assert 1 <= spoiled.sum() < 6
    np.testing.assert_array_equal(~np.isfinite(got.out).all(axis=1), spoiled)
    np.testing.assert_array_equal(got.out[~spoiled], want.out[~spoiled])


@pytest.mark.gpu
@pytest.mark.parametrize("how", [FUSED, APART], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.half])
def test_attention_layer_bits_equal_in_both_languages(name: str, how: How) -> None:
    pallas, triton = (found(run, name, how) for run in (run_pallas, run_triton))
    np.testing.assert_array_equal(pallas.out, triton.out)
    np.testing.assert_array_equal(pallas.pools[:, 1:], triton.pools[:, 1:])


K_HEADS = 3


@pytest.mark.parametrize("language", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_row_bounds_kernel_matches_spec(name: str, language: str) -> None:
    case = CASES[name]
    names = ("row_starts", "places", "first", "until", "window", "is_real")
    arrays = {key: arrays_of(case)[key] for key in names}
    if language == "pallas":
        bounds, arrivals, paths = map(np.asarray, pallas_reach(case.max_rows)(*arrays.values()))
    else:
        device, kernel = (
            "cuda" if ON_GPU else "cpu",
            KERNELS["triton"]["row_bounds"].compute_row_bounds,
        )
        placed = (torch.tensor(x, device=device) for x in arrays.values())
        got = kernel(*placed, max_rows=case.max_rows, k_heads=K_HEADS)
        bounds, arrivals, paths = (x.cpu().numpy() for x in got)
    has_rows = np.diff(case.row_starts) > 0
    np.testing.assert_array_equal(
        bounds[has_rows], row_bounds(case.rows, case.row_starts)[has_rows]
    )
    np.testing.assert_array_equal(arrivals, np.zeros((len(has_rows), K_HEADS * BLOCKS)))
    np.testing.assert_array_equal(paths[real(case)], tree_paths(case.rows)[real(case)])


@cache
def pallas_reach(max_rows: int) -> Callable[..., tuple]:
    """One program for all cases of the same sizes."""
    kernel = partial(
        KERNELS["pallas"]["row_bounds"].compute_row_bounds, max_rows=max_rows, k_heads=K_HEADS
    )
    return jax.jit(partial(kernel, interpret=INTERPRET), compiler_options=OPTIONS)


@pytest.mark.parametrize(
    ("D", "dtype", "page", "max_rows", "gated"),
    [
        (16, "float32", 1, 1, False),
        (128, "bfloat16", 64, 4, False),
        (256, "bfloat16", 16, 4, True),
        *((D, "bfloat16", 64, 4, True) for D in (48, 64, 80, 96, 112, 192)),
    ],
)
def test_pallas_attention_layer_lowers_for_gpu(
    D: int, dtype: str, page: int, max_rows: int, gated: bool
) -> None:
    # The interpreter accepts operations and sizes that the lowering rejects.
    R, B, item_bytes = 2 * max_rows, 2, jnp.dtype(dtype).itemsize
    floats = {"projected": (R, (8 * (1 + gated) + 4) * D), "kv": (3, 2, 9, page, 2, D)}
    singles = {"q_norm": (3, D), "k_norm": (3, D), "cos": (R, 8), "sin": (R, 8)}
    ints = {
        "layer": (1,),
        "bounds": (B, BOUNDS),
        "arrivals": (B, 2 * BLOCKS),
        "paths": (R, max_rows),
        "page_table": (B, 4096 // page),
    }
    ints |= {"row_starts": (B + 1,), "request": (R,), "places": (R,), "first": (R,), "until": (R,)}
    flags = {"window": (R, max_rows), "is_real": (R,)}
    dtypes = ((floats, dtype), (singles, "float32"), (ints, "int32"), (flags, "bool"))
    arrays = {k: jax.ShapeDtypeStruct(v, t) for sizes, t in dtypes for k, v in sizes.items()}
    new = {"gated": gated, "has_kv": True, "eps": EPS, "digits": SQUARES.digits}
    rows = {"rows": max_rows * 4, "requests": B, "nodes": max_rows}
    tiles = TILES["pallas"].attention_layer.of(item_bytes=item_bytes, head_size=D, **rows)
    sums = {"max_rows": max_rows, "max_parts": MOST_PARTS, "scale": D**-0.5}
    sums |= ATTENTION.sizes_for(item_bytes)
    pallas = KERNELS["pallas"]
    kernels = (
        (pallas["attention_layer"].attention_layer, new | sums | {"tiles": tiles}),
        (pallas["qk_norm_rope_kv_write"].qk_norm_rope_kv_write, new),
    )
    for kernel, settings in kernels:
        program = jax.jit(partial(call_with, kernel, **settings))
        lowered = program.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("__gpu$xla.gpu.triton") == 1


def test_attention_layer_kernels_same_signature() -> None:
    """Pallas kernels also take the layer's index in a stack that a slice would copy."""
    of_pallas = {"interpret", "sink_layer"}
    for module, kernel in (
        ("attention", "attend"),
        ("qk_norm_rope_kv_write", "qk_norm_rope_kv_write"),
        ("attention_layer", "attention_layer"),
    ):
        names = [
            list(inspect.signature(getattr(modules[module], kernel)).parameters)
            for modules in KERNELS.values()
        ]
        common = [[name for name in own if name not in of_pallas] for own in names]
        assert all(own == common[0] for own in common)


def on_a_gpu(monkeypatch, ops: ModuleType, modules: dict[str, object], **mix: bool) -> Callable:
    """The op as it is bound where there is a GPU."""
    bind_kernels(monkeypatch, ops, modules, **mix)
    return ops.kernel_or_reference(
        ops.attention.attention_layer.kernel_attention_layer,
        ops.attention.attention_layer.plain_attention_layer,
    )


def op_arguments(case: MixCase, ops: ModuleType, make: Callable) -> list:
    fields = ("request", "positions", *("places", "first", "until"))
    fields += ("window", "is_real", "page_table")
    rows = ops.attention.attention.AttentionRows(
        **{name: make(getattr(case.rows, name)) for name in fields},
        row_starts=make(case.row_starts),
        max_rows=case.max_rows,
    )
    norms = case.norms and ops.attention.attention_layer.HeadNorms(
        make(case.norms.q), None if case.norms.k is None else make(case.norms.k), EPS
    )
    heads = ops.attention.attention_layer.Heads(**vars(case.heads))
    angles = ops.attention.attention_layer.Angles(make(case.angles.cos), make(case.angles.sin))
    given = (pools_of(case), *(arrays_of(case)[name] for name in ("bounds", "arrivals", "paths")))
    pools = ops.attention.attention_layer.PagedKV(*map(make, given))
    return [make(case.qkv), heads, norms, angles, rows, pools, 1]


FEW, MANY = CASES["trees"], prompt_case([(0, 140), (3, 20)])
READER = CASES["shared KV, trees"]
MANY_READERS = prompt_case([(0, 140), (3, 20)], has_kv=False)
TAKEN = {
    "few rows": (FEW, False),
    "few rows, placed": (FEW, True),
    "many rows": (MANY, False),
    "few rows, shared KV": (READER, False),
    "few rows, shared KV, placed": (READER, True),
    "many rows, shared KV": (MANY_READERS, False),
}


def traced(op: Callable, case: MixCase) -> jax.stages.Traced:
    qkv, heads, norms, angles, rows, kv, layer = op_arguments(case, jax_impl.ops, jnp.asarray)

    def program(qkv: jax.Array, kv: object) -> object:
        return op(qkv, heads, norms, angles, rows, kv, layer)

    return jax.jit(program).trace(qkv, kv)


@pytest.mark.parametrize(("name", "launches"), list(zip(TAKEN, (1, 2, 2) * 2, strict=True)))
def test_jax_attention_layer_kernels_lowered_for_gpu_only(name, launches, monkeypatch) -> None:
    case, placed = TAKEN[name]
    op = on_a_gpu(monkeypatch, jax_impl.ops, KERNELS["pallas"], placed=placed)
    program = traced(op, case)
    launched = {
        platform: program.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": launches}


def test_jax_row_bounds_kernel_and_reference_same_shapes(monkeypatch) -> None:
    mix = jax_impl.ops.attention.attention_layer
    on_a_gpu(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    reach = jax_impl.ops.kernel_or_reference(mix.kernel_row_bounds, mix.plain_row_bounds)
    rows, pools = op_arguments(FEW, jax_impl.ops, jnp.asarray)[4:6]
    bounds, arrivals, paths = jax.eval_shape(lambda: reach(rows, FEW.heads.num_kv_heads))
    assert bounds.shape == pools.bounds.shape
    assert arrivals.shape == pools.arrivals.shape
    assert paths.shape == pools.paths.shape


def test_jax_reference_ops_disables_kernels(monkeypatch) -> None:
    op = on_a_gpu(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    with jax_impl.ops.reference_ops():
        assert "pallas_call" not in str(traced(op, FEW).jaxpr)
        assert jax_impl.ops.kernel_names() == []
    assert "pallas_call" in str(traced(op, FEW).jaxpr)
    assert "attention_layer" in jax_impl.ops.kernel_names()


def test_torch_attention_layer_on_cpu_uses_no_kernel(monkeypatch) -> None:
    nothing = dict.fromkeys(KERNELS["pallas"])  # would fail if it were called
    op = on_a_gpu(monkeypatch, torch_impl.ops, nothing)
    got = op(*op_arguments(FEW, torch_impl.ops, torch.from_numpy))[real(FEW)]
    np.testing.assert_allclose(got, specified(FEW)[0][real(FEW)], atol=FLOAT32, rtol=0)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(("case", "placed"), TAKEN.values(), ids=TAKEN)
def test_torch_reference_ops_disables_kernels(case, placed, monkeypatch) -> None:
    on_a_gpu(monkeypatch, torch_impl.ops, KERNELS["triton"], placed=placed)
    device = "cuda" if ON_GPU else "cpu"
    arguments = op_arguments(
        case, torch_impl.ops, lambda x: torch.from_numpy(np.asarray(x)).to(device)
    )
    got = torch_impl.ops.attention.attention_layer.kernel_attention_layer(
        torch_impl.ops.KERNELS, *arguments
    ).cpu()
    np.testing.assert_allclose(got[real(case)], specified(case)[0][real(case)], atol=FLOAT32)
    with torch_impl.ops.reference_ops():
        assert torch_impl.ops.kernels_on(torch.device("cuda")) is None


def test_kernel_names_empty_without_gpu() -> None:
    for ops, has_gpu in ((torch_impl.ops, ON_GPU), (jax_impl.ops, not INTERPRET)):
        assert ops.kernel_names() == (list(MODULES) if has_gpu else [])
        assert (ops.KERNELS is None) == (not has_gpu)
