"""W8A16: packed FP8 weights, dequantised in registers before the GEMM (Pallas, Triton backend).

`shared.models.formats.fp8_w8a16` documents the packed layout.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from shared.models.formats.fp8_w8a16 import SCALE_FACTOR


def fp8_assembly(byte, is_scaled):
    """Returns PTX for two int32: one byte of each as bfloat16, times a scale if `is_scaled`.

    Moves sign, exponent and mantissa, also of subnormal numbers, which makes 2^-120 of the value.
    """
    selector = f"0x{12 + byte:x}{4 + byte}{8 + byte:x}{byte}"  # bytes with their signs before them
    lines = [".reg .b32 t;", f"prmt.b32 t, $1, $2, {selector};", "shl.b32 t, t, 4;"]
    if is_scaled:
        lines += ["and.b32 t, t, 0x87f087f0;", "mul.rn.bf16x2 $0, t, $3;"]
    else:
        lines.append("and.b32 $0, t, 0x87f087f0;")
    return "{\n" + "\n".join(lines) + "\n}"


# Each byte has its own: jax 0.11.2 nests the list of several results once too often.
_MOVED = tuple(fp8_assembly(byte, is_scaled=False) for byte in range(4))


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
