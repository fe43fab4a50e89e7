"""What stands between the products of a layer, over whole rows, in Triton."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.limits import row_warps
from kernels.triton_gpu.linear import launching
from kernels.triton_gpu.squares import add_up, exponent_of, in_floats, units_of
from shared.spec.numerics import SquaresOrder


def beside(
    x: Float[Tensor, "R size"], norm: Float[Tensor, " size"] | None, *, order: SquaresOrder
) -> tuple[Float[Tensor, "R size"] | None, Float[Tensor, "R chunks"]]:
    """What stands beside rows that begin a stream.

    Returns:
      The rows times the scale of the norm through which they are read, if it has one, and their
      squares in chunks, as `shared.spec.numerics.chunks_of_squares`.
    """
    x = x.contiguous()
    scaled = None if norm is None else torch.empty_like(x)
    shape = (len(x), triton.cdiv(x.shape[1], order.chunk))
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    # Pointers must be there, also where nothing reads them.
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
    """As `shared.spec.layers.rms_norm`; without a weight, the scale is 1.

    The rows may be columns of wider ones.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    given = (x, out, out, out if weight is None else weight, eps)  # as above
    flags = {"is_norm": True, "is_scaled": weight is not None}
    _row_kernel[(len(x),)](*given, **flags, **_settings(x, order))
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
    """One program a row: its norm by its squares in chunks, or these, and the row scaled."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, spread)
    column = part[:, None] * chunk + tl.arange(0, chunk)[None, :]
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_at + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    sums = add_up(x * x, digits)
    if is_norm:
        exponent = exponent_of(tl.max(sums, 0), digits_of_chunks)
        units = tl.sum(units_of(sums, exponent, digits_of_chunks), 0)
        total = in_floats(units, exponent, digits_of_chunks)
        x = x * tl.rsqrt(total * (1.0 / size) + eps)
    else:
        chunks: tl.constexpr = (size + chunk - 1) // chunk
        tl.store(sums_at + row * chunks + part, sums, mask=part < chunks)
    if is_scaled:
        x = x * tl.load(weight_at + column, mask=column < size, other=0.0)
    if is_norm or is_scaled:
        tl.store(out_at + row * size + column, x.to(out_at.dtype.element_ty), mask=column < size)
