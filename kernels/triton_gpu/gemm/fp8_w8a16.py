"""W8A16: packed FP8 weights, dequantised in registers before the GEMM (Triton).

`shared.models.formats.fp8_w8a16` documents the packed layout.
"""

import triton
import triton.language as tl

# Converts the bytes of two packed int32 to four pairs of bfloat16 by moving sign, exponent and
# mantissa, also of subnormal numbers. The result is 2^-120 of the FP8 value. A byte above a byte is
# its sign, eight times.
_MOVED = tl.constexpr(
    "{\n.reg .b32 t;\n"
    + "\n".join(
        f"prmt.b32 t, $4, $5, {pair};\nshl.b32 t, t, 4;\nand.b32 ${number}, t, 0x87f087f0;"
        for number, pair in enumerate(("0xc480", "0xd591", "0xe6a2", "0xf7b3"))
    )
    + "\n}"
)
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r")


@triton.jit
def four(words, scale, is_launched: tl.constexpr):
    """Dequantises a block of inputs of some outputs to four bfloat16 parts, [outputs, 32] each.

    The scale is a column, [outputs, 1]. A scalar would be applied in another layout than the
    GEMM's, so the values would be converted through shared memory.
    """
    if is_launched:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _MOVED,
            _REGISTERS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        first, second = _moved(words, 0), _moved(words, 1)
        third, fourth = _moved(words, 2), _moved(words, 3)
        scale = scale.to(tl.float32)
    first = (first * scale).to(tl.bfloat16)
    second = (second * scale).to(tl.bfloat16)
    third = (third * scale).to(tl.bfloat16)
    fourth = (fourth * scale).to(tl.bfloat16)
    return first, second, third, fourth


@triton.jit
def _moved(words, byte: tl.constexpr):
    """Converts one byte of packed FP8 to float32, for the interpreter, which lacks assembly."""
    code = (words >> (8 * byte)) & 0xFF
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
    return (bits << 16).to(tl.float32, bitcast=True)
