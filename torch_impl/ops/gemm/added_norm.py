"""Residual addition after a norm; same as `shared.spec.added_norm`. On a GPU it is one kernel."""

from jaxtyping import Float
from torch import Tensor

from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from torch_impl.ops.gemm import layers
from torch_impl.ops.gemm.linear import NormedStream


def plain_added_norm(
    x: Float[Tensor, "R hidden"],
    end_norm: Float[Tensor, " hidden"],
    eps: float,
    stream: NormedStream,
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    rows = stream.whole + layers.rms_norm(x, end_norm, eps)
    if scalar is not None:
        rows = (rows.float() * scalar).to(rows.dtype)
    return stream.with_next_norm(rows, norm)


def kernel_added_norm(
    kernels: Kernels,
    x: Float[Tensor, "R hidden"],
    end_norm: Float[Tensor, " hidden"],
    eps: float,
    stream: NormedStream,
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    rows, scaled, squares = kernels.layers.added_norm(
        x, end_norm, eps, stream.whole, scalar, norm, order=SQUARES
    )
    return stream.with_next_norm(rows, norm, scaled, squares)


added_norm = kernel_or_reference(kernel_added_norm, plain_added_norm, is_bfloat16)
