"""Convolution along the rows of a block; same as `shared.spec.convolution`.

On a GPU these are kernels for bfloat16.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from torch_impl.ops.gemm.layers import plain_rms_norm


def convolved(
    values: Float[Tensor, "R hidden"],
    base: Float[Tensor, "taps hidden"],
    moved: Float[Tensor, "R taps groups"],
    size: int,
    added: Float[Tensor, "R hidden"] | None,
) -> Float[Tensor, "R hidden"]:
    """Convolves each column over a row and the rows before it in its block, after `added`; float32.

    Products of two bfloat16 numbers are exact in float32, so fused multiply-add changes no bit.
    """
    (R, hidden), taps, groups = values.shape, len(base), moved.shape[2]
    wide, moved = values.float().view(R, groups, -1), moved.float()
    own = base.float().view(taps, groups, -1)
    total = torch.zeros_like(wide) if added is None else added.float().view_as(wide)
    for tap in range(taps):
        read = wide
        if tap:
            before = wide.view(-1, size, hidden)[:, : size - tap]
            read = functional.pad(before, (0, 0, tap, 0)).view_as(wide)
        total = torch.addcmul(total, own[tap], read)
        total = torch.addcmul(total, moved[:, tap, :, None], read)
    return total.view(R, hidden)


def plain_before(
    normed: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
) -> Float[Tensor, "R hidden"]:
    """Applies the first convolution; the result is the input of attention or MLP."""
    return convolved(normed, base[0], moved[:, 0], size, None).to(normed.dtype)


def kernel_before(
    kernels: Kernels,
    normed: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
) -> Float[Tensor, "R hidden"]:
    return kernels.convolution.before(normed, base, moved, size)


before = kernel_or_reference(kernel_before, plain_before, is_bfloat16)


def plain_behind(
    given: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
    x: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"],
    eps: float,
) -> tuple[Float[Tensor, "R hidden"], Float[Tensor, "R hidden"]]:
    """Applies the second convolution, adds to the residual stream, and returns it and its norm."""
    x = convolved(given, base[1], moved[:, 1], size, x).to(x.dtype)
    return x, plain_rms_norm(x, norm, eps)


def kernel_behind(
    kernels: Kernels,
    given: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
    x: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"],
    eps: float,
) -> tuple[Float[Tensor, "R hidden"], Float[Tensor, "R hidden"]]:
    return kernels.convolution.behind(given, base, moved, size, x, norm, eps, order=SQUARES)


behind = kernel_or_reference(kernel_behind, plain_behind, is_bfloat16)
