"""W8A16: packed FP8 weights, dequantised in registers before the GEMM (Pallas, Triton backend).

`shared.models.formats.fp8_w8a16` documents the packed layout.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from shared.models.formats.fp8_w8a16 import SCALE_FACTOR

# Converts one byte of two packed int32 to a pair of bfloat16 by moving sign, exponent and mantissa,
# also of subnormal numbers. The result is 2^-120 of the FP8 value. Each byte has its own assembly,
# because jax 0.11.2 nests the list of several results once too often.
_MOVED = tuple(
    f"{{\n.reg .b32 t, m;\nprmt.b32 t, $1, $2, {pair};\nshr.u32 m, t, 4;\n"
    "and.b32 m, m, 0x07f007f0;\nlop3.b32 $0, t, 0x80008000, m, 0xea;\n}"
    for pair in ("0x4400", "0x5511", "0x6622", "0x7733")
)


def four(words, scale, is_compiled):
    """Dequantises a block of inputs of some outputs to four bfloat16 parts, [outputs, 32] each.

    The scale is a column, [outputs, 1]. A scalar would be applied in another layout than the
    GEMM's, so the values would be converted through shared memory.
    """
    if not is_compiled:
        return [_moved(words, byte, scale).astype(jnp.bfloat16) for byte in range(4)]
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    how = {"args": [words], "constraints": "=r,r,r", "pack": 2, "result_shape_dtypes": [shape]}
    return [pltriton.elementwise_inline_asm(text, **how)[0] * scale for text in _MOVED]


def _moved(words, byte, scale):
    """Converts one byte of packed FP8 on a CPU."""
    codes = (lax.shift_right_logical(words, jnp.int32(8 * byte)) & 0xFF).astype(jnp.uint8)
    numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return numbers * (scale.astype(jnp.float32) * (1 / SCALE_FACTOR))
