"""As `shared.spec.layers`, in torch; norms and rotary angles are float32 whatever the model is.

On a GPU the norm of bfloat16 is a kernel; see `torch_impl.ops`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from shared.spec.numerics import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_plain


def sigmoid(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return torch.sigmoid(x)


def softplus(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """As the specification, at all sizes of `x`; torch's own would switch to `x` at 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return functional.silu(x)


def embedded(
    table: Float[Tensor, "vocab hidden"], tokens: Int[Tensor, " R"], factor: float = 1.0
) -> Float[Tensor, "R hidden"]:
    return table[tokens] if factor == 1 else table[tokens] * factor


def plain_rms_norm(
    x: Float[Tensor, "... size"], weight: Float[Tensor, " size"] | None, eps: float
) -> Float[Tensor, "... size"]:
    """As the specification; `weight` is float32, the result has the type of `x`."""
    return functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def kernel_rms_norm(
    kernels: Kernels,
    x: Float[Tensor, "... size"],
    weight: Float[Tensor, " size"] | None,
    eps: float,
) -> Float[Tensor, "... size"]:
    rows = x.reshape(-1, x.shape[-1])
    return kernels.layers.rms_norm(rows, weight, eps, order=SQUARES).view(x.shape)


rms_norm = kernel_or_plain(kernel_rms_norm, plain_rms_norm, is_bfloat16)


def l2norm(x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def rotary_angles(
    positions: Int[Tensor, " R"], frequencies: Float[Tensor, " half"], factor: float
) -> tuple[Float[Tensor, "R half"], Float[Tensor, "R half"]]:
    """As the specification, from its frequencies and its attention factor."""
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def query_growth(positions: Int[Tensor, " R"], beta: float, context: int) -> Float[Tensor, " R"]:
    return 1 + beta * torch.log(1 + torch.floor(positions.float() / context))


def apply_rotary(
    x: Float[Tensor, "R H D"], cos: Float[Tensor, "R half"], sin: Float[Tensor, "R half"]
) -> Float[Tensor, "R H D"]:
    """As the specification; float32 inside, the result has the type of `x`."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)
