"""Kernels with FP8 activations (W8A8): quantised values and products equal the specification."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.pallas_gpu.gemm import fp8_w8a8, linear
from kernels.pallas_gpu.gemm.linear_sm90 import linear_sm90
from kernels.tiles import LinearTiles, Tiles
from shared.models.formats import fp8
from shared.spec import fp8_activations as spec
from shared.spec import layers
from shared.spec.reduction_order import chunks_of_squares
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages
from tests.support.linear_kernels import (
    EPS,
    KINDS,
    Arrays,
    alone,
    behind,
    in_pallas,
    in_triton,
    normal,
    tiles,
)

pytestmark = pytest.mark.usefixtures("interpreted")
each_language = pytest.mark.parametrize("language", KERNELS)

SIZES = [{"R": 3, "K": 256, "N": 128}, {"R": 20, "K": 128, "N": 384}]
SHAPED = [{**sizes, "swapped": swapped} for sizes in SIZES for swapped in (True, False)]
LARGE = [
    {"R": 1, "K": 4096, "N": 1280},
    {"R": 17, "K": 4096, "N": 4096},
    {"R": 70, "K": 2048, "N": 4096},
    {"R": 600, "K": 1024, "N": 12288},
]


def of_codes(**changed: int | bool) -> LinearTiles:
    """For a GPU they must be those of the language; interpreted, both take any."""
    return tiles(**({"depth": fp8.BLOCK} | changed))


@lru_cache(maxsize=1)  # many tiles multiply by the same weights, which take seconds to make
def weight_of(outputs: int, inputs: int) -> Arrays:
    """Two weights as codes, and the scales of their blocks."""
    rng = np.random.default_rng(outputs)
    codes = fp8.quantize(normal(1, 2, outputs, inputs) * 64)
    shape = fp8.scale_shape(codes.shape, fp8.Granularity.BLOCK)
    scales = rng.uniform(2.0**-10, 2.0**-9, shape).astype(np.float32)
    return codes, scales


@each_language
@pytest.mark.parametrize(("R", "K"), [(3, 256), (9, 384), (130, 128)])
def test_quantised_matches_spec(R: int, K: int, language: str) -> None:
    x = (normal(0, R, K) * np.exp(3 * normal(1, R, 1))).astype(ml_dtypes.bfloat16)
    x[1, :128] = 0
    want = spec.quantised(x)
    module = KERNELS[language]["fp8_activations"]
    wide = x.astype(np.float32)
    if language == "triton":
        codes, scales = in_triton(lambda x: _floats(*module.quantised(x.bfloat16())), wide)
    else:
        codes, scales = in_pallas(
            lambda x, **how: _floats(*module.quantised(x.astype(jnp.bfloat16), **how)), wide
        )
    np.testing.assert_array_equal(codes[:R], fp8.VALUES[want.codes])
    np.testing.assert_array_equal(scales.T[:R], want.scales)


def _floats(codes: Any, scales: Any) -> Any:
    return (codes.float() if isinstance(codes, torch.Tensor) else codes.astype("float32")), scales


# Of Pallas each size in one of the two shapes.
@pytest.mark.parametrize(("language", "shaped"), in_languages(SHAPED, SHAPED[1:3]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(ON_GPU, reason="of tiles that a GPU's kernels do not take")
def test_fp8_linear_matches_spec(shaped: dict[str, int], kind: str, language: str) -> None:
    first, sizes = 0 if "gated" in kind else fp8.BLOCK, dict(shaped)
    swapped = bool(sizes.pop("swapped"))
    cut = of_codes(swapped=swapped, rows=16 if swapped else 64)
    got = multiplied(language, kind, cut, **sizes, out_type="float32", first=first)
    # Float32 sums in other orders, of at most 256 terms, and of numbers up to 10.
    np.testing.assert_allclose(got[0], wanted(kind, **sizes, first=first), rtol=1e-4, atol=1e-4)


def wanted(kind: str, *, R: int, K: int, N: int, first: int) -> np.ndarray:
    x, (codes, scales) = rows(R, K), weight_of(first + (2 if "gated" in kind else 1) * N, K)
    across = fp8.scales_of_outputs(scales[1], codes.shape[1])
    out = spec.product(spec.quantised(x), codes[1], across)[:, first:]
    if "normed" in kind or "gated" in kind:
        out = out / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
    if "biased" in kind:
        out = out + bias_of(codes.shape[:2])[1, first:].astype(np.float32)
    if "gated" in kind:
        gate, up = np.split(out, 2, axis=1)
        out = layers.silu(gate) * up
    if "times" in kind:
        out = out * np.float32(0.22)
    return out + normal(2, R, N) if "added" in kind else out


def rows(R: int, K: int) -> np.ndarray:
    return normal(0, R, K).astype(ml_dtypes.bfloat16).astype(np.float32)


def bias_of(shape: tuple[int, ...]) -> np.ndarray:
    return normal(3, *shape).astype(ml_dtypes.bfloat16)


def multiplied(
    language: str,
    kind: str,
    cut: LinearTiles,
    *,
    R: int,
    K: int,
    N: int,
    out_type: str,
    first: int,
) -> Arrays:
    """A product of quantised rows with the second of two weights, as float32."""
    is_gated = "gated" in kind
    x, (codes, scales) = rows(R, K), weight_of(first + (2 if is_gated else 1) * N, K)
    added, norm, how = behind(kind, cut, R, N)
    how["format"] = "fp8_w8a8"
    bias = bias_of(codes.shape[:2]).astype(np.float32) if "biased" in kind else None
    squares = chunks_of_squares(x) if "normed" in kind or is_gated else None
    quantised = KERNELS[language]["fp8_activations"].quantised
    product = KERNELS[language]["linear"].product
    arrays = (x, codes, scales, squares, bias, added, norm)
    if language == "triton":
        dtype = getattr(torch, out_type)

        def in_torch(x, codes, scales, squares, bias, added, norm):
            rows, row_scales = quantised(x.bfloat16())
            found = product(
                rows,
                codes[1, first:].view(torch.float8_e4m3fn),
                scales[1, first // fp8.BLOCK :].contiguous(),
                row_scales,
                squares=squares,
                bias=bias if bias is None else bias[1, first:].bfloat16(),
                added=added if added is None else added.to(dtype),
                norm=norm if norm is None else norm[1],
                out_type=dtype,
                **how,
            )
            return tuple(y if y is None else y.float() for y in found)

        return in_triton(in_torch, *arrays)
    dtype = jnp.dtype(out_type)

    def in_jax(x, codes, scales, squares, bias, added, norm, interpret):
        rows, row_scales = quantised(x.astype(jnp.bfloat16), interpret=interpret)
        found = product(
            rows,
            codes.view(jnp.float8_e4m3fn),
            scales,
            jnp.int32(1),
            row_scales,
            num_rows=R,
            squares=squares,
            bias=bias if bias is None else bias.astype(jnp.bfloat16),
            added=added if added is None else added.astype(dtype),
            norm=norm,
            norm_layer=jnp.int32(1),
            out_type=dtype,
            first=first,
            interpret=interpret,
            **how,
        )
        return tuple(y if y is None else y.astype(jnp.float32) for y in found)

    return in_pallas(in_jax, *arrays)


@each_language
@pytest.mark.parametrize(
    "change", [{"columns": 32}, {"swapped": False}, {"depth": 64}, {"columns": 256}], ids=str
)
def test_fp8_tiles_reject_inexact_accumulation(change: dict[str, int], language: str) -> None:
    """Below 64 on the wide side it makes float16 of codes."""
    given = SIZES[0] | {"kind": "plain", "out_type": "float32", "first": 0}
    with pytest.raises(ValueError, match="tiles of FP8 rows must be 128 deep or more, 64 wide or"):
        multiplied(language, cut=of_codes(**change), **given)


@each_language
@pytest.mark.parametrize("K", [384, 512])
@pytest.mark.skipif(ON_GPU, reason="compared there with the tiles of the tables")
def test_fp8_linear_depth_of_several_blocks_matches_spec(K: int, language: str) -> None:
    """A step along K has 256 inputs if they divide K, else one FP8 block."""
    sizes = {"R": 3, "K": K, "N": 128, "first": 0}
    got = multiplied(language, "gated", of_codes(depth=256), **sizes, out_type="float32")
    np.testing.assert_allclose(got[0], wanted("gated", **sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="two GiB of weights")
def test_pallas_fp8_linear_indexes_weights_above_two_gib() -> None:
    """Pallas' own offsets are signed 32-bit numbers."""
    layers, outputs, inputs, rows = 5, 2**17, 4096, 3
    x = jnp.asarray(normal(0, rows, inputs), jnp.bfloat16)
    codes, scales = weight_of(fp8.BLOCK, inputs)
    codes, scales = codes[1].view(ml_dtypes.float8_e4m3fn), scales[1]
    stack = jnp.zeros((layers, outputs, inputs), jnp.float8_e4m3fn)
    stack = stack.at[-1, -fp8.BLOCK :].set(codes)
    of_stack = jnp.zeros((layers, outputs // fp8.BLOCK, len(scales[0])), jnp.float32)
    of_stack = of_stack.at[-1, -1].set(scales[0])

    def multiply(x, stack, scales, layer, first):
        rows, row_scales = KERNELS["pallas"]["fp8_activations"].quantised(x)
        how = alone(of_codes()) | {"first": first, "format": "fp8_w8a8"}
        return linear.product(rows, stack, scales, layer, row_scales, num_rows=len(x), **how)[0]

    multiply = jax.jit(multiply, static_argnames="first")
    want = multiply(x, codes[None], scales[None], jnp.int32(0), 0)
    got = multiply(x, stack, of_stack, jnp.int32(layers - 1), outputs - fp8.BLOCK)
    np.testing.assert_array_equal(got, want)


@pytest.mark.skipif("triton" not in KERNELS or ON_GPU, reason="of Triton; on a GPU by the tables")
def test_fp8_linear_large_tiles_match_spec() -> None:
    """Two halves of 128 x 128 are computed side by side, each with the scale of its outputs."""
    sizes = {"R": 70, "K": 256, "N": 256, "first": fp8.BLOCK}
    cut = of_codes(swapped=False, rows=128, columns=128)
    got = multiplied("triton", "biased, normed", cut, **sizes, out_type="float32")
    want = wanted("biased, normed", **sizes)
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(ON_GPU, reason="of what a compiler is asked for")
@pytest.mark.parametrize("swapped", [True, False], ids=["outputs wide", "rows wide"])
def test_pallas_fp8_dot_requests_precise_accumulation(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it requests float32 accumulation and gets float16."""
    asked, dot = [], fp8_w8a8.dialect.dot

    def seen(x: Any, y: Any, *others: Any, **how: Any) -> Any:
        asked.append((str(x.type.element_type), how.get("max_num_imprecise_acc", 0)))
        return dot(x, y, *others, **how)

    monkeypatch.setattr(fp8_w8a8.dialect, "dot", seen)
    monkeypatch.setattr(linear, "is_on_hopper", lambda: True)
    kind, rows = jnp.float8_e4m3fn, 16 if swapped else 64

    def multiply(x, weight, scales, row_scales):
        how = alone(of_codes(swapped=swapped, rows=rows)) | {"format": "fp8_w8a8"}
        layer = jnp.int32(0)
        return linear.product(x, weight, scales, layer, row_scales, num_rows=3, **how)[0]

    shapes = (
        jax.ShapeDtypeStruct((8, 256), kind),
        jax.ShapeDtypeStruct((1, 128, 256), kind),
        jax.ShapeDtypeStruct((1, 1, 2), jnp.float32),
        jax.ShapeDtypeStruct((2, 128), jnp.float32),
    )
    starts, add = [], fp8_w8a8.dialect.addptr

    def added(kind: Any, start: Any, offset: Any) -> Any:
        starts.append((str(kind), str(offset.type)))
        return add(kind, start, offset)

    monkeypatch.setattr(fp8_w8a8.dialect, "addptr", added)
    jax.jit(multiply).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert ("!tt.ptr<f8E4M3FN>", "i64") in starts
    assert asked
    assert all(kind == "f8E4M3FN" and count >= fp8.BLOCK for kind, count in asked), asked


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"depth": 64}, "must have a depth of 128"),
        ({"columns": 256}, "must have columns that divide 128"),
        ({"rows": 256}, "must have rows that divide 128"),
        ({"swapped": True}, "must not be swapped"),
    ],
)
def test_fp8_sm90_rejects_invalid_tiles(change: dict[str, int], why: str) -> None:
    kind = jnp.float8_e4m3fn
    how = {"rows": 64, "swapped": False, "described": True, "persistent": True} | change
    with pytest.raises(ValueError, match=f"tiles of FP8 rows {why}, got"):
        linear_sm90(
            jnp.zeros((64, 128), kind),
            jnp.zeros((1, 256, 128), kind),
            jnp.int32(0),
            jnp.ones((1, 2, 1), jnp.float32),
            jnp.ones((1, 128), jnp.float32),
            **alone(of_codes(**how)),
        )


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="of the tiles of a GPU"
)
@pytest.mark.parametrize("kind", ["biased, normed", "gated", "added"])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_fp8_linear_tuned_tiles_bitwise_equal(sizes: dict[str, int], kind: str) -> None:
    """All that a call of the kind can get: two weights need more of a multiprocessor's memory."""
    given = sizes | {"kind": kind, "out_type": "bfloat16", "first": 0}
    want = multiplied("triton", cut=of_codes(), **given)
    for language in KERNELS:
        table = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name()).fp8_activations
        is_gated = int(kind == "gated")
        lines = [line for line in table.lines if line.at_most.get("gated", 1) >= is_gated]
        cuts = {line.tiles for line in lines}
        # Where inputs are no whole steps of several blocks, a step has one.
        cuts |= {replace(cut, depth=fp8.BLOCK) for cut in cuts}
        for cut in cuts:
            got = multiplied(language, cut=cut, **given)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{language}, {cut}")
