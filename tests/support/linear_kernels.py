"""The kernels of products in both languages, as functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from kernels.tiles import LinearTiles
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.int4_encoding import Int4Encoding, scale_shape
from shared.models.formats.weight_format import (
    PLAIN,
    SCALES,
    VALUES,
    QuantizedFormat,
    first_row,
)
from shared.spec.reduction_order import SQUARES, chunks_of_squares
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS
from tests.support.weight_formats import int4_matrix, w8a16_matrix

EPS = 1e-6
Arrays = tuple[np.ndarray, ...]
KINDS = ["plain", "normed", "gated", "added"]
KINDS += ["biased", "biased, normed", "biased, gated", "times, added", "biased, times, added"]
"""Prologues and epilogues of a product."""
LARGE = [
    {"R": 1, "K": 4096, "N": 1280},
    {"R": 70, "K": 2048, "N": 4096},
    {"R": 200, "K": 5120, "N": 640},
    {"R": 600, "K": 1024, "N": 12288},
]
"""Sizes of a GPU."""


def tiles(**changed: int | bool) -> LinearTiles:
    how = {"rows": 16, "columns": 64, "depth": 64, "warps": 4, "stages": 2}
    usual = {"swapped": True, "described": False, "persistent": False, "widens": True}
    return LinearTiles(**(usual | how | changed))


def copied(language: str, kind: str, **changed: int) -> LinearTiles:
    """Returns tiles that TMA copies for swap-AB; in Triton a gate halves the columns."""
    columns = 32 if "gated" in kind and language == "triton" else 64
    how = {"rows": 64, "depth": 256, "stages": 3, "described": True, "widens": False}
    return tiles(columns=columns, **(how | changed))


def in_triton(function: Callable[..., Any], *arrays: np.ndarray | None, **how: Any) -> Arrays:
    """Runs a function of the Triton kernels on float32 arrays."""
    device = "cuda" if ON_GPU else "cpu"
    given = [None if x is None else torch.from_numpy(x).to(device) for x in arrays]
    found = function(*given, **how)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(x.cpu().numpy() for x in found if x is not None)


def in_pallas(function: Callable[..., Any], *arrays: np.ndarray | None, **how: Any) -> Arrays:
    """Runs a function of the Pallas kernels on float32 arrays."""
    given = [None if x is None else jnp.asarray(x) for x in arrays]
    program = jax.jit(partial(function, **how, interpret=INTERPRET), compiler_options=OPTIONS)
    found = program(*given)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(np.asarray(x) for x in found if x is not None)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def behind(
    kind: str, cut: LinearTiles, R: int, N: int
) -> tuple[np.ndarray | None, np.ndarray | None, dict[str, Any]]:
    """Returns the arguments of the epilogue: residual, scales of the next norm, tile settings."""
    added = normal(2, R, N) if "added" in kind else None
    norm = 1 + normal(4, 2, N) / 4 if "added" in kind else None
    how = {"eps": EPS, "is_gated": "gated" in kind, "order": SQUARES, "tiles": cut}
    return added, norm, how | {"factor": 0.22 if "times" in kind else 1.0}


def alone(cut: LinearTiles) -> dict[str, Any]:
    """Returns the arguments of a TMA product in Pallas without prologue or epilogue."""
    _, _, how = behind("plain", cut, 0, 0)
    nothing = dict.fromkeys(("squares", "bias", "added", "norm"))
    how |= {"first": 0, "out_type": jnp.bfloat16, "norm_layer": jnp.int32(0)}
    return how | nothing


class Weights(NamedTuple):
    """Two weights `[2, outputs, inputs]` of a format, and their scales if they are packed."""

    format: str
    values: np.ndarray
    scales: np.ndarray | None = None


def plain_weights(outputs: int, inputs: int) -> Weights:
    return Weights(PLAIN, normal(1, 2, outputs, inputs) / 8)


def in_bfloat16(
    language: str,
    kind: str,
    cut: LinearTiles,
    *,
    R: int,
    K: int,
    N: int,
    out_type: str,
    first: int,
    weights_of: Callable[[int, int], Weights] = plain_weights,
) -> Arrays:
    """A product of numbers that are bfloat16, of the second of two weights, as float32."""
    is_gated = "gated" in kind
    x, outputs = normal(0, R, K), first + (2 if is_gated else 1) * N
    format, weights, scales = weights_of(outputs, K)
    stored = weights.shape[1]
    first_scale = 0 if scales is None else first_row(first, stored, scales.shape[1])
    has_words = scales is not None and scales.dtype == np.int32
    added, norm, how = behind(kind, cut, R, N)
    how["format"] = format
    bias = normal(3, *weights.shape[:2]) if "biased" in kind else None
    module = KERNELS[language]["linear"]
    squares = chunks_of_squares(x) if "normed" in kind or is_gated else None
    if language == "triton":
        dtype = getattr(torch, out_type)
        return in_triton(
            lambda x, weights, scales, squares, bias, added, norm: tuple(
                y if y is None else y.float()
                for y in module.product(
                    x.bfloat16(),
                    weights[1, first:].bfloat16() if format == PLAIN else weights[1, first:],
                    scales
                    if scales is None
                    else scales[1, first_scale:].to(torch.int32 if has_words else torch.bfloat16),
                    squares=squares,
                    bias=bias if bias is None else bias[1, first:].bfloat16(),
                    added=added if added is None else added.to(dtype),
                    norm=norm if norm is None else norm[1],
                    out_type=dtype,
                    **how,
                )
            ),
            *(x, weights, scales, squares, bias, added, norm),
        )
    dtype = jnp.dtype(out_type)
    return in_pallas(
        lambda x, weights, scales, squares, bias, added, norm, interpret: tuple(
            y if y is None else y.astype(jnp.float32)
            for y in module.product(
                x.astype(jnp.bfloat16),
                weights.astype(jnp.bfloat16) if format == PLAIN else weights,
                scales if scales is None or has_words else scales.astype(jnp.bfloat16),
                squares=squares,
                bias=bias if bias is None else bias.astype(jnp.bfloat16),
                added=added if added is None else added.astype(dtype),
                norm=norm,
                norm_layer=jnp.int32(1),
                out_type=dtype,
                layer=jnp.int32(1),
                first=first,
                interpret=interpret,
                **how,
            )
        ),
        *(x, weights, scales, squares, bias, added, norm),
    )


@lru_cache(maxsize=1)  # many tiles multiply by the same weights, which take seconds to make
def as_w8a16(granularity: Granularity, outputs: int, inputs: int) -> Weights:
    """Two weights in FP8, packed, with scales of several sizes."""
    rng, weights = np.random.default_rng(5), normal(1, 2, outputs, inputs) / 8
    scales = rng.uniform(2.0**-9, 2.0**-8, fp8.scale_shape(weights.shape, granularity))
    scales = scales.astype(ml_dtypes.bfloat16)
    codes = fp8.apply_scales(weights, 1 / scales.astype(np.float32))
    codes = codes.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    matrix = w8a16_matrix(codes, scales, granularity)
    return Weights("fp8_w8a16", matrix.planes[VALUES], matrix.planes[SCALES])


@lru_cache(maxsize=1)
def as_w4a16(encoding: Int4Encoding, outputs: int, inputs: int) -> Weights:
    """Two weights in INT4, packed, with every code, scales of several sizes and zero points."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (2, outputs, inputs), np.uint8)
    shape = scale_shape((2, outputs, inputs), encoding.group)
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}[encoding.scale_type]
    scales = rng.uniform(0.01, 0.03, shape).astype(kind).astype(np.float32)
    zeros = rng.integers(0, 16, shape, np.uint8) if encoding.has_zeros else None
    matrix = int4_matrix(codes, scales, zeros, encoding)
    return Weights(matrix.format.name, matrix.planes[VALUES], matrix.planes[SCALES])


def dequantized(format: QuantizedFormat, weights: Weights) -> Weights:
    """The same weights, not packed."""
    planes = {VALUES: weights.values, SCALES: weights.scales}
    return Weights(PLAIN, format.dequantize(planes))


def dequantized_in_memory(language: str, weights: Weights, inputs: int) -> Arrays:
    """The second of two weights, dequantised by the kernel for many rows."""
    format, values, scales = weights
    module, has_words = KERNELS[language]["dequantize"], scales.dtype == np.int32
    if language == "triton":
        kind = torch.int32 if has_words else torch.bfloat16
        how = KERNELS["triton"]["linear"].launching
        return in_triton(
            lambda x, y: module.dequantize(x[1], y[1].to(kind), format, inputs, **how(x)).float(),
            values,
            scales,
        )
    kind = jnp.int32 if has_words else jnp.bfloat16
    return in_pallas(
        lambda x, y, **how: module.dequantize(
            x, y.astype(kind), jnp.int32(1), format, inputs, **how
        ).astype(jnp.float32),
        values,
        scales,
    )


def check_close(got: Arrays, want: Arrays) -> None:
    """The same bits; interpreted, XLA may add in an order of its own and round once or twice."""
    for one, other in zip(got, want, strict=True):
        if ON_GPU:
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
