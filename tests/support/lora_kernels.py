"""Products of rows with LoRA adapters in both languages, as functions of numpy arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl.ops.gemm.lora import AdapterWeights as JaxAdapters
from jax_impl.ops.gemm.lora import RowAdapters as JaxRowAdapters
from kernels.tiles import LinearTiles
from shared.models.formats.weight_format import PLAIN
from shared.spec import linear
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import AdapterWeights, RowAdapters
from shared.spec.reduction_order import SHRINK, SQUARES, chunks_of_squares
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU
from tests.support.linear_kernels import EPS, Weights, normal

PARTS = {"product": (48, 16, 16), "normed": (48, 16, 16), "gated": (80, 80), "added": (80,)}
"""Parts of the weight of each kind of product."""


def adapters(num: int, rank: int, parts: tuple[int, ...], inputs: int) -> AdapterWeights:
    """Random adapters with a factor of each output, as those of DoRA."""
    ranks, outputs = rank * len(parts), sum(parts)
    return AdapterWeights(
        a=normal(20, num, ranks, inputs) / np.float32(inputs**0.5),
        b=normal(21, num, outputs, rank) / np.float32(rank**0.5),
        scales=np.full((num, ranks), 2, np.float32),
        factors=1 + normal(22, num, outputs) ** 2,
        parts=parts,
    )


def specified(kind: str, x: np.ndarray, weight: np.ndarray, lora: RowAdapters) -> np.ndarray:
    """The specification's result."""
    matrix = replace(Matrix.plain(weight), lora=lora)
    if kind == "normed":
        return linear.rmsnorm_linear(NormedStream(x), EPS, matrix)
    if kind == "gated":
        return linear.act_and_mul_linear(NormedStream(x), EPS, matrix)
    if kind == "added":
        return linear.linear_add(x, matrix, NormedStream(residual(x, weight))).rows
    return linear.product(x, matrix)


def residual(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Residual that is added to a product, by row."""
    return normal(30, 2048, len(weight))[: len(x)]


def multiplied(
    language: str,
    kind: str,
    x: np.ndarray,
    weight: np.ndarray | Weights,
    lora: RowAdapters | None,
    cut: LinearTiles,
    dtype: str = "float32",
    *,
    may_join: bool = True,
) -> np.ndarray:
    """Runs the kernels, with the second layer of stacks, as float32.

    With `may_join` the GEMM of Pallas computes the shrink of few rows.
    """
    packed = weight if isinstance(weight, Weights) else Weights(PLAIN, weight[None])
    values = packed.values[-1]
    given = Product(
        x=x,
        weight=values,
        scales=None if packed.scales is None else packed.scales[-1],
        squares=chunks_of_squares(x) if kind in ("normed", "gated") else None,
        added=residual(x, values) if kind == "added" else None,
        lora=lora,
        may_join=may_join,
    )
    how: dict[str, Any] = {"eps": EPS, "is_gated": kind == "gated", "order": SQUARES, "tiles": cut}
    run = _in_triton if language == "triton" else _in_pallas
    return run(given, dtype, how | {"format": packed.format})


class Product(NamedTuple):
    """Arrays of a product, of which packed weights and scales of groups are integers."""

    x: np.ndarray
    weight: np.ndarray
    scales: np.ndarray | None
    squares: np.ndarray | None
    added: np.ndarray | None
    lora: Any
    may_join: bool = True


def _in_triton(given: Product, dtype: str, how: dict[str, Any]) -> np.ndarray:
    device, kind, modules = "cuda" if ON_GPU else "cpu", getattr(torch, dtype), KERNELS["triton"]

    def of(x: np.ndarray | None, to: torch.dtype = torch.float32) -> Any:
        if x is None:
            return None
        array = torch.from_numpy(x)
        return array.to(device, to if array.is_floating_point() else array.dtype)

    x = of(given.x, kind)
    if given.lora is not None:
        own, slots = given.lora.weights, given.lora.slots.astype(np.int32)
        how["lora"] = modules["lora"].shrink(
            x,
            of(own.a, kind),
            of(own.b, kind),
            of(own.scales),
            of(own.factors),
            of(slots),
            parts=own.parts,
            order=SHRINK,
        )
    out, *_ = modules["linear"].product(
        x,
        of(given.weight, kind),
        of(given.scales, torch.bfloat16),
        squares=of(given.squares),
        added=of(given.added, kind),
        out_type=kind,
        **how,
    )
    return out.float().cpu().numpy()


def _in_pallas(given: Product, dtype: str, how: dict[str, Any]) -> np.ndarray:
    modules, layer = KERNELS["pallas"], jnp.int32(1)

    def of(x: np.ndarray | None, to: str = "float32") -> Any:
        if x is None:
            return None
        return jnp.asarray(x, to if x.dtype == np.float32 else x.dtype)

    def stacked(x: np.ndarray | None, axis: int, to: str = "float32") -> Any:
        """The second of two layers; the first is NaN."""
        if x is None:
            return None
        other = np.full_like(x, np.nan) if x.dtype == np.float32 else np.zeros_like(x)
        return of(np.stack([other, x], axis), to)

    def call(arrays: Product) -> jax.Array:
        lora = arrays.lora
        if lora is not None:
            lora = modules["lora"].shrink(
                arrays.x,
                lora.weights.a,
                lora.weights.b,
                lora.weights.scales,
                lora.weights.factors,
                lora.slots,
                layer,
                parts=lora.weights.parts,
                order=SHRINK,
                arrivals=lora.arrivals,
                counter=jnp.int32(1),
                interpret=INTERPRET,
            )
        out, *_ = modules["linear"].product(
            arrays.x,
            arrays.weight,
            arrays.scales,
            layer,
            first=0,
            squares=arrays.squares,
            added=arrays.added,
            norm_layer=layer,
            out_type=jnp.dtype(dtype),
            lora=lora,
            interpret=INTERPRET,
            **how,
        )
        return out.astype(jnp.float32)

    lora = None
    if given.lora is not None:
        own = given.lora.weights
        a, b = stacked(own.a, 1, dtype), stacked(own.b, 1, dtype)
        scales, factors = stacked(own.scales, 1), stacked(own.factors, 1)
        weights = JaxAdapters(a, b, scales, factors, own.parts)
        lora = JaxRowAdapters(weights, of(given.lora.slots.astype(np.int32)))
        arrivals = jnp.zeros(3, jnp.int32) if given.may_join else None
        lora = lora._replace(arrivals=arrivals)
    arrays = Product(
        x=of(given.x, dtype),
        weight=stacked(given.weight, 0, dtype),
        scales=stacked(given.scales, 0, "bfloat16"),
        squares=of(given.squares),
        added=of(given.added, dtype),
        lora=lora,
    )
    out = np.asarray(jax.jit(call, compiler_options=AS_WRITTEN)(arrays))
    if lora is not None and lora.arrivals is not None:
        assert not lora.arrivals.any()  # a compiled kernel counts in place
    return out
