"""W4A16: packed INT4 weights, dequantised in registers before the GEMM (Pallas, Triton backend).

`shared.models.formats.int4_w4a16` documents scales, `shared.models.formats.four_bit` the layout.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from shared.models.formats.int4_encoding import ZERO


class Int4Scales(NamedTuple):
    """Scales of some outputs in one group, columns in bfloat16.

    Attributes:
      upper, rest: Summands of the scales; their products with a code are exact. No rest: None.
      zero: Zero points.
      shift: Negative zero points of codes with 128 added.
    """

    upper: Any
    rest: Any
    zero: Any
    shift: Any


def int4_scales(stored):
    """Returns the scales of a column that is stored as int32 or as bfloat16."""
    if stored.dtype != jnp.int32:
        return Int4Scales(stored, None, float(ZERO), None)
    upper, rest = stored & -0x10000, lax.shift_left(stored & 0xFFF0, jnp.int32(16))
    upper, rest = (
        lax.bitcast_convert_type(x, jnp.float32).astype(jnp.bfloat16) for x in (upper, rest)
    )
    zero = (stored & 15).astype(jnp.float32)
    return Int4Scales(upper, rest, zero, (-128 - zero).astype(jnp.bfloat16))


def int4_part(words, scales, part, is_compiled):
    """Dequantises one of eight parts of packed codes.

    The scales are columns, [outputs, 1]; see `fp8_w8a16.four`. Each part has its own assembly,
    because jax 0.11.2 nests the list of several results once too often.
    """
    if not is_compiled:
        return _computed(words, scales, 4 * part)
    args = [words, scales.upper]
    if scales.rest is not None:
        args += [scales.rest, scales.shift]
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    args = [jnp.broadcast_to(x, words.shape) for x in args]
    (found,) = pltriton.elementwise_inline_asm(
        int4_assembly(part, has_rest=scales.rest is not None),
        args=args,
        constraints=",".join(["=r"] + ["r"] * (len(args) + 1)),
        pack=2,
        result_shape_dtypes=[shape],
    )
    return found


def int4_assembly(part, has_rest):
    """Returns PTX for two int32: codes as bfloat16 by their bits, zero points, scales.

    Codes in the lower mantissa bits of 128 are 128 + code.
    """
    byte, is_high = divmod(part, 2)
    lines = [".reg .b32 t, z;", f"prmt.b32 t, $1, $2, 0x{4 + byte}{4 + byte}{byte}{byte};"]
    if is_high:
        lines.append("shr.b32 t, t, 4;")  # the eighth bit is one of the exponent
    lines.append("lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;")
    if has_rest:
        lines += [
            "add.rn.bf16x2 t, t, $5;",
            "mul.rn.bf16x2 z, t, $4;",
            "fma.rn.bf16x2 $0, t, $3, z;",
        ]
    else:
        lines += [
            "mov.b32 z, 0xc308c308;",  # -136
            "add.rn.bf16x2 t, t, z;",
            "mul.rn.bf16x2 $0, t, $3;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


def _computed(words, scales, shift):
    """Dequantises one code of packed INT4 on a CPU."""
    numbers = (lax.shift_right_logical(words, jnp.int32(shift)) & 15).astype(jnp.float32)
    scale = scales.upper.astype(jnp.float32)
    if scales.rest is not None:
        scale += scales.rest.astype(jnp.float32)
    return ((numbers - scales.zero) * scale).astype(jnp.bfloat16)
