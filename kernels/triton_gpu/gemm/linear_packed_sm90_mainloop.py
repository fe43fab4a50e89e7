"""Packed weights in the main loop of `linear_swap_ab`: scales and dequantisation (Gluon).

A weight is dequantised in registers as by `block_loaders`.
"""

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton_gpu.gemm.int4_w4a16 import int4_assembly
from shared.models.formats.four_bit import PARTS
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from shared.models.formats.weight_format import PLAIN

WIDTH = gl.constexpr(64)
"""Outputs of a tile, the wide side of a WGMMA."""
WORDS = gl.constexpr(32)
"""Words of an output in a shared-memory line."""
PAIR = gl.constexpr(64)
"""Inputs of a WGMMA: two or four parts of a packed block, or a block of bfloat16."""
FP8, INT4 = gl.constexpr("fp8_w8a16"), gl.constexpr("int4_w4a16")
FORMATS = (PLAIN, FP8.value, INT4.value)
"""Formats of `linear_swap_ab`."""
_GROUPS = (32, 64, 128)
"""Inputs of an INT4 scale."""
_AHEAD = gl.constexpr(1024)
"""Inputs from the loaded scales to the used ones, unless these are more words."""
_MOST_WORDS = gl.constexpr(16)
"""Words of an output's scales, loaded in advance."""


def is_supported(
    format: str,
    inputs: int,
    weight: Float[Tensor, "stored inputs"] | Int32[Tensor, "stored words"],
    scales: Shaped[Tensor, "scales scales_in"] | None,
) -> bool:
    """Returns whether a weight is bfloat16, or has supported scales.

    Those of FP8 have 128 inputs, those of INT4 32, 64 or 128, in whole int32 of each output.
    """
    if scales is None:
        return weight.dtype == torch.bfloat16
    if scales.dtype not in (torch.bfloat16, torch.int32):
        return False
    if format == FP8.value:
        return inputs == FP8_BLOCK * scales.shape[1]
    is_group = PARTS * weight.shape[1] in (each * scales.shape[1] for each in _GROUPS)
    return is_group and scales.shape[1] * scales.element_size() % 4 == 0


@gluon.jit
def first_scales(scales_at, is_output, steps: gl.constexpr, config: gl.constexpr):
    """Loads the scales of the first steps of a packed weight, see `steps_ahead`."""
    ahead: gl.constexpr = steps_ahead(config)
    later = (scales_of(scales_at, 0, is_output, config),)
    for step in gl.static_range(1, ahead):
        later += (scales_of(scales_at, min(step, steps - 1), is_output, config),)
    return later


@gluon.jit
def scales_of(scales_at, step, is_output, config: gl.constexpr):
    """Loads the scales of a step as int32: a scale with a zero point, or two scales."""
    format: gl.constexpr = config.loads.format
    in_word: gl.constexpr = 1 if format.has_scale_words else 2
    count: gl.constexpr = config.depth // format.group // in_word
    is_whole: gl.constexpr = config.loads.K % config.depth == 0
    scales_at += step * (config.depth // format.group)
    scales_at = scales_at.to(gl.pointer_type(gl.int32), bitcast=True)
    scales = ()
    for number in gl.static_range(count):
        mask = is_output
        if not is_whole:
            mask = is_output & (step * count + number < format.scales.scales_in // in_word)
        scales += (gl.load(scales_at + number, mask=mask, other=0),)
    return scales


@gluon.constexpr_function
def steps_ahead(config):
    """Returns the steps from the loaded scales to the used ones; 1 without scales."""
    format, depth = config.loads.format, config.depth
    if format.packed == 1:
        return 1
    count = depth // format.group // (1 if format.has_scale_words else 2)
    return max(1, min(_AHEAD // depth, _MOST_WORDS // count))


@gluon.jit
def dequantised(words, stored, call: gl.constexpr, format: gl.constexpr):
    """Dequantises the inputs of a product, `[outputs, PAIR]`.

    Args:
      words: Words of the block with these inputs.
      stored: Scales of the step.
      call: Number of the product in the step.
      format: Format of the weight.
    """
    first: gl.constexpr = call * PAIR
    part: gl.constexpr = format.inputs // format.parts
    number: gl.constexpr = call % (format.inputs // PAIR)
    if format.name != INT4:
        one, two = fp8_pair(words, scale_of_group(stored, first // format.group, format), number)
        pair = _joined(one, two)
    elif part == PAIR // 2:
        pair = _int4_byte(words, stored, first, number, format)
    else:  # blocks of half a line
        halves = gl.split(gl.permute(gl.reshape(words, (WIDTH, 2, WORDS // 2)), (0, 2, 1)))
        own = gl.convert_layout(halves[number // 2], words_layout(part), assert_trivial=True)
        byte: gl.constexpr = number % 2 * 2
        pair = _joined(
            _int4_byte(own, stored, first, byte, format),
            _int4_byte(own, stored, first + 2 * part, byte + 1, format),
        )
    return pair


@gluon.jit
def _int4_byte(words, stored, first: gl.constexpr, byte: gl.constexpr, format: gl.constexpr):
    """Dequantises a byte of INT4 words, which has the inputs from `first` of a step on."""
    second: gl.constexpr = first + format.inputs // format.parts
    one = scale_of_group(stored, first // format.group, format)
    two = scale_of_group(stored, second // format.group, format)
    one, two = int4_pair(words, one, two, byte, format.has_scale_words)
    return _joined(one, two)


@gluon.jit
def _joined(one, two):
    """Returns the columns of two arrays next to each other."""
    joined = gl.permute(gl.join(one, two), (0, 2, 1))
    return gl.reshape(joined, (one.shape[0], 2 * one.shape[1]))


@gluon.jit
def scale_of_group(stored, group: gl.constexpr, format: gl.constexpr):
    """Returns the scales of a group as columns: bfloat16, or `int4_scales` with a zero point.

    Args:
      stored: Words of scales, each `[outputs]`.
      group: Number of the group among those of the words.
      format: Format of the weight, without exponents.
    """
    if format.has_scale_words:
        upper, rest, shift = int4_scales(stored[group])
        scale = upper[:, None], rest[:, None], shift[:, None]
    else:
        word = stored[group // 2]
        if group % 2 == 1:
            word = word >> 16
        scale = word.to(gl.int16).to(gl.bfloat16, bitcast=True)[:, None]
    return scale


@gluon.jit
def int4_scales(word):
    """Returns both summands of scales with a zero point, and the shifts; see `int4_w4a16`."""
    upper = (word & -0x10000).to(gl.float32, bitcast=True).to(gl.bfloat16)
    rest = ((word & 0xFFF0) << 16).to(gl.float32, bitcast=True).to(gl.bfloat16)
    shift = (-128 - (word & 15).to(gl.float32)).to(gl.bfloat16)
    return upper, rest, shift


@gluon.jit
def int4_pair(words, first, second, byte: gl.constexpr, has_words: gl.constexpr):
    """Same as `int4_w4a16.int4_pair`; scales with a zero point are as by `int4_scales`."""
    text: gl.constexpr = int4_assembly(byte, has_words)
    if has_words:
        one, two = gl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r,r,r,r,r",
            [words, first[0], first[1], first[2], second[0], second[1], second[2]],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two = four_bit_pair(words, first, second, text)
    return one, two


@gluon.jit
def four_bit_pair(words, first, second, text: gl.constexpr):
    """Dequantises one byte of packed codes, each part with a column of scales."""
    one, two = gl.inline_asm_elementwise(
        text,
        "=r,=r,r,r,r,r",
        [words, first, second],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    return one, two


@gluon.jit
def fp8_pair(words, scale, call: gl.constexpr):
    """Dequantises two neighbouring parts of a block of FP8, with a column of scales."""
    text: gl.constexpr = _fp8_assembly(call)
    one, two = gl.inline_asm_elementwise(
        text,
        "=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    one = (one * scale).to(gl.bfloat16)
    two = (two * scale).to(gl.bfloat16)
    return one, two


@gluon.constexpr_function
def _fp8_assembly(call):
    """Returns PTX for two int32: two bytes of each, moved as by `fp8_w8a16.four`."""
    lines = [".reg .b32 t;"]
    for number in range(2):
        byte = 2 * call + number
        lines += [
            f"prmt.b32 t, $2, $3, 0x{12 + byte:x}{4 + byte}{8 + byte:x}{byte};",
            "shl.b32 t, t, 4;",
            f"and.b32 ${number}, t, 0x87f087f0;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def words_layout(columns):
    """Returns the layout of words with codes that are an operand of WGMMA in registers.

    Args:
      columns: Words of an output: those of a line, or of a block of half a line.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8], [0, 16]][: columns.bit_length() - 2],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )
