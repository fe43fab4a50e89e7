"""Row-wise layer operations: norms and RoPE angles are float32 for any model dtype.

Same as `shared.spec.layers`. On a GPU norms, GELU and `bilinear_pos_embed` are kernels for
bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from shared.models.activation import GELU_TANH, SCALED_SILU, SILU, Activation
from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference

PIECE = 32
"""Outputs of a product that a CPU makes at a time."""
_LANES = 32
"""A multiple of the numbers that a CPU works on at once, twice."""


def linear(
    x: Float[Tensor, "R inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "R outputs"]:
    """Computes a GEMM.

    On a CPU it is split into pieces of one size, the last padded, because the reduction order of
    CPU libraries depends on the number of outputs and so on the TP size. This takes no longer.
    """
    if x.is_cuda:
        return functional.linear(x, weight)
    whole = len(weight) // PIECE * PIECE
    parts = []
    if whole:
        parts.append(_by_pieces(x, weight[:whole]))
    if rest := len(weight) - whole:
        last = functional.pad(weight[whole:], (0, 0, 0, PIECE - rest))
        parts.append(_by_pieces(x, last)[:, :rest])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _by_pieces(
    x: Float[Tensor, "R inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "R outputs"]:
    pieces = weight.view(-1, PIECE, x.shape[1])
    out = torch.bmm(x.expand(len(pieces), *x.shape), pieces.mT)
    return out.view(1, -1) if len(x) == 1 else out.transpose(0, 1).flatten(1)


def _lane_by_lane(
    function: Callable[[Tensor], Tensor], x: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Applies a function elementwise, with bits that do not depend on an element's index.

    Some torch functions differ for the elements after the last full CPU register. The input is
    padded to full registers for each thread.
    """
    if x.is_cuda:
        return function(x)
    spare = -x.numel() % (_LANES * torch.get_num_threads())
    if not spare:
        return function(x.contiguous())
    return function(functional.pad(x.flatten(), (0, spare)))[: x.numel()].view(x.shape)


def sigmoid(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return _lane_by_lane(torch.sigmoid, x)


def softplus(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Computes log(1 + exp(x)) without overflow; torch's own returns `x` above 20."""
    return _lane_by_lane(lambda x: torch.logaddexp(x, torch.zeros_like(x)), x)


def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return _lane_by_lane(functional.silu, x)


@dataclass(frozen=True)
class ImageEmbeds:
    """Image embeddings that replace token embeddings."""

    pool: Float[Tensor, "rows hidden"]
    sources: Int[Tensor, " R"]


def embed_tokens(
    table: Float[Tensor, "vocab hidden"],
    tokens: Int[Tensor, " R"],
    shown: ImageEmbeds | None,
    factor: float = 1.0,
) -> Float[Tensor, "R hidden"]:
    own = table[tokens] if factor == 1 else table[tokens] * factor
    if shown is None:
        return own
    return torch.where(shown.sources[:, None] > 0, shown.pool[shown.sources], own)


def rounded(number: float, like: Float[Tensor, "..."]) -> float:
    """Returns a number rounded to the dtype of a tensor."""
    return torch.tensor(number, dtype=like.dtype).item()


def plain_rms_norm(
    x: Float[Tensor, "... size"], weight: Float[Tensor, " size"] | None, eps: float
) -> Float[Tensor, "... size"]:
    """Computes RMS norm over the last axis in float32; the result has the dtype of `x`."""
    return functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def kernel_rms_norm(
    kernels: Kernels,
    x: Float[Tensor, "... size"],
    weight: Float[Tensor, " size"] | None,
    eps: float,
) -> Float[Tensor, "... size"]:
    rows = x.reshape(-1, x.shape[-1])
    return kernels.layers.rms_norm(rows, weight, eps, order=SQUARES).view(x.shape)


rms_norm = kernel_or_reference(kernel_rms_norm, plain_rms_norm, is_bfloat16)


def plain_layer_norm(
    x: Float[Tensor, "... size"],
    weight: Float[Tensor, " size"],
    bias: Float[Tensor, " size"],
    eps: float,
) -> Float[Tensor, "... size"]:
    """Computes layer norm over the last axis in float32; the result has the dtype of `x`."""
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def kernel_layer_norm(
    kernels: Kernels,
    x: Float[Tensor, "... size"],
    weight: Float[Tensor, " size"],
    bias: Float[Tensor, " size"],
    eps: float,
) -> Float[Tensor, "... size"]:
    rows = x.reshape(-1, x.shape[-1])
    return kernels.layers.layer_norm(rows, weight, bias, eps, order=SQUARES).reshape(x.shape)


layer_norm = kernel_or_reference(kernel_layer_norm, plain_layer_norm, is_bfloat16)


def plain_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return _lane_by_lane(functional.gelu, x.float()).to(x.dtype)


def kernel_gelu(kernels: Kernels, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return kernels.layers.gelu(x)


gelu = kernel_or_reference(kernel_gelu, plain_gelu, is_bfloat16)


def plain_gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return _lane_by_lane(partial(functional.gelu, approximate="tanh"), x.float()).to(x.dtype)


def kernel_gelu_tanh(kernels: Kernels, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return kernels.layers.gelu_tanh(x)


gelu_tanh = kernel_or_reference(kernel_gelu_tanh, plain_gelu_tanh, is_bfloat16)


def plain_softcap(x: Float[Tensor, "..."], capped: float) -> Float[Tensor, "..."]:
    return capped * torch.tanh(x / capped)


def kernel_softcap(
    kernels: Kernels, x: Float[Tensor, "..."], capped: float
) -> Float[Tensor, "..."]:
    return kernels.layers.softcap(x, capped)


softcap = kernel_or_reference(kernel_softcap, plain_softcap)


def act_and_mul(
    gate: Float[Tensor, "..."], up: Float[Tensor, "..."], activation: Activation
) -> Float[Tensor, "..."]:
    if activation.kind == GELU_TANH:
        return plain_gelu_tanh(gate) * up
    if activation.kind == SILU:
        return silu(gate) * up
    if activation.kind == SCALED_SILU:
        return silu(gate * activation.alpha) * up * activation.factor
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * sigmoid(activation.alpha * gate) * (up + 1)


def activated(x: Float[Tensor, "... columns"], activation: Activation) -> Float[Tensor, "..."]:
    if not activation.is_gated:
        return torch.relu(x).square()
    gate, up = x.chunk(2, dim=-1)
    return act_and_mul(gate, up, activation)


def plain_bilinear_pos_embed(
    table: Float[Tensor, "places hidden"],
    corners: Int[Tensor, "R 4"],
    shares: Float[Tensor, "R 4"],
) -> Float[Tensor, "R hidden"]:
    return (table[corners].float() * shares[..., None]).sum(dim=1).to(table.dtype)


def kernel_bilinear_pos_embed(
    kernels: Kernels,
    table: Float[Tensor, "places hidden"],
    corners: Int[Tensor, "R 4"],
    shares: Float[Tensor, "R 4"],
) -> Float[Tensor, "R hidden"]:
    return kernels.layers.bilinear_pos_embed(table, corners, shares)


bilinear_pos_embed = kernel_or_reference(
    kernel_bilinear_pos_embed, plain_bilinear_pos_embed, is_bfloat16
)


def l2norm(x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def summed(x: Float[Tensor, "... size"]) -> Float[Tensor, "... 1"]:
    """Sums over the last axis, in the same order for any number of rows."""
    return x.sum(dim=-1, keepdim=True)


def rotary_angles(
    positions: Int[Tensor, "R ..."], frequencies: Float[Tensor, " half"], factor: float
) -> tuple[Float[Tensor, "R half"], Float[Tensor, "R half"]]:
    """Computes RoPE cos and sin of each position, times the attention factor."""
    angles = positions.view(len(positions), -1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def query_scaling(positions: Int[Tensor, " R"], beta: float, context: int) -> Float[Tensor, " R"]:
    return 1 + beta * torch.log(1 + torch.floor(positions.float() / context))


def apply_rotary_interleaved(
    x: Float[Tensor, "R H D"], cos: Float[Tensor, "R half"], sin: Float[Tensor, "R half"]
) -> Float[Tensor, "R H D"]:
    """Rotates dimension 2 i with dimension 2 i + 1."""
    first, second = x.unflatten(2, (-1, 2)).unbind(3)
    cos, sin = cos[:, None], sin[:, None]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack([part.to(x.dtype) for part in turned], dim=3).flatten(2)


def apply_rotary(
    x: Float[Tensor, "R H D"], cos: Float[Tensor, "R half"], sin: Float[Tensor, "R half"]
) -> Float[Tensor, "R H D"]:
    """Rotates dimension i with dimension i + half; dimensions past 2 * half are unchanged."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)
