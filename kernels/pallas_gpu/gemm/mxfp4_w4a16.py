"""W4A16: packed MXFP4 weights, dequantised in registers before the GEMM (Pallas, Triton backend).

`shared.models.formats.mxfp4` documents scales, `shared.models.formats.four_bit` the layout.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton


def mxfp4_part(words, stored, part, is_compiled):
    """Dequantises one of eight parts of packed codes, for a column of stored exponents.

    Each part has its own assembly, see `int4_w4a16.int4_part`.
    """
    if not is_compiled:
        return _computed(words, stored, 4 * part)
    bits = lax.shift_left(stored.astype(jnp.int16), jnp.int16(7))
    scale = lax.bitcast_convert_type(bits, jnp.bfloat16)
    (found,) = pltriton.elementwise_inline_asm(
        mxfp4_assembly(part),
        args=[words, jnp.broadcast_to(scale, words.shape)],
        constraints="=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return found


def mxfp4_assembly(part):
    """Returns PTX for two int32: moves sign, exponent and mantissa of codes, and applies scales.

    A byte is copied to both bytes of its bfloat16, for two parts. All shifts are to the left: a
    multiplier can compute them, so that the unit of the logical operations has fewer instructions.
    """
    byte, is_high = divmod(part, 2)
    lines = [
        ".reg .b32 t, s, m;",
        f"prmt.b32 t, $1, $2, 0x{4 + byte}{4 + byte}{byte}{byte};",
        f"shl.b32 s, t, {0 if is_high else 4};",
        f"shl.b32 m, t, {2 if is_high else 6};",
        "and.b32 m, m, 0x01c001c0;",
        "lop3.b32 m, s, 0x80008000, m, 0xea;",
        "mul.rn.bf16x2 $0, m, $3;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


def _computed(words, stored, shift):
    """Dequantises one code on a CPU, without subnormal numbers, which XLA may flush."""
    code = lax.shift_right_logical(words, jnp.int32(shift))
    exponent, mantissa = lax.shift_right_logical(code, 1) & 3, code & 1
    size = jnp.where(exponent == 0, 2 * mantissa, lax.shift_left(2 + mantissa, exponent))
    bits = lax.shift_left(stored.astype(jnp.int32), jnp.int32(23))
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    number = jnp.where((code & 8) == 0, size, -size).astype(jnp.float32) * 2.0**-5
    return (number * scale * 2.0**-123).astype(jnp.bfloat16)
