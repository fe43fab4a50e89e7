"""Gate and output norm of Mamba2 layers (Triton).

TP ranks that share a group of the norm gather the sums of squares of its chunks, which are in fixed
point, so that the bits do not depend on the number of ranks.
"""

import torch
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
    sums: Float[Tensor, "R chunks"] | None,
    first_chunk: int,
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
      sums: Sums of squares of all ranks' chunks if ranks share groups, see `squares_of_chunks`.
      first_chunk: Index of the first chunk of `out` among them.
      norm_size: Columns of a group of the norm.
      gates_first: True if the gate is applied before the norm.
      factor: Multiplier of the result.
      order: Reduction order of squares.
    """
    out, projected, result = out.contiguous(), projected.contiguous(), out.new_empty(out.shape)
    columns = norm_size if sums is None else order.chunk
    chunks = triton.cdiv(norm_size, order.chunk)
    _gated_output_kernel[(len(out), out.shape[1] // columns)](
        out,
        projected,
        norm,
        None if sums is None else sums.contiguous(),
        result,
        first_chunk,
        eps,
        factor,
        values=out.shape[1],
        width=projected.shape[1],
        size=norm_size,
        columns=columns,
        chunk=order.chunk,
        spread=triton.next_power_of_2(triton.cdiv(columns, order.chunk)),
        chunks=chunks,
        all_chunks=0 if sums is None else sums.shape[1],
        digits=order.digits,
        digits_of_chunks=order.digits_of_chunks,
        is_normed=norm is not None,
        gates_first=gates_first,
        num_warps=row_warps(columns),
        **launching(out),
    )
    return result


def squares_of_chunks(
    out: Float[Tensor, "R values"],
    projected: Float[Tensor, "R outputs"],
    *,
    gates_first: bool,
    order: SquaresOrder,
) -> Float[Tensor, "R chunks"]:
    """Computes the sums of squares of the norm's inputs in chunks, of which `out` has whole ones.

    Args:
      out, projected, gates_first, order: As in `gated_output`.
    """
    out, projected = out.contiguous(), projected.contiguous()
    (rows, values), chunks = out.shape, out.shape[1] // order.chunk
    sums = out.new_empty((rows, chunks), dtype=torch.float32)
    _squares_kernel[(rows,)](
        out,
        projected,
        sums,
        values=values,
        width=projected.shape[1],
        chunk=order.chunk,
        chunks=chunks,
        spread=triton.next_power_of_2(chunks),
        digits=order.digits,
        gates_first=gates_first,
        num_warps=row_warps(values),
        **launching(out),
    )
    return sums


@triton.jit
def _gated_output_kernel(
    out_at,
    projected_at,
    norm_at,
    sums_at,
    result_at,
    first_chunk,
    eps,
    factor,
    values: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    chunks: tl.constexpr,
    all_chunks: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_normed: tl.constexpr,
    gates_first: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row and group of the norm, or chunk if ranks share groups."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns
    lane = tl.arange(0, spread)[:, None] * chunk + tl.arange(0, chunk)[None, :]
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    inside, column = lane < columns, first + lane
    x, gate = _inputs_of(out_at + row * values, projected_at + row * width, column, inside)
    if gates_first:
        x = x * gate
    if is_normed:
        if sums_at is None:
            sums = add_up(x * x, digits)
        else:
            place = tl.arange(0, triton.next_power_of_2(chunks))
            start = (first_chunk + tl.program_id(1)) // chunks * chunks
            at = sums_at + row * all_chunks + start + place
            sums = tl.load(at, mask=place < chunks, other=0.0)
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


@triton.jit
def _squares_kernel(
    out_at,
    projected_at,
    sums_at,
    values: tl.constexpr,
    width: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    gates_first: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, spread)
    column = place[:, None] * chunk + tl.arange(0, chunk)[None, :]
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    inside = column < values
    x, gate = _inputs_of(out_at + row * values, projected_at + row * width, column, inside)
    if gates_first:
        x = x * gate
    tl.store(sums_at + row * chunks + place, add_up(x * x, digits), mask=place < chunks)


@triton.jit
def _inputs_of(out_at, projected_at, column, inside):
    """Loads outputs of heads, and their gates, in float32."""
    x = tl.load(out_at + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(projected_at + column, mask=inside, other=0.0)
    return x, silu(z.to(tl.float32))
