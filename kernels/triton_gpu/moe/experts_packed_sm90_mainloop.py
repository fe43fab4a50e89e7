"""Main loop of the GEMMs of experts with TMA copies of the weight (Gluon)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.triton_gpu.gemm.linear_packed_sm90_mainloop import (
    four_bit_pair,
    fp8_pair,
    int4_pair,
    scale_of_group,
)
from kernels.triton_gpu.gemm.linear_sm90 import copy_tile
from kernels.triton_gpu.gemm.moe_gemm_tiles import ExpertTile
from kernels.triton_gpu.gemm.mxfp4_w4a16 import mxfp4_assembly

WORDS = gl.constexpr(32)
"""Words of an output in a line of shared memory, 128 bytes."""
LANES = gl.constexpr(8)
"""Columns of an MMA."""
ROWS = gl.constexpr(16)
"""Rows of an MMA."""
_AHEAD = gl.constexpr(512)
"""Inputs from the loaded FP8 scales to the used ones."""

# The names differ between versions of Triton.
_copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
_viewed = getattr(_memory, "reinterpret", None) or getattr(_memory, "_reinterpret")  # noqa: B009


class PackedExpertConfig(NamedTuple):
    """Tile config of a GEMM.

    Attributes:
      lanes: Columns of the product: slots of an expert block, or copies of one slot.
      width, halves: Outputs of a tile; 2 if half of them are of the gate and half of up, else 1.
      warps: Warps, each with `ROWS` outputs or a multiple.
      stages, lines: Stages of the ring, and lines in each, of packed words or bfloat16.
      in_line: Inputs of a line.
      scale_words, scales_of_line, scale_rows: Words of an output's scales, in memory, for a line,
        and in shared memory; 0 for FP8 and bfloat16.
      is_grouped: Whether tiles are expert blocks.
    """

    lanes: int
    width: int
    warps: int
    halves: int
    stages: int
    lines: int
    in_line: int
    scale_words: int
    scales_of_line: int
    scale_rows: int
    is_grouped: bool


class PackedExpertRing(NamedTuple):
    """Shared memory of a program.

    Attributes:
      weight, rows: Ring of blocks of the weight, and of the rows.
      full: Barriers: the weight of a stage is loaded.
    """

    weight: Any
    rows: Any
    full: Any


class FP8Scales(NamedTuple):
    """Scales of the outputs of a thread, a column per line of words.

    Attributes:
      at, is_output: Pointers to the first scales of outputs, and mask of the outputs in bounds.
      later: Scales of the next steps.
    """

    at: Any
    is_output: Any
    later: Any


@gluon.jit
def slots_of(number, ids_at, expert_blocks, config: gl.constexpr):
    """Same as `moe_gemm_tiles.tile_of`; a single slot is a scalar."""
    if config.is_grouped:
        expert = gl.load(expert_blocks.experts + number)
        count = gl.load(expert_blocks.counts + number)
        lane = gl.arange(0, config.lanes, gl.SliceLayout(1, _rows_layout(config)))
        at = expert_blocks.slots + gl.load(expert_blocks.firsts + number) + lane
        slots = gl.load(at, mask=lane < count, other=0)
        expert = gl.where(count > 0, expert, 0)
    else:
        expert = gl.load(ids_at + number)
        count = gl.where(expert >= 0, 1, 0)
        slots = number
    return ExpertTile(expert=expert, count=count, slots=slots)


@gluon.jit
def allocated(weight_of, config: gl.constexpr):
    """Allocates the shared memory of a program, and prepares its barriers."""
    step: gl.constexpr = config.lines * config.in_line
    rows: gl.constexpr = config.lanes if config.is_grouped else 1
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if config.is_grouped else 1, [1, 0])
    stages: gl.constexpr = config.stages
    ring = PackedExpertRing(
        weight=gl.allocate_shared_memory(
            weight_of.dtype, [stages * config.lines] + weight_of.block_type.shape, weight_of.layout
        ),
        rows=gl.allocate_shared_memory(gl.bfloat16, [stages, rows, step], swizzle),
        full=gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(stages):
        mbarrier.init(ring.full.index(i), count=1)
    fence_async_shared()
    return ring


@gluon.jit
def begin_weight(weight_of, stored, tile, first, ring, sizes: gl.constexpr, config: gl.constexpr):
    """Copies the first blocks of the weight; returns all scales in shared memory, the first
    `FP8Scales`, or nothing for bfloat16.
    """
    first_steps: gl.constexpr = config.stages - 1
    for step in gl.static_range(first_steps):
        _copy_weight(weight_of, tile, first, step, step, ring, sizes, config)
    scales = ()
    if sizes.loads.format.name == "fp8_w8a16":
        scales = _first_scales(stored, tile, first, sizes, config)
    elif sizes.loads.format.packed > 1:
        scales = _copied_scales(stored, tile, first, sizes, config)
    return scales


@gluon.jit
def _copied_scales(stored, tile, first, sizes: gl.constexpr, config: gl.constexpr):
    """Copies all scales to shared memory, which is returned by its words."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, config.warps], [0, 1])
    lane = gl.arange(0, config.width, gl.SliceLayout(0, layout))
    output, is_output = _outputs_of(lane, tile, first, sizes, config)
    word = gl.arange(0, config.scale_rows, gl.SliceLayout(1, layout))
    at = stored.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    at = at + output.to(gl.int64)[None, :] * config.scale_words + word[:, None]
    mask = is_output[None, :] & (word < config.scale_words)[:, None]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    of_word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.int32, [config.scale_rows, config.width], flat)
    _copy_elements(scales, at, mask)
    return _viewed(scales, gl.int32, [config.scale_rows, config.width], of_word)


@gluon.jit
def _outputs_of(lane, tile, first, sizes: gl.constexpr, config: gl.constexpr):
    """Returns the outputs of rows of a product among those of all experts, and their mask."""
    column, half = first + lane, 0
    if config.halves == 2:  # eight of gate, and the same of up, as `_load_line` returns them
        column, half = first + lane // 16 * 8 + lane % 8, lane // 8 % 2
    output = (tile.expert * config.halves + half) * sizes.N + column
    return output, column < sizes.N


@gluon.jit
def _first_scales(stored, tile, first, sizes: gl.constexpr, config: gl.constexpr):
    """Loads the FP8 scales of the first steps, or the only one of each output."""
    lines: gl.constexpr = config.lines
    of_scales: gl.constexpr = sizes.loads.format.scales
    ahead: gl.constexpr = max(1, _AHEAD // (lines * config.in_line))
    layout: gl.constexpr = gl.SliceLayout(1, _words_layout(config.width, config.warps, WORDS))
    lane = gl.arange(0, config.width, layout)
    output, is_output = _outputs_of(lane, tile, first, sizes, config)
    at = stored.scales + (output // of_scales.outputs).to(gl.int64) * of_scales.scales_in
    later = ()
    if of_scales.scales_in == 1:
        scale = _load_scale(at, is_output, sizes)
        for _ in gl.static_range(lines):
            later += (scale,)
    else:
        for step in gl.static_range(ahead):
            later += (_scales_of_step(at, is_output, step, sizes, config),)
    return FP8Scales(at=at, is_output=is_output, later=later)


@gluon.jit
def _scales_of_step(at, is_output, step, sizes: gl.constexpr, config: gl.constexpr):
    """Loads the FP8 scales of each line of a step, or some others after the last."""
    lines: gl.constexpr = config.lines
    count: gl.constexpr = sizes.loads.format.scales.scales_in
    is_whole: gl.constexpr = count % lines == 0
    first = gl.minimum(step, count // lines - 1) * lines if is_whole else step * lines
    scales = ()
    for line in gl.static_range(lines):
        number = first + line if is_whole else gl.minimum(first + line, count - 1)
        scales += (_load_scale(at + number, is_output, sizes),)
    return scales


@gluon.jit
def _load_scale(at, is_output, sizes: gl.constexpr):
    """Loads an FP8 scale of each output; a bfloat16 is in the lower bits of an int32."""
    scale = gl.load(at) if sizes.loads.weight.has_all else gl.load(at, mask=is_output, other=0.0)
    if scale.dtype == gl.bfloat16:  # otherwise the loop moves two scales to one register
        scale = scale.to(gl.int16, bitcast=True).to(gl.int32)
    return scale


@gluon.jit
def begin_rows(x_at, row, tile, ring, sizes: gl.constexpr, config: gl.constexpr):
    """Copies the first inputs of the rows."""
    first_steps: gl.constexpr = config.stages - 1
    for step in gl.static_range(first_steps):
        _copy_rows(x_at, row, tile, step, step, ring, sizes, config)


@gluon.jit
def _copy_weight(
    weight_of, tile, first, step, slot, ring, sizes: gl.constexpr, config: gl.constexpr
):
    """Copies the weight of a step, if there is one; zeros after the last input."""
    lines: gl.constexpr = config.lines
    line_width: gl.constexpr = weight_of.block_type.shape[2]
    full = ring.full.index(slot)
    pred = step * (lines * config.in_line) < sizes.K
    mbarrier.expect(full, lines * config.width * WORDS * 4, pred=pred)
    for line in gl.static_range(lines):
        place = ring.weight.index(slot * lines + line)
        at = [tile.expert * config.halves, first, (step * lines + line) * line_width]
        copy_tile(weight_of, at, full, place, pred=pred)


@gluon.jit
def _copy_rows(x_at, row, tile, step, slot, ring, sizes: gl.constexpr, config: gl.constexpr):
    """Copies the rows of a step; zeros after the last input."""
    depth: gl.constexpr = config.lines * config.in_line
    layout: gl.constexpr = _rows_layout(config)
    lane = step * depth + gl.arange(0, depth, gl.SliceLayout(0, layout))
    if config.is_grouped:
        is_row = gl.arange(0, config.lanes, gl.SliceLayout(1, layout)) < tile.count
        at = x_at + row.to(gl.int64)[:, None] * sizes.K + lane[None, :]
        mask = is_row[:, None] & (lane < sizes.K)[None, :]
    else:
        at = (x_at + row.to(gl.int64) * sizes.K + lane)[None, :]
        mask = (lane < sizes.K)[None, :]
    _copy_elements(ring.rows.index(slot), at, mask)
    async_copy.commit_group()


@gluon.jit
def product_of(
    weight_of, x_at, row, tile, first, ring, scales, sizes: gl.constexpr, config: gl.constexpr
):
    """Multiplies the outputs of a tile with its slots, [outputs, lanes].

    The scales are the result of `begin_weight`.
    """
    stages: gl.constexpr = config.stages
    lines: gl.constexpr = config.lines
    depth: gl.constexpr = lines * config.in_line
    steps: gl.constexpr = (sizes.K + depth - 1) // depth
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [config.warps, 1], [16, 8])
    is_fp8: gl.constexpr = sizes.loads.format.name == "fp8_w8a16"
    ahead: gl.constexpr = max(1, _AHEAD // depth)
    later = scales.later if is_fp8 else scales
    acc = gl.full((config.width, config.lanes), 0.0, gl.float32, sums)
    slot = 0
    phase = 0
    for step in range(steps):
        async_copy.wait_group(stages - 2)
        mbarrier.wait(ring.full.index(slot), phase)
        free = (slot + stages - 1) % stages
        _copy_weight(weight_of, tile, first, step + stages - 1, free, ring, sizes, config)
        _copy_rows(x_at, row, tile, step + stages - 1, free, ring, sizes, config)
        own = later
        if is_fp8 and sizes.loads.format.scales.scales_in > 1:
            own = later[0]
            at, mask = scales.at, scales.is_output
            later = later[1:] + (_scales_of_step(at, mask, step + ahead, sizes, config),)
        for line in gl.static_range(lines):
            number = step * lines + line
            words = _load_line(ring.weight.index(slot * lines + line), config)
            x = ring.rows.index(slot)
            stored = own[line] if is_fp8 else _scales_of_line(scales, number, sizes, config)
            acc = _add_line(acc, words, stored, x, line, sizes, config)
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1
    return acc


@gluon.jit
def _scales_of_line(scales, number, sizes: gl.constexpr, config: gl.constexpr):
    """Loads the words of a line's scales from shared memory."""
    format: gl.constexpr = sizes.loads.format
    count: gl.constexpr = config.scales_of_line
    layout: gl.constexpr = gl.SliceLayout(
        1, _words_layout(config.width, config.warps, format.inputs // format.parts)
    )
    stored = ()
    for word in gl.static_range(count):
        stored += (scales.index(number * count + word).load(layout),)
    return stored


@gluon.jit
def _add_line(acc, words, stored, x, line: gl.constexpr, sizes: gl.constexpr, config: gl.constexpr):
    """Adds the products of a line, in input order; `words` are bfloat16 if there is no scale."""
    format: gl.constexpr = sizes.loads.format
    first: gl.constexpr = line * config.in_line
    part: gl.constexpr = format.inputs // format.parts
    blocks: gl.constexpr = config.in_line // format.inputs
    if format.packed == 1:
        acc = _add(acc, words, x, first, config)
    else:
        for block in gl.static_range(blocks):
            own = _block_of(words, block, part, config)
            for byte in gl.static_range(format.parts // 2):
                acc = _add_pair(acc, own, stored, x, block, byte, first, sizes, config)
    return acc


@gluon.jit
def _add_pair(
    acc,
    words,
    stored,
    x,
    block: gl.constexpr,
    byte: gl.constexpr,
    first: gl.constexpr,
    sizes: gl.constexpr,
    config: gl.constexpr,
):
    """Adds the products of two neighbouring parts of a block, a byte of the words."""
    format: gl.constexpr = sizes.loads.format
    part: gl.constexpr = format.inputs // format.parts
    at: gl.constexpr = block * format.inputs + 2 * byte * part
    if format.name == "fp8_w8a16":
        scale = stored
        if scale.dtype == gl.int32:
            scale = scale.to(gl.int16).to(gl.bfloat16, bitcast=True)
        one, two = fp8_pair(words, scale[:, None], byte)
    else:
        one_scale = _scale_of(stored, at // format.group, format)
        two_scale = _scale_of(stored, (at + part) // format.group, format)
        if format.name == "mxfp4_w4a16":
            one, two = four_bit_pair(words, one_scale, two_scale, mxfp4_assembly(byte))
        else:
            one, two = int4_pair(words, one_scale, two_scale, byte, format.has_scale_words)
    acc = _add(acc, one, x, first + at, config)
    return _add(acc, two, x, first + at + part, config)


@gluon.jit
def _block_of(words, block: gl.constexpr, part: gl.constexpr, config: gl.constexpr):
    """Returns the words of a block of a line."""
    width: gl.constexpr = words.shape[0]
    own = words
    if part < WORDS:
        own = gl.split(gl.permute(gl.reshape(words, (width, 2, part)), (0, 2, 1)))[block]
    return gl.convert_layout(
        own, _words_layout(config.width, config.warps, part), assert_trivial=True
    )


@gluon.jit
def _add(acc, weight, x, first: gl.constexpr, config: gl.constexpr):
    """Adds the products of a part to an accumulator."""
    width: gl.constexpr = weight.shape[1]
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    weight = gl.convert_layout(weight, layout, assert_trivial=True)
    x = x.slice(first, width, 1).permute((1, 0)).load(x_layout)
    if not config.is_grouped:
        x, _ = gl.broadcast(x, gl.full((width, config.lanes), 0.0, gl.bfloat16, x_layout))
    return mma_v2(weight, x, acc)


@gluon.jit
def _load_line(place, config: gl.constexpr):
    """Loads a line of each output; a warp has the same columns of gate and up."""
    width: gl.constexpr = config.width
    columns: gl.constexpr = place.shape[2]
    layout: gl.constexpr = _line_layout(config.width, config.warps, config.halves, columns)
    if config.halves == 1:
        words = place.reshape((width, columns)).load(layout)
    else:
        words = gl.reshape(place.load(layout), (2, width // 16, 8, columns))
        words = gl.reshape(gl.permute(words, (1, 0, 2, 3)), (width, columns))
    return words


@gluon.jit
def _scale_of(stored, group: gl.constexpr, format: gl.constexpr):
    """Returns the scales of a group of a line as columns: bfloat16, or three with a zero point."""
    if format.name == "mxfp4_w4a16":
        exponent = (stored[group // 4] >> 8 * (group % 4)) & 0xFF
        scale = (exponent.to(gl.int16) << 7).to(gl.bfloat16, bitcast=True)[:, None]
    else:
        scale = scale_of_group(stored, group, format)
    return scale


@gluon.constexpr_function
def _rows_layout(config):
    """Returns the layout in which warps copy rows, eight inputs per thread."""
    return gl.BlockedLayout([1, 8], [1, 32], [config.warps, 1], [1, 0])


@gluon.constexpr_function
def _words_layout(width, warps, columns):
    """Returns the layout of words or bfloat16 as an operand of the MMA, [outputs, columns]."""
    reg = [[0, 1], [8, 0]] + [[0, each] for each in (8, 16, 32) if each < columns]
    lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rows = [[16 << each, 0] for each in range((width // 16).bit_length() - 1)]
    split = warps.bit_length() - 1
    reg += rows[split:]
    return gl.DistributedLinearLayout(reg, lane, rows[:split], [], [width, columns])


@gluon.constexpr_function
def _line_layout(width, warps, halves, columns):
    """Returns the layout of lines, [outputs, columns] or [2, outputs / 2, columns]."""
    if halves == 1:
        return _words_layout(width, warps, columns)
    reg = [[0, 0, 1], [1, 0, 0]] + [[0, 0, each] for each in (8, 16, 32) if each < columns]
    lane = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    rows = [[0, 8 << each, 0] for each in range((width // 16).bit_length() - 1)]
    split = warps.bit_length() - 1
    reg += rows[split:]
    return gl.DistributedLinearLayout(reg, lane, rows[:split], [], [2, width // 2, columns])
