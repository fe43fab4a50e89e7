"""Gate and output norm of Mamba2 layers (Triton)."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.kernel_limits import row_warps
from kernels.triton_gpu.gdn.gdn_rows import silu
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.sum_of_squares import add_up, exponent_of, in_floats, units_of
from shared.spec.reduction_order import SquaresOrder


def gated_output(
    out: Float[Tensor, "R values"],
    projected: Float[Tensor, "R outputs"],
    norm: Float[Tensor, " values"] | None,
    *,
    eps: float,
    norm_size: int,
    gates_first: bool,
    factor: float,
    order: SquaresOrder,
) -> Float[Tensor, "R values"]:
    """Implements `shared.spec.recurrent_mixer.gated_output`.

    Args:
      out: Outputs of the heads.
      projected: Output of the input projection, which begins with the gate z.
      norm, eps: Weight and epsilon of the norm; the weight is None for the gate alone.
      norm_size: Columns of a group of the norm.
      gates_first: True if the gate is applied before the norm.
      factor: Multiplier of the result.
      order: Reduction order of squares.
    """
    out, projected, result = out.contiguous(), projected.contiguous(), out.new_empty(out.shape)
    _gated_output_kernel[(len(out), out.shape[1] // norm_size)](
        out,
        projected,
        norm,
        result,
        eps,
        factor,
        values=out.shape[1],
        width=projected.shape[1],
        size=norm_size,
        chunk=order.chunk,
        spread=triton.next_power_of_2(triton.cdiv(norm_size, order.chunk)),
        digits=order.digits,
        digits_of_chunks=order.digits_of_chunks,
        is_normed=norm is not None,
        gates_first=gates_first,
        num_warps=row_warps(norm_size),
        **launching(out),
    )
    return result


@triton.jit
def _gated_output_kernel(
    out_at,
    projected_at,
    norm_at,
    result_at,
    eps,
    factor,
    values: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_normed: tl.constexpr,
    gates_first: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row and group of the norm."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    lane = tl.arange(0, spread)[:, None] * chunk + tl.arange(0, chunk)[None, :]
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    inside, column = lane < size, first + lane
    x = tl.load(out_at + row * values + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(projected_at + row * width + column, mask=inside, other=0.0)
    gate = silu(z.to(tl.float32))
    if gates_first:
        x = x * gate
    if is_normed:
        sums = add_up(x * x, digits)
        exponent = exponent_of(tl.max(sums, 0), digits_of_chunks)
        units = tl.sum(units_of(sums, exponent, digits_of_chunks), 0)
        total = in_floats(units, exponent, digits_of_chunks)
        x = x * tl.rsqrt(total * (1.0 / size) + eps)
        x = x * tl.load(norm_at + column, mask=inside, other=0.0)
    if not gates_first:
        x = x * gate
    x = x * factor
    to = result_at + row * values + column
    tl.store(to, x.to(result_at.dtype.element_ty), mask=inside)
