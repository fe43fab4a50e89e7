"""Row-wise operations between the GEMMs of a layer: norms and GELU (Triton)."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.kernel_limits import row_warps
from kernels.triton_gpu.gemm.activation import soft_capped
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.sum_of_squares import add_up, exponent_of, in_floats, units_of
from shared.spec.reduction_order import SquaresOrder

BLOCK = tl.constexpr(1024)  # elements per program of element-wise kernels
LOG2_E = tl.constexpr(1.4426950408889634)


def beside(
    x: Float[Tensor, "R size"], norm: Float[Tensor, " size"] | None, *, order: SquaresOrder
) -> tuple[Float[Tensor, "R size"] | None, Float[Tensor, "R chunks"]]:
    """Computes the scaled rows and the sums of squares with which a residual stream begins.

    Returns:
      The rows times the scale of the next norm, if it has one; and their sums of squares per chunk,
      see `shared.spec.reduction_order.chunks_of_squares`.
    """
    x = x.contiguous()
    scaled = None if norm is None else torch.empty_like(x)
    shape = (len(x), triton.cdiv(x.shape[1], order.chunk))
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    # Triton requires a pointer, even if nothing reads it.
    given = (x, x if scaled is None else scaled, sums, sums if norm is None else norm, 0.0)
    flags = {"is_norm": False, "is_scaled": norm is not None}
    _row_kernel[(len(x),)](*given, **flags, **_settings(x, order))
    return scaled, sums


def rms_norm(
    x: Float[Tensor, "R size"],
    weight: Float[Tensor, " size"] | None,
    eps: float,
    *,
    order: SquaresOrder,
) -> Float[Tensor, "R size"]:
    """Implements `shared.spec.layers.rms_norm`; without a weight, the scale is 1.

    The rows may be a slice of the columns of wider rows.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    given = (x, out, out, out if weight is None else weight, eps)  # as above
    flags = {"is_norm": True, "is_scaled": weight is not None}
    _row_kernel[(len(x),)](*given, **flags, **_settings(x, order))
    return out


def added_norm(
    x: Float[Tensor, "R size"],
    end_norm: Float[Tensor, " size"],
    eps: float,
    rows: Float[Tensor, "R size"],
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " size"] | None,
    *,
    order: SquaresOrder,
) -> tuple[
    Float[Tensor, "R size"], Float[Tensor, "R size"] | None, Float[Tensor, "R chunks"] | None
]:
    """Adds the RMS norm of `x` to the rows of a residual stream, and multiplies by the scalar.

    Returns:
      The new rows, and with a next norm their results of `beside`. All have the bits of `rms_norm`,
      an addition, a float32 product and `beside`, each rounded.
    """
    x, rows = x.contiguous(), rows.contiguous()
    out, scaled, sums = torch.empty_like(rows), None, None
    if norm is not None:
        shape = (len(x), triton.cdiv(x.shape[1], order.chunk))
        scaled = torch.empty_like(rows)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    arrays = (x, end_norm, rows, scalar, norm, out, scaled, sums)
    flags = {"is_multiplied": scalar is not None, "is_scaled": norm is not None}
    _added_norm_kernel[(len(x),)](
        *(out if each is None else each for each in arrays),  # as above
        eps,
        **flags,
        **_settings(x, order),
    )
    return out, scaled, sums


def norm_values(
    qkv: Float[Tensor, "R outputs"],
    eps: float,
    *,
    stored: int,
    head_size: int,
    are_keys: bool,
    order: SquaresOrder,
) -> Float[Tensor, "R with_values"]:
    """Implements `shared.spec.attention_layer.norm_values`; `stored` columns precede those of which
    the norm is computed.
    """
    qkv, (R, outputs) = qkv.contiguous(), qkv.shape
    appended = outputs - stored if are_keys else 0
    out = qkv.new_empty((R, outputs + appended))
    sizes = {"outputs": outputs, "appended": appended, "others": stored + appended}
    settings = _settings(qkv[:, :head_size], order)
    _values_kernel[(R, out.shape[1] // head_size)](qkv, out, eps, **sizes, **settings)
    return out


def layer_norm(
    x: Float[Tensor, "R size"],
    weight: Float[Tensor, " size"],
    bias: Float[Tensor, " size"],
    eps: float,
    *,
    order: SquaresOrder,
) -> Float[Tensor, "R size"]:
    """Implements `shared.spec.layers.layer_norm`; the mean is summed in the same way as squares."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _layer_norm_kernel[(len(x),)](x, out, weight, bias, eps, **_settings(x, order))
    return out


def gelu(x: Float[Tensor, "R size"]) -> Float[Tensor, "R size"]:
    """Implements `shared.spec.layers.gelu`."""
    return _gelu(x, is_tanh=False)


def gelu_tanh(x: Float[Tensor, "R size"]) -> Float[Tensor, "R size"]:
    """Implements `shared.spec.layers.gelu_tanh`."""
    return _gelu(x, is_tanh=True)


def _gelu(x: Float[Tensor, "R size"], *, is_tanh: bool) -> Float[Tensor, "R size"]:
    x = x.contiguous()
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), BLOCK.value),)
    _gelu_kernel[grid](x, out, x.numel(), is_tanh=is_tanh, num_warps=4, **launching(x))
    return out


def softcap(x: Float[Tensor, "R size"], capped: float) -> Float[Tensor, "R size"]:
    """Implements `shared.spec.layers.softcap`."""
    x = x.contiguous()
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), BLOCK.value),)
    _softcap_kernel[grid](x, out, x.numel(), capped=capped, num_warps=4, **launching(x))
    return out


def bilinear_pos_embed(
    table: Float[Tensor, "places hidden"],
    corners: Int[Tensor, "R 4"],
    shares: Float[Tensor, "R 4"],
) -> Float[Tensor, "R hidden"]:
    """Implements `shared.spec.layers.bilinear_pos_embed`, summed in the order of the corners."""
    R, hidden = len(corners), table.shape[1]
    out, block = table.new_empty((R, hidden)), triton.next_power_of_2(hidden)
    given = (table, corners.contiguous(), shares.contiguous(), out)
    _blend_kernel[(R,)](*given, hidden=hidden, block=block, num_warps=4, **launching(table))
    return out


def _settings(x: Float[Tensor, "R size"], order: SquaresOrder) -> dict[str, int | bool]:
    size = x.shape[1]
    return {
        "size": size,
        "chunk": order.chunk,
        "spread": triton.next_power_of_2(triton.cdiv(size, order.chunk)),
        "digits": order.digits,
        "digits_of_chunks": order.digits_of_chunks,
        "num_warps": row_warps(size),
        **launching(x),
    }


@triton.jit
def _row_kernel(
    x_at,
    out_at,
    sums_at,
    weight_at,
    eps,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_launched: tl.constexpr,
    is_norm: tl.constexpr,
    is_scaled: tl.constexpr,
):
    """One program per row: its norm, or its sums of squares per chunk and the scaled row."""
    row = tl.program_id(0).to(tl.int64)
    column = _columns(chunk, spread)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_at + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    sums = add_up(x * x, digits)
    if is_norm:
        x = _normed(x, sums, eps, size, digits_of_chunks)
    else:
        _store_sums(sums_at, row, sums, size, chunk, spread)
    if is_scaled:
        x = x * tl.load(weight_at + column, mask=column < size, other=0.0)
    if is_norm or is_scaled:
        tl.store(out_at + row * size + column, x.to(out_at.dtype.element_ty), mask=column < size)


@triton.jit
def _added_norm_kernel(
    x_at,
    end_norm_at,
    rows_at,
    scalar_at,
    norm_at,
    out_at,
    scaled_at,
    sums_at,
    eps,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_launched: tl.constexpr,
    is_multiplied: tl.constexpr,
    is_scaled: tl.constexpr,
):
    """One program per row: adds its norm to the stream, then as `beside` for the sum."""
    row, column = tl.program_id(0).to(tl.int64), _columns(chunk, spread)
    inside = column < size
    # No kernel writes weights, so they are loaded while the previous kernel ends.
    end_norm = tl.load(end_norm_at + column, mask=inside, other=0.0)
    if is_scaled:
        norm = tl.load(norm_at + column, mask=inside, other=0.0)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_at + row * size + column, mask=inside, other=0.0).to(tl.float32)
    rows = tl.load(rows_at + row * size + column, mask=inside, other=0.0)
    x = _normed(x, add_up(x * x, digits), eps, size, digits_of_chunks) * end_norm
    rows = (rows.to(tl.float32) + x.to(rows.dtype).to(tl.float32)).to(rows.dtype)
    if is_multiplied:
        rows = (rows.to(tl.float32) * tl.load(scalar_at)).to(rows.dtype)
    tl.store(out_at + row * size + column, rows, mask=inside)
    if is_scaled:
        x = tl.where(inside, rows.to(tl.float32), 0.0)
        _store_sums(sums_at, row, add_up(x * x, digits), size, chunk, spread)
        tl.store(scaled_at + row * size + column, (x * norm).to(rows.dtype), mask=inside)


@triton.jit
def _values_kernel(
    qkv_at,
    out_at,
    eps,
    outputs: tl.constexpr,
    appended: tl.constexpr,
    others: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row and head: the norm of a value head, or a copy of another."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    column = _columns(chunk, spread)
    is_value = first >= others
    source = first - is_value.to(tl.int32) * appended
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    at = qkv_at + row * outputs + source + column
    x = tl.load(at, mask=column < size, other=0.0).to(tl.float32)
    if is_value:
        x = _normed(x, add_up(x * x, digits), eps, size, digits_of_chunks)
    at = out_at + row * (outputs + appended) + first + column
    tl.store(at, x.to(out_at.dtype.element_ty), mask=column < size)


@triton.jit
def _columns(chunk: tl.constexpr, spread: tl.constexpr):
    """Returns the column of each element of a row in chunks, also of those beyond the row."""
    return tl.arange(0, spread)[:, None] * chunk + tl.arange(0, chunk)[None, :]


@triton.jit
def _store_sums(sums_at, row, sums, size: tl.constexpr, chunk: tl.constexpr, spread: tl.constexpr):
    """Stores the sums of squares of the chunks of a row."""
    part = tl.arange(0, spread)
    chunks: tl.constexpr = (size + chunk - 1) // chunk
    tl.store(sums_at + row * chunks + part, sums, mask=part < chunks)


@triton.jit
def _normed(x, sums, eps, size: tl.constexpr, digits_of_chunks: tl.constexpr):
    """Divides a row by its root mean square, from its sums of squares per chunk."""
    exponent = exponent_of(tl.max(sums, 0), digits_of_chunks)
    units = tl.sum(units_of(sums, exponent, digits_of_chunks), 0)
    total = in_floats(units, exponent, digits_of_chunks)
    return x * tl.rsqrt(total * (1.0 / size) + eps)


@triton.jit
def _layer_norm_kernel(
    x_at,
    out_at,
    weight_at,
    bias_at,
    eps,
    size: tl.constexpr,
    chunk: tl.constexpr,
    spread: tl.constexpr,
    digits: tl.constexpr,
    digits_of_chunks: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row: mean subtracted, divided by the deviation, scaled and shifted."""
    row = tl.program_id(0).to(tl.int64)
    column = _columns(chunk, spread)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    inside = column < size
    x = tl.load(x_at + row * size + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - _sum(x, digits, digits_of_chunks) * (1.0 / size), 0.0)
    x = x * tl.rsqrt(_sum(x * x, digits, digits_of_chunks) * (1.0 / size) + eps)
    x = x * tl.load(weight_at + column, mask=inside, other=0.0)
    x = x + tl.load(bias_at + column, mask=inside, other=0.0)
    tl.store(out_at + row * size + column, x.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _sum(terms, digits: tl.constexpr, digits_of_chunks: tl.constexpr):
    """Adds the terms of a row, [chunks, terms], chunk by chunk, in units of the largest."""
    exponent = exponent_of(tl.max(tl.abs(terms), 1), digits)
    sums = in_floats(tl.sum(units_of(terms, exponent[:, None], digits), 1), exponent, digits)
    exponent = exponent_of(tl.max(tl.abs(sums), 0), digits_of_chunks)
    units = tl.sum(units_of(sums, exponent, digits_of_chunks), 0)
    return in_floats(units, exponent, digits_of_chunks)


@triton.jit
def _gelu_kernel(x_at, out_at, count, is_tanh: tl.constexpr, is_launched: tl.constexpr):
    """One program per block of elements, across rows."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    start, place = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    inside = place < count - start
    x = tl.load(x_at + start + place, mask=inside, other=0.0).to(tl.float32)
    if is_tanh:
        # x (1 + tanh(y)) / 2, which is x / (1 + exp(-2 y)).
        y = x * (1.5957691216057308 + 0.07135481627260025 * (x * x))
        out = x / (1.0 + tl.exp2(-y * LOG2_E))
    else:
        # Normal tail probability above |x|, Abramowitz and Stegun 7.1.26: error at most 1e-7.
        z = tl.abs(x) * 0.7071067811865476
        y = 0.3275911 * z
        t = 1.0 - y / (1.0 + y)  # 1 / (1 + y): the two compilers divide differently
        above = t * (
            0.127414796
            + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        )
        above = above * tl.exp2(-(z * z) * LOG2_E)
        out = x * tl.where(x < 0, above, 1.0 - above)
    tl.store(out_at + start + place, out.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _softcap_kernel(x_at, out_at, count, capped: tl.constexpr, is_launched: tl.constexpr):
    """One program per block of elements, across rows."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    start, place = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    inside = place < count - start
    x = tl.load(x_at + start + place, mask=inside, other=0.0).to(tl.float32)
    out = soft_capped(x, capped)
    tl.store(out_at + start + place, out.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _blend_kernel(
    table_at,
    corners_at,
    shares_at,
    out_at,
    hidden: tl.constexpr,
    block: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row: the weighted sum of the rows of its corners."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    out = tl.zeros((block,), tl.float32)
    for corner in tl.static_range(4):
        start = tl.load(corners_at + row * 4 + corner).to(tl.int64) * hidden
        x = tl.load(table_at + start + column, mask=column < hidden, other=0.0).to(tl.float32)
        out += x * tl.load(shares_at + row * 4 + corner)
    tl.store(out_at + row * hidden + column, out.to(out_at.dtype.element_ty), mask=column < hidden)
