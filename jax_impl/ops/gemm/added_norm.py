"""Residual addition after a norm; same as `shared.spec.added_norm`. On a GPU it is one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jax_impl.ops import Kernels, Norm, alone, is_bfloat16, kernel_or_reference, stacked
from jax_impl.ops.gemm import layers
from jax_impl.ops.gemm.linear import NormedStream, beside_kernels
from shared.boundary.tp_group import SINGLE_RANK
from shared.spec.reduction_order import SQUARES


def plain_added_norm(
    x: Float[jax.Array, "R hidden"],
    end_norm: Norm,
    eps: float,
    stream: NormedStream,
    scalar: Norm | None,
    norm: Norm | None,
) -> NormedStream:
    rows = stream.whole + layers.rms_norm(x, alone(end_norm), eps)
    if (number := alone(scalar)) is not None:
        rows = (rows.astype(jnp.float32) * number).astype(rows.dtype)
    return stream.with_next_norm(rows, norm)


def kernel_added_norm(
    kernels: Kernels,
    x: Float[jax.Array, "R hidden"],
    end_norm: Norm,
    eps: float,
    stream: NormedStream,
    scalar: Norm | None,
    norm: Norm | None,
) -> NormedStream:
    rows, scaled, squares = kernels.layers.added_norm(
        x,
        *stacked(end_norm),
        eps,
        stream.whole,
        *stacked(scalar),
        *stacked(norm),
        order=SQUARES,
    )
    return stream.with_next_norm(rows, norm, scaled, squares)


def _added_norm_beside_kernels(*args: Any, **how: Any) -> NormedStream:
    added = plain_added_norm(*args, **how)
    if added.norm is None:
        return added
    of_whole = beside_kernels(added._replace(group=SINGLE_RANK))  # ranks keep whole rows
    return of_whole._replace(group=added.group)


added_norm = kernel_or_reference(
    kernel_added_norm, plain_added_norm, is_bfloat16, _added_norm_beside_kernels
)
