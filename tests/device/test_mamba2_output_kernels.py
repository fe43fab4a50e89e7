"""Kernels of the gate and output norm of Mamba2 layers: on a GPU, or interpreted."""

import inspect
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_impl.ops.recurrent.mamba2
import torch_impl.ops.recurrent.mamba2
from jax_impl.ops import Scale
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.mixers.mamba2 import Mamba2Config, OutputNorm
from shared.spec import mamba2 as spec
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gdn.recurrent_layer import NEMOTRON, SMALL_MAMBA2, width_of
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    share_arithmetic,
)

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-5
ROWS, LAYERS, LAYER = 5, 2, 1
# Groups of 64 columns, of 192 (no power of two), and no norm with a multiplier.
SIZES = {
    "gate first": SMALL_MAMBA2,
    "norm first": replace(SMALL_MAMBA2, norm=OutputNorm.BEFORE_GATE, norm_size=128),
    "192 columns": replace(SMALL_MAMBA2, num_heads=6, norm_size=192),
    "no norm": replace(SMALL_MAMBA2, norm=OutputNorm.NONE, out_factor=0.5),
}
SHARED = {
    "one group": replace(SMALL_MAMBA2, num_heads=16, num_groups=1, norm_size=512),
    "three groups": replace(
        SMALL_MAMBA2, num_heads=12, norm=OutputNorm.BEFORE_GATE, norm_size=128, out_factor=0.5
    ),
}
"""Norms that TP ranks share; two ranks have half of the middle one of three groups."""
RANKS = (("one group", 2), ("one group", 4), ("three groups", 2))
each_language = pytest.mark.parametrize("language", KERNELS)
each_name = pytest.mark.parametrize("name", SIZES)


def inputs_of(sizes: Mamba2Config) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Outputs of heads, projected rows and norm weights, which bfloat16 represents."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((ROWS, columns)) for columns in (sizes.values, width_of(sizes))]
    arrays = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in arrays]
    weight = rng.standard_normal(sizes.values).astype(np.float32)
    return *arrays, None if sizes.norm is OutputNorm.NONE else weight


def settings_of(sizes: Mamba2Config) -> dict:
    return {
        "eps": EPS,
        "norm_size": sizes.values if sizes.norm is OutputNorm.NONE else sizes.norm_size,
        "gates_first": sizes.norm is not OutputNorm.BEFORE_GATE,
        "factor": sizes.out_factor,
        "order": SQUARES,
    }


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def in_pallas(
    sizes: Mamba2Config, arrays: Arrays, sums: np.ndarray | None = None, first_chunk: int = 0
) -> np.ndarray:
    (out, projected, weight), (chunk, layer) = (
        arrays,
        (jnp.full(1, number, jnp.int32) for number in (first_chunk, LAYER)),
    )
    kernel = partial(
        KERNELS["pallas"]["mamba2_output"].gated_output, **settings_of(sizes), interpret=INTERPRET
    )
    norms = None
    if weight is not None:  # weights of all layers
        norms = jnp.stack([jnp.full_like(weight, jnp.nan), weight])
    out, projected = (jnp.asarray(x, jnp.bfloat16) for x in (out, projected))
    program = jax.jit(kernel, compiler_options=AS_WRITTEN)
    return np.asarray(program(out, projected, norms, sums, chunk, layer), np.float32)


def in_triton(
    sizes: Mamba2Config, arrays: Arrays, sums: np.ndarray | None = None, first_chunk: int = 0
) -> np.ndarray:
    out, projected, weight = arrays
    heads, row = (on_device(x).bfloat16() for x in (out, projected))
    norm, chunks = (None if x is None else on_device(x) for x in (weight, sums))
    kernel = KERNELS["triton"]["mamba2_output"].gated_output
    found = kernel(heads, row, norm, chunks, first_chunk, **settings_of(sizes))
    return found.float().cpu().numpy()


def squares_in_pallas(sizes: Mamba2Config, out: np.ndarray, projected: np.ndarray) -> np.ndarray:
    kernel = partial(
        KERNELS["pallas"]["mamba2_output"].squares_of_chunks,
        gates_first=settings_of(sizes)["gates_first"],
        order=SQUARES,
        interpret=INTERPRET,
    )
    program = jax.jit(kernel, compiler_options=AS_WRITTEN)
    return np.asarray(program(*(jnp.asarray(x, jnp.bfloat16) for x in (out, projected))))


def squares_in_triton(sizes: Mamba2Config, out: np.ndarray, projected: np.ndarray) -> np.ndarray:
    kernel = KERNELS["triton"]["mamba2_output"].squares_of_chunks
    heads, row = (on_device(x).bfloat16() for x in (out, projected))
    gates_first = settings_of(sizes)["gates_first"]
    return kernel(heads, row, gates_first=gates_first, order=SQUARES).cpu().numpy()


def on_device(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, device="cuda" if ON_GPU else "cpu")


RUN = {"pallas": in_pallas, "triton": in_triton}
SQUARES_IN = {"pallas": squares_in_pallas, "triton": squares_in_triton}


def shards_of(sizes: Mamba2Config, count: int) -> list[Arrays]:
    """The arrays of each of some TP ranks."""
    out, projected, weight = inputs_of(sizes)
    rows, gates = (np.split(x[:, : sizes.values], count, axis=1) for x in (out, projected))
    return [*zip(rows, gates, np.split(weight, count), strict=True)]


@cache
def found(language: str, name: str) -> np.ndarray:
    """Returns the result for a case, cached for several tests."""
    return RUN[language](SIZES[name], inputs_of(SIZES[name]))


@each_name
@each_language
def test_mamba2_output_matches_spec(name: str, language: str) -> None:
    sizes = SIZES[name]
    out, projected, weight = inputs_of(sizes)
    want = spec.output_norm(out, projected[:, : sizes.values], weight, EPS, sizes)
    # One rounding to 8 bits.
    np.testing.assert_allclose(found(language, name), want, rtol=2**-8, atol=1e-6)


@each_language
def test_mamba2_output_row_is_batch_invariant(language: str) -> None:
    out, projected, weight = inputs_of(SIZES["gate first"])
    alone = RUN[language](SIZES["gate first"], (out[2:3], projected[2:3], weight))
    np.testing.assert_array_equal(alone, found(language, "gate first")[2:3])


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_name
def test_mamba2_output_kernels_bitwise_equal(name: str, monkeypatch) -> None:
    share_arithmetic(monkeypatch)
    got = in_triton(SIZES[name], inputs_of(SIZES[name]))
    np.testing.assert_array_equal(found("pallas", name), got)


@pytest.mark.parametrize(("name", "count"), RANKS)
@each_language
def test_mamba2_output_of_ranks_bitwise_equal(name: str, count: int, language: str) -> None:
    sizes, shards = SHARED[name], shards_of(SHARED[name], count)
    local = sizes.local(count)
    assert local.has_cut_norm
    assert local.has_whole_chunks(SQUARES.chunk)
    sums = [SQUARES_IN[language](sizes, *shard[:2]) for shard in shards]
    whole = np.concatenate(sums, axis=1)
    chunks = [rank * sums[0].shape[1] for rank in range(count)]
    got = [
        RUN[language](sizes, shard, whole, chunk)
        for shard, chunk in zip(shards, chunks, strict=True)
    ]
    want = RUN[language](sizes, inputs_of(sizes))
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_mamba2_output_squares_bitwise_equal(monkeypatch) -> None:
    share_arithmetic(monkeypatch)
    for name, sizes in SHARED.items():
        out, projected, _ = inputs_of(sizes)
        pallas, triton = (run(sizes, out, projected) for run in SQUARES_IN.values())
        np.testing.assert_array_equal(pallas, triton, err_msg=name)


@pytest.mark.parametrize("sizes", [NEMOTRON, SIZES["192 columns"]], ids=str)
def test_pallas_mamba2_output_lowers_for_gpu(sizes: Mamba2Config) -> None:
    kernel = partial(KERNELS["pallas"]["mamba2_output"].gated_output, **settings_of(sizes))
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    norms = jax.ShapeDtypeStruct((LAYERS, sizes.values), jnp.float32)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)
    out, projected = half((8, sizes.values)), half((8, width_of(sizes)))
    sums = jax.ShapeDtypeStruct((8, 2 * sizes.values // SQUARES.chunk), jnp.float32)
    squares = KERNELS["pallas"]["mamba2_output"].squares_of_chunks
    squares = partial(squares, gates_first=True, order=SQUARES)
    for run, args in (
        (kernel, (out, projected, norms, None, layer, layer)),
        (kernel, (out, projected, norms, sums, layer, layer)),
        (squares, (out, projected)),
    ):
        traced = jax.jit(run).trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("__gpu$xla.gpu.triton") == 1


def test_mamba2_output_kernels_have_equal_parameters() -> None:
    for function in ("gated_output", "squares_of_chunks"):
        names = [
            [*inspect.signature(getattr(each["mamba2_output"], function)).parameters]
            for each in KERNELS.values()
        ]
        own = [[n for n in each if n not in ("interpret", "layer")] for each in names]
        assert all(each == own[-1] for each in own)


class Gathered:
    """An all-gather of a rank that returns what all ranks would have given."""

    def __init__(self, rank: int, whole: np.ndarray) -> None:
        self.rank, self._whole = rank, whole

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        share = values.shape[1]
        own = self._whole[:, self.rank * share : (self.rank + 1) * share]
        np.testing.assert_array_equal(values.cpu().numpy(), own)
        return on_device(self._whole)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(("name", "count"), RANKS)
def test_torch_mamba2_output_of_ranks_bitwise_equal(name: str, count: int, monkeypatch) -> None:
    sizes = SHARED[name]
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    whole = squares_in_triton(sizes, *inputs_of(sizes)[:2])
    got = []
    for rank, (out, projected, weight) in enumerate(shards_of(sizes, count)):
        group = TPGroup(rank, count, None).on(Gathered(rank, whole))
        out, projected = on_device(out).bfloat16(), on_device(projected).bfloat16()
        operation = torch_impl.ops.recurrent.mamba2.kernel_gated_output
        kernels, own = torch_impl.ops.KERNELS, sizes.local(count)
        found = operation(kernels, out, projected, on_device(weight), EPS, own, group)
        got.append(found.float().cpu().numpy())
    want = in_triton(sizes, inputs_of(sizes))
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_mamba2_output_kernel_matches_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["gate first"]
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    device = "cuda" if ON_GPU else "cpu"
    out, projected, weight = (torch.tensor(x, device=device) for x in inputs_of(sizes))
    kernel = torch_impl.ops.recurrent.mamba2.kernel_gated_output
    out, projected = out.bfloat16(), projected.bfloat16()
    got = kernel(torch_impl.ops.KERNELS, out, projected, weight, EPS, sizes, SINGLE_RANK)
    np.testing.assert_array_equal(got.float().cpu().numpy(), found("triton", "gate first"))


def test_jax_mamba2_output_reads_stacked_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["gate first"]
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.recurrent.mamba2
    operation = jax_impl.ops.kernel_or_reference(ops.kernel_gated_output, ops.plain_gated_output)
    out, projected, weight = (jnp.asarray(x) for x in inputs_of(sizes))
    stack = jnp.stack([jnp.full_like(weight, jnp.nan), weight])

    def run(out: jax.Array) -> jax.Array:
        return operation(out, projected, Scale(stack, LAYER), EPS, sizes, SINGLE_RANK)

    traced = jax.jit(run).trace(out)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 1
    want = spec.output_norm(
        *map(np.asarray, (out, projected[:, : sizes.values], weight)), EPS, sizes
    )
    np.testing.assert_allclose(jax.jit(run)(out), want, rtol=1e-5, atol=1e-5)


def test_jax_mamba2_output_of_ranks_gathers_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, shapes = SHARED["one group"], []
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    out, projected, weight = (jnp.asarray(x) for x in shards_of(sizes, 2)[1])

    class Noting:
        rank = 1

        def gathered(self, values: jax.Array) -> jax.Array:
            shapes.append(values.shape)
            return jnp.concatenate([values, values], axis=1)

    def run(out: jax.Array, projected: jax.Array) -> jax.Array:
        group = TPGroup(1, 2, None).on(Noting())
        kernel = jax_impl.ops.recurrent.mamba2.kernel_gated_output
        return kernel(jax_impl.ops.KERNELS, out, projected, weight, EPS, sizes.local(2), group)

    traced = jax.jit(run).trace(out.astype(jnp.bfloat16), projected.astype(jnp.bfloat16))
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 2
    assert shapes == [(ROWS, 4)]
