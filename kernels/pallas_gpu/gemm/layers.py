"""Row-wise operations between the GEMMs of a layer: norms and GELU (Pallas, Triton backend)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.kernel_limits import row_warps
from kernels.pallas_gpu.gemm.activation import soft_capped
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, exponent_of, in_floats, units_of
from shared.spec.reduction_order import SquaresOrder

BLOCK = 1024  # elements per program of element-wise kernels
LOG2_E = 1.4426950408889634


def beside(
    x: Float[jax.Array, "R size"],
    norms: Float[jax.Array, "L size"] | None,
    layer: Int[jax.Array, ""],
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R size"] | None, Float[jax.Array, "R chunks"]]:
    """Computes the scaled rows and the sums of squares with which a residual stream begins.

    Args:
      x: Rows of the residual stream.
      norms, layer: Stacked norm scales, and the index of the next norm.
      order: Reduction order of squares.
      interpret: Run on a CPU.

    Returns:
      The rows times the scale of the next norm, if it has one; and their sums of squares per chunk,
      see `shared.spec.reduction_order.chunks_of_squares`.
    """
    shape = (len(x), pl.cdiv(x.shape[1], order.chunk))
    scaled = None if norms is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = (scaled, jax.ShapeDtypeStruct(shape, jnp.float32))
    kernel = functools.partial(_beside_kernel, order=order)
    given = (x, norms, layer.reshape(1))
    return _over_rows(kernel, *given, out=out, name="rms_norm_partial", interpret=interpret)


def rms_norm(
    x: Float[jax.Array, "R size"],
    weight: Float[jax.Array, " size"] | None,
    eps: float,
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R size"]:
    """Implements `shared.spec.layers.rms_norm`; without a weight, the scale is 1."""
    kernel = functools.partial(_norm_kernel, eps=eps, order=order)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _over_rows(kernel, x, weight, out=out, name="rms_norm", interpret=interpret)


def added_norm(
    x: Float[jax.Array, "R size"],
    end_norms: Float[jax.Array, "L size"],
    end_layer: Int[jax.Array, ""],
    eps: float,
    rows: Float[jax.Array, "R size"],
    scalars: Float[jax.Array, "L 1"] | None,
    scalar_layer: Int[jax.Array, ""],
    norms: Float[jax.Array, "L size"] | None,
    layer: Int[jax.Array, ""],
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R size"],
    Float[jax.Array, "R size"] | None,
    Float[jax.Array, "R chunks"] | None,
]:
    """Adds the RMS norm of `x` to the rows of a residual stream, and multiplies by the scalar.

    Args:
      x: Rows.
      end_norms, end_layer: Stacked scales, and the index of their norm.
      eps: Epsilon of the norm.
      rows: Rows of the residual stream.
      scalars, scalar_layer: Stacked layer scalars, and the index of the layer's.
      norms, layer: Stacked norm scales, and the index of the next norm.
      order: Reduction order of squares.
      interpret: Run on a CPU.

    Returns:
      The new rows, and with a next norm their results of `beside`. All have the bits of `rms_norm`,
      an addition, a float32 product and `beside`, each rounded.
    """
    shape = (len(x), pl.cdiv(x.shape[1], order.chunk))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sums = jax.ShapeDtypeStruct(shape, jnp.float32)
    out = (like, None, None) if norms is None else (like, like, sums)
    kernel = functools.partial(_added_norm_kernel, eps=eps, order=order)
    return _over_rows(
        kernel,
        x,
        end_norms,
        end_layer.reshape(1),
        rows,
        scalars,
        scalar_layer.reshape(1),
        norms,
        layer.reshape(1),
        out=out,
        name="added_norm",
        interpret=interpret,
    )


def norm_values(
    qkv: Float[jax.Array, "R outputs"],
    eps: float,
    *,
    stored: int,
    head_size: int,
    are_keys: bool,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R with_values"]:
    """Implements `shared.spec.attention_layer.norm_values`; `stored` columns precede those of which
    the norm is computed.
    """
    R, outputs = qkv.shape
    appended = outputs - stored if are_keys else 0
    sizes = {"appended": appended, "others": stored + appended, "size": head_size}
    return pl.pallas_call(
        functools.partial(_values_kernel, **sizes, eps=eps, order=order),
        grid=(R, (outputs + appended) // head_size),
        out_shape=jax.ShapeDtypeStruct((R, outputs + appended), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(head_size)),
        interpret=interpret,
        name="norm_values",
    )(qkv)


def layer_norm(
    x: Float[jax.Array, "R size"],
    weight: Float[jax.Array, " size"],
    bias: Float[jax.Array, " size"],
    eps: float,
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R size"]:
    """Implements `shared.spec.layers.layer_norm`; the mean is summed in the same way as squares."""
    kernel = functools.partial(_layer_norm_kernel, eps=eps, order=order)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _over_rows(kernel, x, weight, bias, out=out, name="layer_norm", interpret=interpret)


def gelu(x: Float[jax.Array, "R size"], *, interpret: bool = False) -> Float[jax.Array, "R size"]:
    """Implements `shared.spec.layers.gelu`."""
    kernel = functools.partial(_gelu_kernel, is_tanh=False)
    return _elementwise(kernel, x, name="gelu", interpret=interpret)


def gelu_tanh(
    x: Float[jax.Array, "R size"], *, interpret: bool = False
) -> Float[jax.Array, "R size"]:
    """Implements `shared.spec.layers.gelu_tanh`."""
    kernel = functools.partial(_gelu_kernel, is_tanh=True)
    return _elementwise(kernel, x, name="gelu", interpret=interpret)


def _elementwise(kernel, x, name, interpret):
    flat = x.reshape(-1)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(len(flat), BLOCK),),
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name=name,
    )(flat).reshape(x.shape)


def softcap(
    x: Float[jax.Array, "R size"], capped: float, *, interpret: bool = False
) -> Float[jax.Array, "R size"]:
    """Implements `shared.spec.layers.softcap`."""
    return _elementwise(functools.partial(_softcap_kernel, capped=capped), x, "softcap", interpret)


def bilinear_pos_embed(
    table: Float[jax.Array, "places hidden"],
    corners: Int[jax.Array, "R 4"],
    shares: Float[jax.Array, "R 4"],
    *,
    interpret: bool = False,
) -> Float[jax.Array, "R hidden"]:
    """Implements `shared.spec.layers.bilinear_pos_embed`, summed in the order of the corners."""
    shape = (len(corners), table.shape[1])
    return pl.pallas_call(
        _blend_kernel,
        grid=(len(corners),),
        out_shape=jax.ShapeDtypeStruct(shape, table.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="bilinear_pos_embed",
    )(table, corners, shares)


def _over_rows(kernel, x, *others, out, name, interpret):
    R, size = x.shape
    return pl.pallas_call(
        kernel,
        grid=(R,),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(size)),
        interpret=interpret,
        name=name,
    )(x, *others)


def _beside_kernel(x_ref, norms_ref, layer_ref, scaled_ref, sums_ref, *, order):
    """One program per row: its sums of squares per chunk, and the scaled row."""
    x, column, sums = _row(x_ref, order)
    _store_sums(sums_ref, sums)
    if norms_ref is not None:
        store_row(scaled_ref, x * _scale(norms_ref, layer_ref, column), column)


def _added_norm_kernel(
    x_ref,
    end_norms_ref,
    end_layer_ref,
    rows_ref,
    scalars_ref,
    scalar_layer_ref,
    norms_ref,
    layer_ref,
    out_ref,
    scaled_ref,
    sums_ref,
    *,
    eps,
    order,
):
    """One program per row: adds its norm to the stream, then as `beside` for the sum."""
    x, column, sums = _row(x_ref, order)
    inside, dtype = column < x_ref.shape[1], out_ref.dtype
    at = rows_ref.at[pl.program_id(0), column]
    rows = pltriton.load(at, mask=inside, other=0.0).astype(jnp.float32)
    end_norm = _scale(end_norms_ref, end_layer_ref, column)
    x = _normed(x, sums, x_ref.shape[1], eps, order) * end_norm
    rows = (rows + x.astype(dtype).astype(jnp.float32)).astype(dtype)
    if scalars_ref is not None:
        scalar = scalars_ref[scalar_layer_ref[0], 0]
        rows = (rows.astype(jnp.float32) * scalar).astype(dtype)
    store_row(out_ref, rows, column)
    if norms_ref is not None:
        x = jnp.where(inside, rows.astype(jnp.float32), 0.0)
        _store_sums(sums_ref, add_up(x * x, order.digits))
        store_row(scaled_ref, x * _scale(norms_ref, layer_ref, column), column)


def _values_kernel(qkv_ref, out_ref, *, appended, others, size, eps, order):
    """One program per row and head: the norm of a value head, or a copy of another."""
    row, first = pl.program_id(0), pl.program_id(1) * size
    column = _columns(size, order)
    source = lax.select(first >= others, first - appended, first)
    at = qkv_ref.at[row, source + column]
    x = pltriton.load(at, mask=column < size, other=0.0).astype(jnp.float32)

    def store(x):
        # As in `store_row`.
        at = out_ref.at[row, jnp.where(column < size, first + column, out_ref.shape[1])]
        pltriton.store(at, x.astype(out_ref.dtype), mask=column < size)

    @pl.when(first >= others)
    def _():
        store(_normed(x, add_up(x * x, order.digits), size, eps, order))

    @pl.when(first < others)
    def _():
        store(x)


def _norm_kernel(x_ref, weight_ref, out_ref, *, eps, order):
    """One program per row: its norm, from sums of squares per chunk."""
    x, column, sums = _row(x_ref, order)
    size = x_ref.shape[1]
    x = _normed(x, sums, size, eps, order)
    if weight_ref is not None:
        x = x * pltriton.load(weight_ref.at[column], mask=column < size, other=0.0)
    store_row(out_ref, x, column)


def _layer_norm_kernel(x_ref, weight_ref, bias_ref, out_ref, *, eps, order):
    """One program per row: mean subtracted, divided by the deviation, scaled and shifted."""
    x, column, _ = _row(x_ref, order)
    size, inside = x_ref.shape[1], column < x_ref.shape[1]
    x = jnp.where(inside, x - _sum(x, order) * (1.0 / size), 0.0)
    x = x * lax.rsqrt(_sum(x * x, order) * (1.0 / size) + eps)
    x = x * pltriton.load(weight_ref.at[column], mask=inside, other=0.0)
    x = x + pltriton.load(bias_ref.at[column], mask=inside, other=0.0)
    store_row(out_ref, x, column)


def _normed(x, sums, size, eps, order):
    """Divides a row by its root mean square, from its sums of squares per chunk."""
    digits = order.digits_of_chunks
    exponent = exponent_of(sums.max(), digits)
    total = in_floats(units_of(sums, exponent, digits).sum(), exponent, digits)
    return x * lax.rsqrt(total * (1.0 / size) + eps)


def _sum(terms, order):
    """Adds the terms of a row, [chunks, terms], chunk by chunk, in units of the largest."""
    exponent = exponent_of(jnp.abs(terms).max(axis=1), order.digits)
    units = units_of(terms, exponent[:, None], order.digits).sum(axis=1)
    sums, digits = in_floats(units, exponent, order.digits), order.digits_of_chunks
    exponent = exponent_of(jnp.abs(sums).max(), digits)
    return in_floats(units_of(sums, exponent, digits).sum(), exponent, digits)


def _gelu_kernel(x_ref, out_ref, *, is_tanh):
    """One program per block of elements, across rows."""
    place, count = pl.program_id(0) * BLOCK + lax.iota(jnp.int32, BLOCK), x_ref.shape[0]
    inside = place < count
    x = pltriton.load(x_ref.at[place], mask=inside, other=0.0).astype(jnp.float32)
    if is_tanh:
        # x (1 + tanh(y)) / 2, which is x / (1 + exp(-2 y)).
        y = x * (1.5957691216057308 + 0.07135481627260025 * (x * x))
        out = x / (1.0 + jnp.exp2(-y * LOG2_E))
    else:
        # Normal tail probability above |x|, Abramowitz and Stegun 7.1.26: error at most 1e-7.
        z = jnp.abs(x) * 0.7071067811865476
        y = 0.3275911 * z
        t = 1.0 - y / (1.0 + y)  # 1 / (1 + y): the two compilers divide differently
        above = t * (
            0.127414796
            + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        )
        above = above * jnp.exp2(-(z * z) * LOG2_E)
        out = x * jnp.where(x < 0, above, 1.0 - above)
    pltriton.store(out_ref.at[place], out.astype(out_ref.dtype), mask=inside)


def _softcap_kernel(x_ref, out_ref, *, capped):
    """One program per block of elements, across rows."""
    place, count = pl.program_id(0) * BLOCK + lax.iota(jnp.int32, BLOCK), x_ref.shape[0]
    inside = place < count
    x = pltriton.load(x_ref.at[place], mask=inside, other=0.0).astype(jnp.float32)
    pltriton.store(out_ref.at[place], soft_capped(x, capped).astype(out_ref.dtype), mask=inside)


def _blend_kernel(table_ref, corners_ref, shares_ref, out_ref):
    """One program per row: the weighted sum of the rows of its corners."""
    row, hidden = pl.program_id(0), table_ref.shape[1]
    column = lax.iota(jnp.int32, pl.next_power_of_2(hidden))
    out = jnp.zeros(column.shape, jnp.float32)
    for corner in range(4):
        at = table_ref.at[corners_ref[row, corner], column]
        x = pltriton.load(at, mask=column < hidden, other=0.0).astype(jnp.float32)
        out += x * shares_ref[row, corner]
    store_row(out_ref, out, column)


def _scale(norms_ref, layer_ref, column):
    """Loads the scale of one norm of a stack."""
    at = norms_ref.at[layer_ref[0], column]
    return pltriton.load(at, mask=column < norms_ref.shape[1], other=0.0)


def _store_sums(sums_ref, sums):
    """Stores the sums of squares of the chunks of the row of this program."""
    part = lax.iota(jnp.int32, sums.shape[0])
    at = sums_ref.at[pl.program_id(0), part]
    pltriton.store(at, sums, mask=part < sums_ref.shape[1])


def store_row(out_ref, x, column):
    """Stores the row of this program; lanes beyond its columns store nothing."""
    size = out_ref.shape[1]
    # Columns that are not stored get an index outside the array, which the interpreter requires.
    at = jnp.where(column < size, column, size)
    x = x.astype(out_ref.dtype)
    pltriton.store(out_ref.at[pl.program_id(0), at], x, mask=column < size)


def _row(x_ref, order):
    """Loads a row as chunks, the column of each element, and the sums of squares of the chunks."""
    size = x_ref.shape[1]
    column = _columns(size, order)
    at = x_ref.at[pl.program_id(0), column]
    x = pltriton.load(at, mask=column < size, other=0.0).astype(jnp.float32)
    return x, column, add_up(x * x, order.digits)


def _columns(size, order):
    """Returns the column of each element of a row in chunks, also of those beyond the row."""
    chunks = pl.next_power_of_2(pl.cdiv(size, order.chunk))
    part = lax.iota(jnp.int32, chunks)[:, None] * order.chunk
    return part + lax.iota(jnp.int32, order.chunk)[None, :]
