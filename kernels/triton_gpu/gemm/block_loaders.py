"""Block loaders of the GEMM kernels: one per weight format (Triton).

A block is some consecutive inputs of a tile. `load_block` returns the weight's block as operands of
the tensor core, in one or several parts. `load_rows` returns the rows in the same parts.

| format | inputs of a block | parts | operands |
|---|---|---|---|
| `plain` | a step of the main loop | 1 | the stored numbers |
| `fp8_w8a16` | 128 | 4 | packed FP8, dequantised to bfloat16 |
| `int4_w4a16` | 128 or 256 | 8 | packed INT4, dequantised to bfloat16 |
| `mxfp4_w4a16` | 128 or 256 | 8 | packed MXFP4, dequantised to bfloat16 |
| `fp8_w8a8` | 128 | 1 | FP8, with a scale of the block and one of each row |

`add_block` fixes the order of the sum. Parts are added in input order, each to the accumulator of
the part before it. Operands with scales are accumulated from zero over the block, and that sum
times both scales is added with one rounding.

A further weight-only format is one more entry in `FORMATS`, and one more branch of `load_block`,
which returns dequantised parts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import LinearTiles
from kernels.triton_gpu.gemm.fp8_w8a8 import add_codes, scale_of
from kernels.triton_gpu.gemm.fp8_w8a16 import four
from kernels.triton_gpu.gemm.int4_w4a16 import int4_pair, int4_scales
from kernels.triton_gpu.gemm.mxfp4_w4a16 import mxfp4_pair, mxfp4_scale
from shared.models.formats.four_bit import PARTS, block_of
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, ScaleLayout, shares_of
from shared.models.formats.weight_format import PLAIN

_BLOCK = tl.constexpr(FP8_BLOCK)


class BlockFormat(NamedTuple):
    """Weight format of a kernel, a compile-time constant.

    Attributes:
      name: Name of the format; it selects the loader.
      inputs: Inputs of a block; 0 in `FORMATS` for those that depend on the call.
      parts: Parts of a block, each of equally many inputs.
      packed: Inputs in a stored element.
      scales: Layout of the scales of a packed weight; None for other formats.
      group: Inputs of a scale of a packed weight.
      has_scale_words: Whether a scale is an int32, with a zero point.
    """

    name: str
    inputs: int
    parts: int
    packed: int
    scales: ScaleLayout | None = None
    group: int = 0
    has_scale_words: bool = False


FP8_W8A8 = "fp8_w8a8"
"""Name of the format of FP8 weights for quantised rows."""

FORMATS = (
    BlockFormat(PLAIN, inputs=0, parts=1, packed=1),
    BlockFormat("fp8_w8a16", inputs=FP8_BLOCK, parts=4, packed=4),
    BlockFormat("int4_w4a16", inputs=0, parts=PARTS, packed=PARTS),
    BlockFormat("mxfp4_w4a16", inputs=0, parts=PARTS, packed=PARTS),
    BlockFormat(FP8_W8A8, inputs=FP8_BLOCK, parts=1, packed=1),
)
"""Formats without the sizes of a call."""


def is_packed(name: str) -> bool:
    """Returns whether a format packs several inputs in a stored element."""
    return any(each.packed > 1 for each in FORMATS if each.name == name)


def format_of(name: str, depth: int, weight: Tensor, scales: Tensor | None) -> BlockFormat:
    """Returns the format of a weight; unpacked ones have steps of `depth` inputs."""
    (found,) = (each for each in FORMATS if each.name == name)
    if scales is None or found.packed == 1:
        return found._replace(inputs=found.inputs or depth)
    return found._replace(
        inputs=found.inputs or block_of(found.packed * weight.shape[-1]),
        scales=shares_of(weight.shape, scales.shape),
        group=found.packed * weight.shape[-1] // scales.shape[-1],
        has_scale_words=scales.dtype == torch.int32,
    )


def sized(
    format: BlockFormat, tiles: LinearTiles, rows: int, K: int, segments: int
) -> tuple[BlockFormat, int, int]:
    """Returns the format, the rows of a tile, from at most `rows`, and the inputs per step of a
    call.

    Raises:
      ValueError: The segments are no whole steps.
    """
    length = K // segments
    if format.name == FP8_W8A8:
        rows, depth = tiles.rows_of_codes(rows), tiles.depth_of_codes(length)
    else:
        depth = tiles.depth_of(length) if format.name == PLAIN else format.inputs
        format = format._replace(inputs=depth)
    if segments > 1 and K % (segments * depth):
        raise ValueError(f"{segments} segments must be whole steps of {depth} inputs, got {K}")
    return format, rows, depth


class TileAccess(NamedTuple):
    """Loads of one operand, compile-time constants.

    Attributes:
      kind: "descriptor" for a TMA descriptor, "pair" for one of gate and up together, "step" for
        pointers to all elements of a step, which the main loop advances, and "row" for pointers to
        the first element of each row, `[rows, 1]`.
      width: Stored elements of a load along the inputs.
      row: Stored elements of a row.
      has_all: Whether all rows are in bounds.
      is_whole: Whether a row consists of whole blocks.
    """

    kind: str
    width: int
    row: int
    has_all: bool
    is_whole: bool


class TileLoads(NamedTuple):
    """Loads of both operands, compile-time constants; `of` builds them.

    Attributes:
      K: Inputs.
      is_interpreted: Whether the interpreter runs the kernel.
    """

    format: BlockFormat
    rows: TileAccess
    weight: TileAccess
    K: int
    is_interpreted: bool

    @classmethod
    def of(
        cls,
        format: BlockFormat,
        kind: str,
        inputs: int,
        *,
        has_all_rows: bool,
        has_all_outputs: bool,
        is_interpreted: bool,
        is_pair: bool = False,
    ) -> "TileLoads":
        """Returns the loads of a GEMM; see `TileAccess`."""
        is_whole = inputs % format.inputs == 0
        rows = TileAccess(kind, format.inputs // format.parts, inputs, has_all_rows, is_whole)
        width, row = format.inputs // format.packed, inputs
        if format.packed > 1:  # packed in whole blocks
            row, is_whole = -(-inputs // format.inputs) * width, True
        kind = "pair" if is_pair else kind
        weight = TileAccess(kind, width, row, has_all_outputs, is_whole)
        return cls(format, rows, weight, inputs, is_interpreted)


class OperandTile(NamedTuple):
    """Rows of a tile, or its outputs of a weight.

    Attributes:
      place: TMA descriptor, or pointers; see `TileAccess`.
      scales: Pointers to scales, or scales already loaded; unused by formats without scales.
      first: First row or output.
      is_inside: Mask of the rows or outputs in bounds.
      count: Number of rows, for their scales.
    """

    place: Any
    scales: Any
    first: Any
    is_inside: Any
    count: Any


class OperandBlock(NamedTuple):
    """Block of the rows or of the weight.

    Attributes:
      parts: Operands in input order, `[rows or outputs, inputs]` each.
      scale: Scale of each row, or of the block; unused by formats whose parts include it.
    """

    parts: Any
    scale: Any


@triton.jit
def packed_tile(
    values, scales, output, scale, is_output, has_all: tl.constexpr, loads: tl.constexpr
):
    """Returns a tile of packed outputs; a scale per output is loaded.

    Args:
      values, scales: Pointers to the packed values and to the scales.
      output, scale: Indices of the outputs and of their scales.
      is_output, has_all: Mask of the outputs in bounds, and whether all are.
      loads: Constants of the loads.
    """
    values += (output.to(tl.int64) * loads.weight.row)[:, None]
    scales += (scale * loads.format.scales.scales_in)[:, None]
    if loads.format.scales.scales_in == 1:
        scales = _load_scales(scales, is_output, has_all)
    return OperandTile(place=values, scales=scales, first=0, is_inside=is_output, count=0)


@triton.jit
def tile_rows(tile, x_at, row_scales_at, config: tl.constexpr):
    """Returns the rows of a tile as the main loop loads them."""
    access: tl.constexpr = config.loads.rows
    if access.kind != "descriptor":
        place = tile.row.to(tl.int64)[:, None] * access.row
        if access.kind == "step":
            place += tl.arange(0, access.width)[None, :]
        x_at += place
    return OperandTile(
        place=x_at,
        scales=row_scales_at,
        first=tile.first_row,
        is_inside=tile.is_row,
        count=tile.num_rows,
    )


@triton.jit
def tile_outputs(tile, weight_at, scales_at, sizes: tl.constexpr, config: tl.constexpr):
    """Returns the outputs of a tile as the main loop loads them; packed gate and up are joined."""
    loads: tl.constexpr = config.loads
    access: tl.constexpr = loads.weight
    first, is_inside = tile.block * config.columns, tile.is_column
    if access.kind == "row":
        lane = tl.arange(0, config.width)
        output = first + lane % config.columns
        is_inside = output < sizes.N
        output += lane // config.columns * sizes.N
        scale = output // loads.format.scales.outputs
        outputs = packed_tile(weight_at, scales_at, output, scale, is_inside, access.has_all, loads)
    else:
        if access.kind == "step":
            stored = first + tl.arange(0, config.width)
            weight_at += (
                stored.to(tl.int64)[:, None] * access.row + tl.arange(0, access.width)[None, :]
            )
        outputs = OperandTile(
            place=weight_at, scales=scales_at, first=first, is_inside=is_inside, count=0
        )
    return outputs


@triton.jit
def load_rows(rows, place, at, offset: tl.constexpr, loads: tl.constexpr):
    """Loads a block of the rows; see `load_block`."""
    format: tl.constexpr = loads.format
    scale = 1
    if format.name == "fp8_w8a8":
        row = rows.first + tl.arange(0, rows.is_inside.shape[0])
        scales = rows.scales + (at + offset) // _BLOCK * rows.count + row
        scale = tl.load(scales, mask=rows.is_inside, other=0.0)
    # Triton 3.6 takes attributes of a constant for constants only where they have a name.
    count: tl.constexpr = format.parts
    access: tl.constexpr = loads.rows
    parts = ()
    for number in tl.static_range(count):
        start = offset + number * access.width
        parts += (_load_tile(rows, place, at, start, 0, access),)
    return OperandBlock(parts=parts, scale=scale)


@triton.jit
def load_block(outputs, place, at, offset: tl.constexpr, beside: tl.constexpr, loads: tl.constexpr):
    """Loads a block of the weight.

    Args:
      outputs: Outputs of the tile.
      place: Their descriptor or pointers, advanced to the step.
      at, offset: First input of the step, and inputs from there to the block.
      beside: Outputs from those of the tile to the loaded ones.
      loads: Constants of the loads.
    """
    format: tl.constexpr = loads.format
    access: tl.constexpr = loads.weight
    scale = 1
    if format.name == "fp8_w8a16":
        words = _load_tile(outputs, place, at // format.packed, offset, beside, access)
        scales = outputs.scales
        if format.scales.scales_in > 1:
            has_all: tl.constexpr = access.has_all
            scales = _load_scales(scales + at // _BLOCK, outputs.is_inside, has_all)
        parts = four(words, scales, not loads.is_interpreted)
    elif format.packed == 8:
        words = _load_tile(outputs, place, at // format.packed, offset, beside, access)
        parts = _four_bit_parts(outputs, words, at, loads)
    else:
        parts = (_load_tile(outputs, place, at, offset, beside, access),)
        if format.name == "fp8_w8a8":
            scale = scale_of(outputs.scales, outputs.first + beside, at + offset, loads.K)
    return OperandBlock(parts=parts, scale=scale)


@triton.jit
def _four_bit_parts(outputs, words, at, loads: tl.constexpr):
    """Dequantises a block of packed INT4 or MXFP4, with the scales of each group."""
    format: tl.constexpr = loads.format
    width: tl.constexpr = loads.rows.width
    has_words: tl.constexpr = format.has_scale_words
    group: tl.constexpr = format.group
    count: tl.constexpr = format.parts
    scales = _scales_of_part(outputs, at, 0, group, loads)
    parts = ()
    for byte in tl.static_range(count // 2):
        first = scales
        if byte > 0 and 2 * byte * width % group == 0:
            first = _scales_of_part(outputs, at, 2 * byte * width, group, loads)
        scales = first
        if (2 * byte + 1) * width % group == 0:
            scales = _scales_of_part(outputs, at, (2 * byte + 1) * width, group, loads)
        if format.name == "int4_w4a16":
            parts += int4_pair(words, first, scales, byte, has_words, not loads.is_interpreted)
        else:
            parts += mxfp4_pair(words, first, scales, byte, not loads.is_interpreted)
    return parts


@triton.jit
def _scales_of_part(outputs, at, first: tl.constexpr, group: tl.constexpr, loads: tl.constexpr):
    """Returns the scales of the group with the inputs `first` of a block."""
    stored = outputs.scales
    has_all: tl.constexpr = loads.weight.has_all
    if loads.format.name == "mxfp4_w4a16":
        # Exponents are read four at once: Triton 3.6 loads nothing smaller ahead. With fewer than
        # 64 rows or outputs, it lays the operands out for the smallest loaded type. For bytes, an
        # instruction adds every second pair of 32 inputs instead of 16 neighbours.
        number: tl.constexpr = first // group
        words_at = stored + at // group + number // 4 * 4
        words_at = words_at.to(tl.pointer_type(tl.int32), bitcast=True)
        words = _load_scales(words_at, outputs.is_inside, has_all)
        stored = (words >> 8 * (number % 4)) & 0xFF
    elif loads.format.scales.scales_in > 1:
        stored = _load_scales(stored + (at + first) // group, outputs.is_inside, has_all)
    if loads.format.name == "int4_w4a16":
        scales = int4_scales(stored, loads.format.has_scale_words)
    else:
        scales = mxfp4_scale(stored)
    return scales


@triton.jit
def add_block(acc, rows, block, is_swapped: tl.constexpr, loads: tl.constexpr):
    """Adds the products of a block to the accumulator, in the order of its format."""
    format: tl.constexpr = loads.format
    if format.name == "fp8_w8a8":
        x, weight, scale = rows.parts[0], block.parts[0], rows.scale * block.scale
        acc = add_codes(acc, x, weight, scale, is_swapped, loads.is_interpreted)
    else:
        count: tl.constexpr = format.parts
        for number in tl.static_range(count):
            x = rows.parts[number]
            acc = add_product(acc, x, block.parts[number].to(x.dtype), is_swapped)
    return acc


@triton.jit
def add_product(acc, x, weight, is_swapped: tl.constexpr):
    """Adds the product of rows and outputs, both with the same inputs, to an accumulator."""
    if is_swapped:  # swap-AB: outputs are the wide side of the tensor core, rows the narrow one
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def _load_tile(tile, place, at, offset: tl.constexpr, beside: tl.constexpr, access: tl.constexpr):
    """Loads stored elements of rows or outputs, zero out of bounds."""
    if access.kind == "pair":
        both = place.load([0, tile.first, at])
        part = tl.reshape(both, (both.shape[0] * both.shape[1], both.shape[2]))
    elif access.kind == "descriptor":
        part = place.load([tile.first + beside, at + offset])
    else:
        lane = tl.arange(0, access.width)
        if access.kind == "step":
            place += beside * access.row + offset
            is_input = lane < access.row - at
        else:
            lane += at + offset
            place += lane[None, :]
            is_input = lane < access.row
        if access.has_all and access.is_whole:
            part = tl.load(place)
        elif access.is_whole:
            part = tl.load(place, mask=tile.is_inside[:, None], other=0.0)
        else:
            is_inside = tile.is_inside[:, None] & is_input[None, :]
            part = tl.load(place, mask=is_inside, other=0.0)
    return part


@triton.jit
def _load_scales(at, is_output, has_all: tl.constexpr):
    return tl.load(at) if has_all else tl.load(at, mask=is_output[:, None], other=0.0)
