"""W4A16: packed MXFP4 weights, dequantised in registers before the GEMM (Triton).

`shared.models.formats.mxfp4` documents scales, `shared.models.formats.four_bit` the layout.
"""

import triton
import triton.language as tl


@triton.jit
def mxfp4_scale(stored):
    """Returns a column of stored exponents as bfloat16."""
    return (stored.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def mxfp4_pair(words, first, second, byte: tl.constexpr, is_launched: tl.constexpr):
    """Dequantises one byte of packed codes: two neighbouring parts of a block.

    The scales are columns, [outputs, 1]; see `fp8_w8a16.four`.
    """
    text: tl.constexpr = mxfp4_assembly(byte)
    if is_launched:
        one, two = tl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r",
            [words, first, second],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two = _computed(words, first, 8 * byte), _computed(words, second, 8 * byte + 4)
    return one, two


@triton.constexpr_function
def mxfp4_assembly(byte):
    """Returns PTX for two int32: moves sign, exponent and mantissa of codes, and applies scales.

    A byte is copied to both bytes of its bfloat16. All shifts are to the left: a multiplier can
    compute them, so that the unit of the logical operations has fewer instructions.
    """
    selected = f"0x{4 + byte}{4 + byte}{byte}{byte}"
    lines = [".reg .b32 t, m;", f"prmt.b32 t, $2, $3, {selected};"]
    for out, scale in (("$1", "$5"), ("$0", "$4")):
        lines += [
            "shl.b32 m, t, 2;",
            "and.b32 m, m, 0x01c001c0;",
            "lop3.b32 m, t, 0x80008000, m, 0xea;",
            f"mul.rn.bf16x2 {out}, m, {scale};",
            "shl.b32 t, t, 4;",
        ]
    return "{\n" + "\n".join(lines[:-1]) + "\n}"


@triton.jit
def _computed(words, scale, shift: tl.constexpr):
    """Dequantises one code, for the interpreter, which lacks assembly."""
    code = words >> shift
    moved = ((code & 8) << 28) | ((code & 7) << 22)
    return (moved.to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)
