"""W8A8: quantisation of rows to FP8, and GEMM steps on FP8 blocks (Pallas, Triton backend)."""

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.triton.lowering import register_lowering
from jax._src.state.types import ReadEffect
from jax.core import ShapedArray
from jax.experimental.pallas import triton as pltriton
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math
from jaxlib.triton import dialect

from shared.models.formats.fp8 import BLOCK, OF_LARGEST

_INPUTS_BY_THE_UNIT = 2**30
"""Inputs that the tensor core accumulates before float32 does: a whole block, as in Triton."""


def quantise(x, is_compiled):
    """Quantises a block of inputs, [rows, 128] in float32; returns FP8 values and scales."""
    scale = jnp.max(jnp.abs(x), axis=1) * OF_LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    across = jnp.broadcast_to(scale[:, None], x.shape)
    return _divide(x, across, is_compiled).astype(jnp.float8_e4m3fn), scale


def _divide(x, by, is_compiled):
    """Divides with rounding to nearest, which Triton's own division lacks."""
    if not is_compiled:
        return x / by
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    how = {"constraints": "=f,f,f", "pack": 1, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm("div.rn.f32 $0, $1, $2;", args=[x, by], **how)[0]


def load_codes(weights_ref, layer, output, columns, block, is_compiled):
    """Loads a block of a stacked FP8 weight, [columns, 128], from a given output on."""
    if not is_compiled:
        outputs, inputs = output + lax.iota(jnp.int32, columns), lax.iota(jnp.int32, BLOCK)
        return pltriton.load(
            weights_ref.at[layer, outputs[:, None], (block * BLOCK + inputs)[None]]
        )
    output += layer * weights_ref.shape[1]
    return _load_codes.bind(weights_ref, output, block, columns=columns)


_load_codes = Primitive("load_codes")
"""Primitive of `load_codes`, with outputs numbered over the whole stack.

Pallas indexes arrays up to 4 GiB with signed 32-bit offsets; byte offsets would overflow at 2 GiB.
"""


@_load_codes.def_effectful_abstract_eval
def _shape_of_codes(weights, *_, columns):
    return ShapedArray((columns, BLOCK), weights.dtype), {ReadEffect(0)}


@register_lowering(_load_codes)
def _lower_load(context, weights, output, block, *, columns):
    inputs = context.avals_in[0].shape[-1]
    narrow, wide = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    start = arith.muli(arith.extsi(wide, output), arith.constant(wide, inputs))
    step = arith.muli(arith.extsi(wide, block), arith.constant(wide, BLOCK))
    start = dialect.addptr(weights.type, weights, arith.addi(start, step))

    def across(count, dimension, apart):
        kind = ir.RankedTensorType.get([count], narrow)
        numbers = dialect.make_range(kind, 0, count)
        numbers = dialect.expand_dims(numbers, 1 - dimension)
        factor = ir.DenseElementsAttr.get_splat(numbers.type, ir.IntegerAttr.get(narrow, apart))
        numbers = arith.muli(numbers, arith.constant(numbers.type, factor))
        return dialect.broadcast(ir.RankedTensorType.get([columns, BLOCK], narrow), numbers)

    offsets = arith.addi(across(columns, 0, inputs), across(BLOCK, 1, 1))
    pointers = ir.RankedTensorType.get([columns, BLOCK], weights.type)
    at = dialect.addptr(pointers, dialect.splat(pointers, start), offsets)
    return dialect.load(at)


def add_codes(total, x, weight, scale, is_swapped, is_compiled):
    """Adds the products of an FP8 block, times its scale per row, with one rounding.

    The tensor core accumulates from zero, in fewer bits than float32. With 64 or more on its wide
    side, the bits are equal in both languages and for every tile.
    """
    scale = scale[None, :] if is_swapped else scale[:, None]
    x, weight = (weight, x.T) if is_swapped else (x, weight.T)
    if not is_compiled:
        return total + pltriton.dot(x.astype(jnp.float32), weight.astype(jnp.float32)) * scale
    return _add_codes.bind(total, x, weight, jnp.broadcast_to(scale, total.shape))


_add_codes = Primitive("add_codes")
"""Primitive of `add_codes`.

Pallas lowers a product with float32 accumulation, for which a compiler converts FP8 to float16. The
bits would differ, and no argument selects otherwise.
"""


@_add_codes.def_abstract_eval
def _shape_of_sums(total, *_):
    return total


@register_lowering(_add_codes)
def _lower(_, total, x, weight, scale):
    kind = ir.RankedTensorType(total.type)
    zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
    part = dialect.dot(
        x, weight, arith.constant(kind, zero), max_num_imprecise_acc=_INPUTS_BY_THE_UNIT
    )
    return math.fma(part, scale, total)
