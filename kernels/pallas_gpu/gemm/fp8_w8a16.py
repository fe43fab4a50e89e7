"""W8A16: packed FP8 weights, dequantised in registers before the GEMM (Pallas, Triton backend).

`shared.models.formats.fp8_w8a16` documents the packed layout.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, Int32

from shared.models.formats.fp8_w8a16 import FP8_BLOCK, SCALE_FACTOR, shares_of

_WARPS = 4

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


def widened(
    words: Int32[jax.Array, "L N words"],
    scales: Float[jax.Array, "L scales scales_in"],
    layer: Int[jax.Array, ""],
    *,
    interpret: bool = False,
) -> Float[jax.Array, "N K"]:
    """Dequantises a layer's weight in memory, for GEMMs that do not read packed FP8."""
    _, outputs, count = words.shape
    return pl.pallas_call(
        partial(_widening_kernel, is_compiled=not interpret),
        grid=(outputs // FP8_BLOCK * (4 * count // FP8_BLOCK),),
        out_shape=jax.ShapeDtypeStruct((outputs, 4 * count), jnp.bfloat16),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="fp8_dequantize",
    )(words, scales, layer.reshape(1))


def _widening_kernel(words_ref, scales_ref, layer_ref, wide_ref, *, is_compiled):
    """One program per block."""
    layer, blocks_in = layer_ref[0], 4 * words_ref.shape[2] // FP8_BLOCK
    shares = shares_of(words_ref.shape, scales_ref.shape)
    block, block_in = lax.div(pl.program_id(0), blocks_in), lax.rem(pl.program_id(0), blocks_in)
    output = (block * FP8_BLOCK + lax.iota(jnp.int32, FP8_BLOCK))[:, None]
    lane = lax.iota(jnp.int32, FP8_BLOCK // 4)[None, :]
    words = pltriton.load(words_ref.at[layer, output, block_in * (FP8_BLOCK // 4) + lane])
    column = jnp.full((FP8_BLOCK, 1), block_in if shares.scales_in > 1 else 0)
    scale = pltriton.load(scales_ref.at[layer, lax.div(output, shares.outputs), column])
    for number, part in enumerate(four(words, scale, is_compiled)):
        place = block_in * FP8_BLOCK + number * (FP8_BLOCK // 4) + lane
        pltriton.store(wide_ref.at[output, place], part)
