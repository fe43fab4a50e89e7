"""As `shared.spec.convolution`, in torch; on a GPU what is in bfloat16 is kernels."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_plain
from torch_impl.ops.gemm.layers import plain_rms_norm


def convolved(
    values: Float[Tensor, "R hidden"],
    base: Float[Tensor, "taps hidden"],
    moved: Float[Tensor, "R taps groups"],
    size: int,
    added: Float[Tensor, "R hidden"] | None,
) -> Float[Tensor, "R hidden"]:
    """As the specification.

    Products of two numbers in bfloat16 are whole in float32, so no fusion with a sum changes a bit.
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
    """As the specification, in the type of the rows."""
    return convolved(normed, base[0], moved[:, 0], size, None).to(normed.dtype)


def kernel_before(
    kernels: Kernels,
    normed: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
) -> Float[Tensor, "R hidden"]:
    return kernels.convolution.before(normed, base, moved, size)


before = kernel_or_plain(kernel_before, plain_before, is_bfloat16)


def plain_behind(
    given: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
    x: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"],
    eps: float,
) -> tuple[Float[Tensor, "R hidden"], Float[Tensor, "R hidden"]]:
    """As the specification; the stream and its norm have the type of the rows."""
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


behind = kernel_or_plain(kernel_behind, plain_behind, is_bfloat16)
