"""Grouped GEMMs of experts for tiles of few slots, with TMA (Gluon).

Outputs are the rows of the MMA, slots its columns. TMA copies blocks of the weight, in bfloat16 or
packed words, to a ring in shared memory, which also has the rows of the slots. A program loads all
scales of its outputs at its start, those of FP8 some steps ahead. The down GEMM copies the first
blocks of its weight before the gate-up GEMM ends.

Accumulation is one chain along the inputs, a packed weight is dequantised as by `block_loaders`,
and the epilogues compute as in `experts`, so the bits equal those kernels'.
"""

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.triton_gpu.gemm.linear_sm90 import is_on_hopper
from kernels.triton_gpu.gemm.moe_gemm_tiles import ExpertGemmSizes, ExpertWeights
from kernels.triton_gpu.gemm.sum_of_squares import add_up
from kernels.triton_gpu.moe.expert_sums import ExpertEpilogue, ExpertStream, ExpertSums
from kernels.triton_gpu.moe.experts_packed_sm90_mainloop import (
    LANES,
    ROWS,
    WORDS,
    PackedExpertConfig,
    allocated,
    begin_rows,
    begin_weight,
    product_of,
    slots_of,
)
from kernels.triton_gpu.moe.moe_align import ExpertBlocks
from kernels.triton_gpu.moe.router import RouterChunks
from shared.models.activation import Activation
from shared.models.formats.weight_format import PLAIN

_FP8 = "fp8_w8a16"
FORMATS = (PLAIN, _FP8, "int4_w4a16", "mxfp4_w4a16")
"""Formats of bfloat16, and with a dequantisation in the main loop."""
_MOST_OUTPUTS, _MOST_OF_DOWN = 128, 64
"""Maximum outputs of a tile of gate and up, and of down, a chunk of squares."""

# The name differs between versions of Triton.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


def takes(
    x: Float[Tensor, "R inputs"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    formats: tuple[str, str],
    activation: Activation,
    tiles: ExpertsTiles,
) -> bool:
    """Returns whether `launch_gated` and `launch_down` support a block.

    With FP8 or bfloat16 both weights must have one format. Four bits require a gate.
    """
    halves = activation.num_projections
    inner = gate_up.weights.shape[1] // halves
    if not tiles.copies_packed or not is_on_hopper() or x.dtype != torch.bfloat16:
        return False
    has_four_bits = _FP8 not in formats and PLAIN not in formats
    if not (halves == 2 if has_four_bits else formats[0] == formats[1]):
        return False
    is_tile = halves * tiles.columns <= _MOST_OUTPUTS and tiles.down_columns <= _MOST_OF_DOWN
    is_tile &= tiles.slots <= 32
    is_whole = x.shape[1] % 8 == 0 and inner % 8 == 0
    each = zip((gate_up, down), formats, strict=True)
    return is_tile and is_whole and all(_is_supported(stored, name) for stored, name in each)


def _is_supported(stored: ExpertWeights, format: str) -> bool:
    """Returns whether a line of words has whole int32 of scales, and each output its own scales.

    FP8 scales can have any layout; bfloat16 has none.
    """
    if format == PLAIN:
        return stored.weights.dtype == torch.bfloat16
    if format not in FORMATS:
        return False
    if format == _FP8:
        return True
    outputs, words = stored.weights.shape[1:]
    of_line = stored.scales.shape[-1] * stored.scales.element_size() * WORDS.value // words
    return stored.scales.shape[1] == outputs and of_line % 4 == 0


def _config(
    stored: ExpertWeights,
    sizes: ExpertGemmSizes,
    tiles: ExpertsTiles,
    halves: int,
    *,
    is_down: bool,
) -> PackedExpertConfig:
    gate_up = tiles.columns, tiles.depth, tiles.warps
    down = tiles.down_columns, tiles.down_depth, tiles.down_warps
    columns, depth, warps = down if is_down else gate_up
    format = sizes.loads.format
    in_line = _line_width(stored) * format.packed
    lines = max(1, depth // in_line)
    scales = 0
    if format.name not in (PLAIN, _FP8):
        scales = stored.scales.shape[-1] * stored.scales.element_size() // 4
    of_line = scales * WORDS.value // sizes.loads.weight.row
    steps = -(-sizes.K // (lines * in_line))
    return PackedExpertConfig(
        lanes=tiles.slots if tiles.grouped else LANES.value,
        width=halves * columns,
        warps=min(warps, halves * columns // ROWS.value),
        halves=halves,
        stages=tiles.down_stages if is_down else tiles.stages,
        lines=lines,
        in_line=in_line,
        scale_words=scales,
        scales_of_line=of_line,
        scale_rows=triton.next_power_of_2(steps * lines * of_line),
        is_grouped=tiles.grouped,
    )


def _line_width(stored: ExpertWeights) -> int:
    """Returns the stored elements of an output in a line of shared memory."""
    return WORDS.value * 4 // stored.weights.element_size()


def _described(stored: ExpertWeights, config: PackedExpertConfig) -> TensorDescriptor:
    """Returns the descriptor of a weight, `[stored halves, outputs, elements]`."""
    experts, outputs, elements = stored.weights.shape
    weight = stored.weights.view(experts * config.halves, outputs // config.halves, elements)
    block = [config.halves, config.width // config.halves, _line_width(stored)]
    bits = 8 * stored.weights.element_size()
    layout = gl.NVMMASharedLayout(128, element_bitwidth=bits, rank=3)
    return TensorDescriptor.from_tensor(weight, block, layout)


def launch_gated(
    scaled: Float[Tensor, "R hidden"],
    squares: Float[Tensor, "R chunks"] | None,
    gate_up: ExpertWeights,
    ids: Int[Tensor, "R slots"],
    expert_blocks: ExpertBlocks,
    inner: Float[Tensor, "all_slots inner"],
    eps: float,
    num_tiles: int,
    *,
    activation: Activation,
    sizes: ExpertGemmSizes,
    chunks: RouterChunks,
    tiles: ExpertsTiles,
    **launching: bool,
) -> None:
    """Launches the gate-up GEMM for arrays that `takes` accepts; writes `inner`.

    Args:
      scaled, squares, gate_up, ids, expert_blocks, eps, activation, sizes, chunks, tiles: Same as
        for the kernel of `experts`.
      inner: Result.
      num_tiles: Tiles of slots.
      launching: Launch options, see `launching` in `linear`.
    """
    config = _config(gate_up, sizes, tiles, activation.num_projections, is_down=False)
    _gated_packed_sm90_kernel[(num_tiles * triton.cdiv(sizes.N, tiles.columns),)](
        scaled,
        scaled if squares is None else squares,
        _described(gate_up, config),
        gate_up.pointers,
        ids,
        expert_blocks,
        inner,
        eps,
        activation=activation,
        sizes=sizes,
        chunks=chunks,
        config=config,
        num_warps=config.warps,
        **launching,
    )


def launch_down(
    inner: Float[Tensor, "all_slots inner"],
    down: ExpertWeights,
    ids: Int[Tensor, "R slots"],
    expert_blocks: ExpertBlocks,
    parts: Float[Tensor, "all_slots hidden"],
    arrivals: Int[Tensor, " counters"],
    epilogue: ExpertEpilogue,
    stream: ExpertStream,
    num_tiles: int,
    *,
    sizes: ExpertGemmSizes,
    sums: ExpertSums,
    tiles: ExpertsTiles,
    **launching: bool,
) -> None:
    """Launches the down GEMM for arrays that `takes` accepts; writes `parts` or `stream`.

    Args: See `launch_gated`, and the kernel of `experts`.
    """
    config = _config(down, sizes, tiles, 1, is_down=True)
    _down_packed_sm90_kernel[(num_tiles * triton.cdiv(sizes.N, tiles.down_columns),)](
        inner,
        _described(down, config),
        down.pointers,
        ids,
        expert_blocks,
        parts,
        arrivals,
        epilogue,
        stream,
        sizes=sizes,
        sums=sums,
        config=config,
        num_warps=config.warps,
        **launching,
    )


@gluon.jit
def _gated_packed_sm90_kernel(
    x_at,
    squares_at,
    weight_of,
    stored,
    ids_at,
    expert_blocks,
    inner_at,
    eps,
    activation: gl.constexpr,
    sizes: gl.constexpr,
    chunks: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per tile of slots and block of outputs; gate and up rows form one tile.

    Without a gate a tile has the up rows only.
    """
    N: gl.constexpr = sizes.N
    is_gated: gl.constexpr = config.halves == 2
    columns: gl.constexpr = config.width // config.halves
    blocks: gl.constexpr = (N + columns - 1) // columns
    if is_launched:
        gdc_wait()
    tile = slots_of(gl.program_id(0) // blocks, ids_at, expert_blocks, config)
    if tile.count == 0:
        return
    first = gl.program_id(0) % blocks * columns
    ring = allocated(weight_of, config)
    scales = begin_weight(weight_of, stored, tile, first, ring, sizes, config)
    row = tile.slots // sizes.slots
    begin_rows(x_at, row, tile, ring, sizes, config)
    if is_launched:  # the down GEMM may copy its first words
        gdc_launch_dependents()
    of_squares: gl.constexpr = _squares_layout(chunks.spread, config)
    scale = gl.full((config.lanes,), 1.0, gl.float32, gl.SliceLayout(1, of_squares))
    if chunks.count > 0:
        lane = gl.arange(0, config.lanes, gl.SliceLayout(1, of_squares))
        of_row = _at_lanes(row, lane, config)
        chunk = gl.arange(0, chunks.spread, gl.SliceLayout(0, of_squares))
        is_chunk = (lane < tile.count)[:, None] & (chunk < chunks.count)[None, :]
        at = squares_at + of_row.to(gl.int64)[:, None] * chunks.count + chunk[None, :]
        total = add_up(gl.load(at, mask=is_chunk, other=0.0), chunks.digits)
        scale = gl.rsqrt(total * (1.0 / sizes.K) + eps)
    acc = product_of(weight_of, x_at, row, tile, first, ring, scales, sizes, config)
    gate, up = acc, acc
    if is_gated:
        gate, up = _gate_and_up(acc, config)
    layout: gl.constexpr = up.type.layout
    scale = gl.convert_layout(scale, gl.SliceLayout(0, layout))[None, :]
    gate, up = gate * scale, up * scale
    column = first + gl.arange(0, columns, gl.SliceLayout(1, layout))
    is_column = column < N
    if sizes.is_biased:
        bias = stored.bias + tile.expert.to(gl.int64) * (config.halves * N) + column
        gate += gl.load(bias, mask=is_column, other=0.0).to(gl.float32)[:, None]
        if is_gated:
            up += gl.load(bias + N, mask=is_column, other=0.0).to(gl.float32)[:, None]
    out = act_and_mul(gate, up, activation) if is_gated else relu_squared(gate)
    lane = gl.arange(0, config.lanes, gl.SliceLayout(0, layout))
    slots = _at_lanes(tile.slots, lane, config)
    place = slots.to(gl.int64)[None, :] * N + column[:, None]
    keep = (lane < tile.count)[None, :] & is_column[:, None]
    gl.store(inner_at + place, out.to(inner_at.dtype.element_ty), mask=keep)


@gluon.jit
def _at_lanes(slots, lane, config: gl.constexpr):
    """Returns the slots of a tile, or their rows, in the layout of the lanes."""
    if config.is_grouped:
        slots = gl.convert_layout(slots, lane.type.layout)
    return slots + lane * 0


@gluon.jit
def _gate_and_up(acc, config: gl.constexpr):
    """Returns the outputs of the gate and of up, each `[columns, lanes]`."""
    columns: gl.constexpr = config.width // 2
    acc = gl.reshape(acc, (columns // 8, 2, 8, config.lanes))
    gate, up = gl.split(gl.permute(acc, (0, 2, 3, 1)))
    return gl.reshape(gate, (columns, config.lanes)), gl.reshape(up, (columns, config.lanes))


@gluon.jit
def _down_packed_sm90_kernel(
    x_at,
    weight_of,
    stored,
    ids_at,
    expert_blocks,
    parts_at,
    arrivals_at,
    epilogue,
    stream,
    sizes: gl.constexpr,
    sums: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Same as for gate and up; if slots are tiles, a row's last program adds them."""
    N: gl.constexpr = sizes.N
    blocks: gl.constexpr = (N + config.width - 1) // config.width
    number, block = gl.program_id(0) // blocks, gl.program_id(0) % blocks
    # All programs of the previous kernel have waited for the router and the groups.
    tile = slots_of(number, ids_at, expert_blocks, config)
    if tile.count == 0:
        if is_launched:
            gdc_wait()
        return
    ring = allocated(weight_of, config)
    first = block * config.width
    scales = begin_weight(weight_of, stored, tile, first, ring, sizes, config)
    if is_launched:
        gdc_wait()
    begin_rows(x_at, tile.slots, tile, ring, sizes, config)
    if is_launched:
        gdc_launch_dependents()
    acc = product_of(weight_of, x_at, tile.slots, tile, first, ring, scales, sizes, config)
    layout: gl.constexpr = acc.type.layout
    column = first + gl.arange(0, config.width, gl.SliceLayout(1, layout))
    is_column = column < N
    if sizes.is_biased:
        bias = stored.bias + tile.expert.to(gl.int64) * N + column
        acc += gl.load(bias, mask=is_column, other=0.0).to(gl.float32)[:, None]
    lane = gl.arange(0, config.lanes, gl.SliceLayout(0, layout))
    slots = _at_lanes(tile.slots, lane, config)
    place = slots.to(gl.int64)[None, :] * N + column[:, None]
    gl.store(parts_at + place, acc, mask=(lane < tile.count)[None, :] & is_column[:, None])
    if not config.is_grouped:
        _barrier()  # the stores of all threads, before one of them counts
        chunks: gl.constexpr = (N + sums.length - 1) // sums.length
        row, chunk = number // sizes.slots, block * config.width // sums.length
        counter = arrivals_at + row * chunks + chunk
        rest = N - chunk * sums.length
        programs = gl.minimum(
            sums.length // config.width, (rest + config.width - 1) // config.width
        )
        if gl.atomic_add(counter, 1, sem="acq_rel") == sizes.slots * programs - 1:
            gl.store(counter, 0)
            _add_slots(parts_at, epilogue, stream, row, chunk, sizes, sums, config)


@gluon.jit
def _add_slots(
    parts_at,
    epilogue,
    stream,
    row,
    chunk,
    sizes: gl.constexpr,
    sums: gl.constexpr,
    config: gl.constexpr,
):
    """Same as `expert_sums.add_slots`, for one chunk of squares."""
    N: gl.constexpr = sizes.N
    slots: gl.constexpr = sizes.slots
    warps: gl.constexpr = config.warps
    chunks: gl.constexpr = (N + sums.length - 1) // sums.length
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, warps], [1, 0])
    column = gl.arange(0, sums.length, gl.SliceLayout(0, layout)) + chunk * sums.length
    is_column = column < N
    total = gl.full((sums.length,), 0.0, gl.float32, gl.SliceLayout(0, layout))
    for slot in gl.static_range(slots):
        at = parts_at + (row * slots + slot).to(gl.int64) * N + column
        part = gl.load(at, mask=is_column, other=0.0, cache_modifier=".cg")
        total += part * gl.load(epilogue.weights + row * slots + slot)
    place = row.to(gl.int64) * N + column
    before = gl.load(epilogue.rows + place, mask=is_column, other=0.0)
    out = (total * sizes.factor + before.to(gl.float32)).to(stream.rows.dtype.element_ty)
    gl.store(stream.rows + place, out, mask=is_column)
    out = out.to(gl.float32)
    if sizes.is_scaled:
        norm = gl.load(epilogue.norm + column, mask=is_column, other=0.0).to(gl.float32)
        scaled = (out * norm).to(stream.scaled.dtype.element_ty)
        gl.store(stream.scaled + place, scaled, mask=is_column)
    squares = gl.where(is_column, out * out, 0.0)
    squares = add_up(squares[None, :], sums.digits)
    at = gl.full((1,), 0, gl.int32, gl.SliceLayout(1, layout)) + chunk
    gl.store(stream.squares + row.to(gl.int64) * chunks + at, squares)


@gluon.constexpr_function
def _squares_layout(chunks, config):
    """Returns the layout in which warps load rows of squares, up to four per thread."""
    each = min(chunks, 4)
    threads = min(chunks // each, 8)
    return gl.BlockedLayout([1, each], [32 // threads, threads], [config.warps, 1], [1, 0])
