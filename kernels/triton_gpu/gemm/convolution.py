"""Convolutions before and after the attention and MLP of a DFlash2 layer (Triton).

Coefficients and rows are bfloat16, so each product is exact in float32. The sums have the bits of
the reference operations.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.kernel_limits import row_warps
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.sum_of_squares import add_up
from shared.spec.reduction_order import SquaresOrder

BLOCK = 512  # columns per program, if no norm follows


def before(
    normed: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
) -> Float[Tensor, "R hidden"]:
    """Implements `shared.spec.convolution.before`."""
    (R, hidden), out = normed.shape, torch.empty_like(normed)
    # Triton requires a pointer, even if nothing reads it.
    given = (normed, base, moved, normed, normed, out, out, 0.0)
    config = {"chunk": BLOCK, "spread": 1, "digits": 0, "digits_of_chunks": 0, "is_behind": False}
    how = {**_sizes(base, moved, size), **config, "num_warps": 4, **launching(normed)}
    _kernel[(R, triton.cdiv(hidden, BLOCK))](*given, **how)
    return out


def behind(
    given: Float[Tensor, "R hidden"],
    base: Float[Tensor, "2 taps hidden"],
    moved: Float[Tensor, "R 2 taps groups"],
    size: int,
    x: Float[Tensor, "R hidden"],
    norm: Float[Tensor, " hidden"],
    eps: float,
    *,
    order: SquaresOrder,
) -> tuple[Float[Tensor, "R hidden"], Float[Tensor, "R hidden"]]:
    """Implements `shared.spec.convolution.behind`."""
    (R, hidden), out, normed = x.shape, torch.empty_like(x), torch.empty_like(x)
    config = {
        "chunk": order.chunk,
        "spread": triton.next_power_of_2(triton.cdiv(hidden, order.chunk)),
        "digits": order.digits,
        "digits_of_chunks": order.digits_of_chunks,
        "is_behind": True,
    }
    how = {**_sizes(base, moved, size), **config, "num_warps": row_warps(hidden), **launching(x)}
    _kernel[(R, 1)](given, base, moved, x, norm, out, normed, eps, **how)
    return out, normed


def _sizes(
    base: Float[Tensor, "2 taps hidden"], moved: Float[Tensor, "R 2 taps groups"], size: int
) -> dict[str, int]:
    _, taps, hidden = base.shape
    return {"hidden": hidden, "taps": taps, "groups": moved.shape[3], "size": size}


@triton.jit
def _kernel(
    values_at,
    base_at,
    moved_at,
    x_at,
    norm_at,
    out_at,
    normed_at,
    eps,
    hidden: tl.constexpr,
    taps: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_behind: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row, or per block of its columns if no norm follows."""
    row, side = tl.program_id(0).to(tl.int64), 1 if is_behind else 0
    column = tl.arange(0, spread)[:, None] * chunk + tl.arange(0, chunk)[None, :]
    column += tl.program_id(1) * spread * chunk
    inside, slot = column < hidden, row % size
    group = column // (hidden // groups)
    total = tl.zeros((spread, chunk), tl.float32)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if is_behind:
        total += tl.load(x_at + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(taps):
        at = values_at + (row - tap) * hidden + column
        until = tl.where(slot >= tap, hidden, 0)  # taps before the block are skipped
        read = tl.load(at, mask=column < until, other=0.0).to(tl.float32)
        place = side * taps + tap
        own = tl.load(base_at + place * hidden + column, mask=inside, other=0.0)
        total += own.to(tl.float32) * read
        at = moved_at + (row * 2 * taps + place) * groups + group
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32) * read
    out = total.to(out_at.dtype.element_ty)
    tl.store(out_at + row * hidden + column, out, mask=inside)
    if is_behind:
        x = out.to(tl.float32)
        squares = add_up(tl.reshape(add_up(x * x, digits), (1, spread)), digits_of_chunks)
        x = x * tl.rsqrt(squares[:, None] * (1.0 / hidden) + eps)
        x = x * tl.load(norm_at + column, mask=inside, other=0.0)
        tl.store(normed_at + row * hidden + column, x.to(normed_at.dtype.element_ty), mask=inside)
