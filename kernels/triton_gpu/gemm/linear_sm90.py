"""WGMMA GEMM with TMA and warp specialisation (Gluon).

A tile of 192 weight columns is two products of one block of rows, with 128 and 64 columns; plain
Triton requires powers of two. With segments tiles of 128 and 256 columns are supported, too. One
producer warp copies blocks by TMA ahead of the consumers. Programs are persistent, one per
multiprocessor: the first copies of a block overlap with the epilogue of the block before it.

Accumulation is one chain along the inputs, or along each segment of them, and the epilogue computes
as in `linear`, so the bits equal that kernel's.
"""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.tiles import LinearTiles
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    GemmSizes,
    GemmTileConfig,
    SquaresChunks,
)
from kernels.triton_gpu.gemm.linear_sm90_mainloop import (
    NARROW,
    WIDE,
    GemmPipeline,
    accumulate_pair,
    accumulate_segmented,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_LINE = 64
"""Inputs of a shared-memory line that TMA fills."""
_MOST_BYTES = 224 * 2**10
"""Maximum bytes of blocks and sums in shared memory."""
_COPYING_REGISTERS = gl.constexpr(24)

# The names differ between versions of Triton.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@cache
def is_on_hopper() -> bool:
    """Returns whether the GPU is a Hopper, the only one with WGMMA."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def takes(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"],
    *,
    is_gated: bool,
    is_added: bool,
    segments: int,
    tiles: LinearTiles,
) -> bool:
    """Returns whether `launch` supports a call: tiles of 192 columns, bfloat16, TMA, one segment.

    With segments, which must be whole steps, also those of `_holds_segments`, without a gate.
    """
    inputs = x.shape[1]
    is_half = x.dtype == weight.dtype == torch.bfloat16 and inputs % 8 == 0
    is_wide = tiles.columns * (2 if is_gated else 1) == WIDE.value + NARROW.value
    if segments > 1:
        is_wide = is_wide or _holds_segments(tiles)
        is_wide = is_wide and tiles.rows == 16 * tiles.warps
        is_wide = is_wide and inputs % (segments * tiles.depth) == 0
    is_deep = tiles.depth_of(inputs // segments) >= _LINE
    is_supported = is_wide and is_half and is_deep
    is_supported = is_supported and not (is_gated and (is_added or segments > 1))
    return is_supported and is_on_hopper()


def _holds_segments(tiles: LinearTiles) -> bool:
    """Returns whether tiles have 128 or 256 columns, and half of the sums fits next to the ring."""
    is_tile = tiles.persistent and tiles.described
    ring = 2 * tiles.stages * (tiles.rows + tiles.columns) * tiles.depth
    half = 4 * tiles.rows * tiles.columns // 2
    return is_tile and tiles.columns in (WIDE.value, 2 * WIDE.value) and ring + half <= _MOST_BYTES


def launch(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"],
    args: GemmOperands,
    row_blocks: int,
    blocks: int,
    *,
    programs: int,
    sizes: GemmSizes,
    squares: SquaresChunks,
    config: GemmTileConfig,
    warps: int,
    **launching: bool,
) -> None:
    """Launches the GEMM for arrays that `takes` accepts; writes the outputs of `args`.

    Args:
      x, weight: Rows and weight.
      args: Inputs of the prologue and the epilogue, and outputs.
      row_blocks, blocks: Row blocks of the result, and blocks in all.
      programs: Number of persistent programs.
      sizes, squares, config: Same as for the kernel of `linear`.
      warps: Consumer warps.
      launching: Launch options, see `launching` in `linear`.
    """

    def described(array: Tensor, *shape: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
        return TensorDescriptor.from_tensor(array, list(shape), layout)

    if sizes.is_gated:  # blocks of gate and up form one tile
        weight = weight.view(2, sizes.N, sizes.K)
        parts = [(2, size.value // 2, config.depth) for size in (WIDE, NARROW)]
    else:
        is_pair = config.columns == WIDE.value + NARROW.value
        widths = (WIDE.value, NARROW.value) if is_pair else (config.columns,)
        parts = [(width, config.depth) for width in widths]
    wide, *narrow = (described(weight, *shape) for shape in parts)
    _linear_sm90_kernel[(programs,)](
        described(x, config.rows, config.depth),
        wide,
        narrow[0] if narrow else None,
        args,
        len(x),
        row_blocks,
        blocks,
        sizes=sizes,
        squares=squares,
        config=config,
        warps=warps,
        num_warps=warps,
        **launching,
    )


@gluon.jit(do_not_specialize=["num_rows", "row_blocks", "blocks"])
def _linear_sm90_kernel(
    x_of,
    wide_of,
    narrow_of,
    args,
    num_rows,
    row_blocks,
    blocks,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    warps: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Persistent program: processes blocks of outputs and rows in turn; rows vary first."""
    stages: gl.constexpr = config.stages
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    narrow = None
    if narrow_of is not None:
        narrow = gl.allocate_shared_memory(
            narrow_of.dtype, [stages] + narrow_of.block_type.shape, narrow_of.layout
        )
    ring = GemmPipeline(
        rows=gl.allocate_shared_memory(x_of.dtype, [stages] + x_of.block_type.shape, x_of.layout),
        wide=gl.allocate_shared_memory(
            wide_of.dtype, [stages] + wide_of.block_type.shape, wide_of.layout
        ),
        narrow=narrow,
        full=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        free=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.free.index(i), count=1)
    fence_async_shared()
    if is_launched:
        gdc_wait()
    gl.warp_specialize(
        [
            (
                _multiply,
                (ring, args, num_rows, row_blocks, blocks, sizes, squares, config, warps),
            ),
            (_copy, (x_of, wide_of, narrow_of, ring, row_blocks, blocks, sizes, config)),
        ],
        [1],
        [_COPYING_REGISTERS],
    )


@gluon.jit
def _copy(
    x_of, wide_of, narrow_of, ring, row_blocks, blocks, sizes: gl.constexpr, config: gl.constexpr
):
    """Producer: copies all operand blocks of the result's blocks, zero outside the arrays."""
    second: gl.constexpr = WIDE // 2 if sizes.is_gated else WIDE
    columns: gl.constexpr = config.columns * (2 if sizes.is_gated else 1)
    count: gl.constexpr = (config.rows + columns) * config.depth * 2
    done = 0
    for number in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row = number % row_blocks * config.rows
        column = number // row_blocks * config.columns
        for at in range(0, sizes.K, config.depth):
            slot = done % config.stages
            mbarrier.wait(ring.free.index(slot), ((done // config.stages) & 1) ^ 1)
            full = ring.full.index(slot)
            mbarrier.expect(full, count)
            copy_tile(x_of, [row, at], full, ring.rows.index(slot))
            if sizes.is_gated:
                copy_tile(wide_of, [0, column, at], full, ring.wide.index(slot))
                copy_tile(narrow_of, [0, column + second, at], full, ring.narrow.index(slot))
            else:
                copy_tile(wide_of, [column, at], full, ring.wide.index(slot))
            if narrow_of is not None and not sizes.is_gated:
                copy_tile(narrow_of, [column + second, at], full, ring.narrow.index(slot))
            done += 1


@gluon.jit
def _multiply(
    ring,
    args,
    num_rows,
    row_blocks,
    blocks,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    warps: gl.constexpr,
):
    """Consumer: accumulates the blocks of the ring, applies the epilogue and stores."""
    rows: gl.constexpr = config.rows
    is_half: gl.constexpr = sizes.is_gated or config.columns == WIDE
    second: gl.constexpr = WIDE // 2 if is_half else WIDE
    of_row = gl.program_id(0) % row_blocks * rows
    scale = of_row
    if squares.count > 0:  # overlaps with the first copies
        scale = norm_scale(args, of_row, num_rows, sizes, squares, rows, warps)
    done = 0
    for number in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row = number % row_blocks * rows
        column = number // row_blocks * config.columns
        if squares.count > 0:
            if row != of_row:
                scale = norm_scale(args, row, num_rows, sizes, squares, rows, warps)
            of_row = row
        if ring.narrow is not None:
            sums, more, done = accumulate_pair(ring, done, sizes, config, warps)
        else:
            sums, more, done = accumulate_segmented(ring, done, sizes, config, warps)
        store_tile(sums, scale, None, args, row, column, num_rows, sizes, squares, warps)
        store_tile(more, scale, None, args, row, column + second, num_rows, sizes, squares, warps)


@gluon.jit
def store_tile(
    acc,
    scale,
    early,
    args,
    first_row,
    first_column,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    warps: gl.constexpr,
):
    """Applies the epilogue, and stores the result with the inputs of the next norm.

    `early` is the result of `load_added`; None: it is called here.
    """
    N: gl.constexpr = sizes.N
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1]
    columns: gl.constexpr = width // 2 if sizes.is_gated else width
    layout: gl.constexpr = acc.type.layout
    if squares.count > 0:
        acc = acc * gl.convert_layout(scale, gl.SliceLayout(1, layout))[:, None]
    if sizes.is_biased:
        lane = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
        output = first_column + lane % columns
        bias = gl.load(args.bias + output + lane // columns * N, mask=output < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    activation: gl.constexpr = sizes.activation
    if sizes.is_gated:
        gate, up = gl.split(gl.permute(gl.reshape(acc, (rows, 2, columns)), (0, 2, 1)))
        inner = gate
        if activation.kind == "gelu_tanh":  # as in `activation.act_and_mul`
            inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
        if activation.kind == "scaled_silu":
            gate = gate * activation.alpha
            inner = gate
        acc = gate / (1.0 + gl.exp2(-inner * _LOG2_E)) * up
        if activation.kind == "scaled_silu":
            acc = acc * activation.factor
    elif activation.kind == "relu2":
        acc = gl.where(acc < 0.0, 0.0, acc)
        acc = acc * acc
    if sizes.factor != 1.0:
        acc = acc * sizes.factor
    lines: gl.constexpr = _lines_layout(columns, warps)
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, lines))
    column = first_column + gl.arange(0, columns, layout=gl.SliceLayout(0, lines))
    is_row, is_column = row < num_rows, column < N
    is_inside = is_row[:, None] & is_column[None, :]
    place = row.to(gl.int64)[:, None] * N + column[None, :]
    if early is None:
        early = load_added(args, first_row, first_column, num_rows, rows, columns, sizes, warps)
    added, norm = early
    if sizes.is_added:
        acc += gl.convert_layout(added, acc.type.layout).to(gl.float32)
    out = gl.convert_layout(acc.to(args.out.dtype.element_ty), lines)
    gl.store(args.out + place, out, mask=is_inside)
    if sizes.is_scaled:
        read = (out.to(gl.float32) * norm[None, :]).to(out.dtype)
        gl.store(args.scaled + place, read, mask=is_inside)
    if sizes.is_added:
        parts: gl.constexpr = columns // squares.length
        chunks: gl.constexpr = (N + squares.length - 1) // squares.length
        terms = out.to(gl.float32)
        terms = gl.where(is_column[None, :], terms * terms, 0.0)
        terms = gl.reshape(terms, (rows * parts, squares.length))
        of_parts: gl.constexpr = gl.BlockedLayout([1, parts], [32, 1], [warps, 1], [1, 0])
        sums = gl.reshape(_add_up(terms, squares.digits), (rows, parts))
        row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, of_parts))
        part = gl.arange(0, parts, layout=gl.SliceLayout(0, of_parts))
        part += first_column // squares.length
        at = args.sums + row.to(gl.int64)[:, None] * chunks + part[None, :]
        is_part = (row < num_rows)[:, None] & (part < chunks)[None, :]
        gl.store(at, gl.convert_layout(sums, of_parts), mask=is_part)


@gluon.jit
def load_added(
    args,
    first_row,
    first_column,
    num_rows,
    rows: gl.constexpr,
    columns: gl.constexpr,
    sizes: gl.constexpr,
    warps: gl.constexpr,
):
    """Loads the residual of a tile and the scale of the next norm, if there are any."""
    N: gl.constexpr = sizes.N
    lines: gl.constexpr = _lines_layout(columns, warps)
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, lines))
    column = first_column + gl.arange(0, columns, layout=gl.SliceLayout(0, lines))
    added, norm = row, column
    if sizes.is_added:
        place = row.to(gl.int64)[:, None] * N + column[None, :]
        is_inside = (row < num_rows)[:, None] & (column < N)[None, :]
        added = gl.load(args.added + place, mask=is_inside, other=0.0)
    if sizes.is_scaled:
        norm = gl.load(args.norm + column, mask=column < N, other=0.0)
    return added, norm


@gluon.jit
def norm_scale(
    args,
    first_row,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
):
    """Computes the norm scale of each row."""
    layout: gl.constexpr = _squares_layout(squares.spread, warps)
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    chunk = gl.arange(0, squares.spread, layout=gl.SliceLayout(0, layout))
    at = args.squares + row.to(gl.int64)[:, None] * squares.count + chunk[None, :]
    is_one = (row < num_rows)[:, None] & (chunk < squares.count)[None, :]
    total = _add_up(gl.load(at, mask=is_one, other=0.0), squares.digits_of_chunks)
    return gl.rsqrt(total * (1.0 / sizes.K) + args.eps)


@gluon.jit
def _add_up(terms, digits: gl.constexpr):
    """Same as `sum_of_squares.add_up`."""
    largest = gl.max(terms, 1).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(largest >> 23, digits + 1), 254)
    unit = ((digits + 254 - exponent) << 23).to(gl.float32, bitcast=True)
    units = gl.floor(terms * unit[:, None] + 0.5).to(gl.int32)
    return gl.sum(units, 1).to(gl.float32) * ((exponent - digits) << 23).to(
        gl.float32, bitcast=True
    )


@gluon.constexpr_function
def _lines_layout(columns, warps):
    """Returns the layout in which warps store rows, eight elements per thread."""
    threads = columns // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.constexpr_function
def _squares_layout(chunks, warps):
    """Returns the layout in which warps load rows of squares, up to four per thread."""
    each = min(chunks, 4)
    threads = min(chunks // each, 8)
    return gl.BlockedLayout([1, each], [32 // threads, threads], [warps, 1], [1, 0])
