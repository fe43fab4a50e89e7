"""The kernels of products in both languages, as functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from kernels.tiles import LinearTiles
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.formats.weight_format import PLAIN, first_row
from shared.spec.reduction_order import SQUARES, chunks_of_squares
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS

EPS = 1e-6
Arrays = tuple[np.ndarray, ...]
KINDS = ["plain", "normed", "gated", "added"]
KINDS += ["biased", "biased, normed", "biased, gated", "times, added", "biased, times, added"]
"""Prologues and epilogues of a product."""


def tiles(**changed: int | bool) -> LinearTiles:
    how = {"rows": 16, "columns": 64, "depth": 64, "warps": 4, "stages": 2}
    usual = {"swapped": True, "described": False, "persistent": False, "widens": True}
    return LinearTiles(**(usual | how | changed))


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
    words: bool | None = None,
    granularity: Granularity = Granularity.BLOCK,
) -> Arrays:
    """A product of numbers that are bfloat16, of the second of two weights, as float32.

    Args:
      words: The weights are those of FP8, in words or widened.
      granularity: Of the scales of FP8.
    """
    is_gated = "gated" in kind
    x, outputs, scales = normal(0, R, K), first + (2 if is_gated else 1) * N, None
    if words is None:
        weights = normal(1, 2, outputs, K) / 8
    elif words:
        weights, scales = as_w8a16(outputs, K, granularity)
    else:
        weights = fp8_w8a16.widened(*as_w8a16(outputs, K, granularity))
    stored = weights.shape[1]
    first_scale = 0 if scales is None else first_row(first, stored, scales.shape[1])
    added, norm, how = behind(kind, cut, R, N)
    how["format"] = "fp8_w8a16" if words else PLAIN
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
                    weights[1, first:] if words else weights[1, first:].bfloat16(),
                    scales if scales is None else scales[1, first_scale:].bfloat16(),
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
                weights if words else weights.astype(jnp.bfloat16),
                scales if scales is None else scales.astype(jnp.bfloat16),
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
def as_w8a16(outputs: int, inputs: int, granularity: Granularity) -> Arrays:
    """Two weights in FP8, in words and with the scales that kernels take, of several sizes."""
    rng, weights = np.random.default_rng(5), normal(1, 2, outputs, inputs) / 8
    scales = rng.uniform(2.0**-9, 2.0**-8, fp8.scale_shape(weights.shape, granularity))
    scales = scales.astype(ml_dtypes.bfloat16)
    codes = fp8.apply_scales(weights, 1 / scales.astype(np.float32))
    codes = codes.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return fp8_w8a16.pack(codes), fp8_w8a16.packed_scales(scales)
