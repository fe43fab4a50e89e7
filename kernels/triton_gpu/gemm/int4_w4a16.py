"""W4A16: packed INT4 weights, dequantised in registers before the GEMM (Triton).

`shared.models.formats.int4_w4a16` documents scales, `shared.models.formats.four_bit` the layout.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shared.models.formats.int4_encoding import ZERO

_ZERO = tl.constexpr(ZERO)


class Int4Scales(NamedTuple):
    """Scales of some outputs in one group, columns in bfloat16.

    Attributes:
      upper, rest: Summands of the scales; their products with a code are exact.
      zero: Zero points.
      shift: Negative zero points of codes with 128 added.
    """

    upper: Any
    rest: Any
    zero: Any
    shift: Any


@triton.jit
def int4_scales(stored, has_words: tl.constexpr):
    """Returns the scales of a column that is stored as int32 or as bfloat16."""
    if has_words:
        upper = (stored & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)
        rest = ((stored & 0xFFF0) << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)
        zero = (stored & 15).to(tl.float32)
        shift = (-128 - zero).to(tl.bfloat16)
    else:
        upper, rest, zero, shift = stored, stored, _ZERO, stored
    return Int4Scales(upper=upper, rest=rest, zero=zero, shift=shift)


@triton.jit
def int4_pair(
    words, first, second, byte: tl.constexpr, has_words: tl.constexpr, is_launched: tl.constexpr
):
    """Dequantises one byte of packed codes: two neighbouring parts of a block, each with scales.

    The scales are columns, [outputs, 1]; see `fp8_w8a16.four`.
    """
    text: tl.constexpr = int4_assembly(byte, has_words)
    if not is_launched:
        one = _computed(words, first, 8 * byte, has_words)
        two = _computed(words, second, 8 * byte + 4, has_words)
    elif has_words:
        one, two = tl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r,r,r,r,r",
            [words, first.upper, first.rest, first.shift, second.upper, second.rest, second.shift],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two = tl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r",
            [words, first.upper, second.upper],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return one, two


@triton.constexpr_function
def int4_assembly(byte, has_words):
    """Returns PTX for two int32: codes as bfloat16 by their bits, zero points, scales.

    Codes in the lower mantissa bits of 128 are 128 + code.
    """
    selected = f"0x{4 + byte}{4 + byte}{byte}{byte}"
    lines = [
        ".reg .b32 t, l, h, z;",
        f"prmt.b32 t, $2, $3, {selected};",
        "lop3.b32 l, t, 0x000f000f, 0x43004300, 0xea;",
        "shr.b32 t, t, 4;",  # the eighth bit is one of the exponent
        "lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;",
    ]
    if has_words:
        lines += [
            "add.rn.bf16x2 l, l, $6;",
            "add.rn.bf16x2 h, h, $9;",
            "mul.rn.bf16x2 t, l, $5;",
            "mul.rn.bf16x2 z, h, $8;",
            "fma.rn.bf16x2 $0, l, $4, t;",
            "fma.rn.bf16x2 $1, h, $7, z;",
        ]
    else:
        lines += [
            "mov.b32 z, 0xc308c308;",  # -136
            "add.rn.bf16x2 l, l, z;",
            "add.rn.bf16x2 h, h, z;",
            "mul.rn.bf16x2 $0, l, $4;",
            "mul.rn.bf16x2 $1, h, $5;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _computed(words, scales, shift: tl.constexpr, has_words: tl.constexpr):
    """Dequantises one code of packed INT4, for the interpreter, which lacks assembly."""
    numbers = ((words >> shift) & 15).to(tl.float32) - scales.zero
    scale = scales.upper.to(tl.float32)
    if has_words:
        scale += scales.rest.to(tl.float32)
    return (numbers * scale).to(tl.bfloat16)
