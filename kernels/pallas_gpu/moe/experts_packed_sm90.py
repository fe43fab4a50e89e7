"""WGMMA GEMMs of experts with packed FP8 or MXFP4 weights (Pallas, Mosaic GPU).

A program has a tile of slots and `WIDE` outputs of its expert: 32 of the gate and the same of up,
or 64 of down. Outputs are the wide side of the tensor core, slots the narrow one. Without expert
blocks a tile has one slot, and the product has the neighbours of its row too, which are dropped.

Accumulation is one chain along the inputs, a weight is dequantised as by `block_loaders`, and the
epilogue computes as in `experts`, so the bits equal those kernels' and Triton's.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from kernels.pallas_gpu.gemm.linear_epilogue import WIDE, activated, scales_of
from kernels.pallas_gpu.gemm.linear_sm90 import has_mosaic
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import LINE_BYTES, LINES
from kernels.pallas_gpu.gemm.moe_gemm_tiles import ExpertWeights
from kernels.pallas_gpu.gemm.ptx import LAYOUT, sum_of
from kernels.pallas_gpu.moe.experts_packed_sm90_mainloop import (
    FORMATS,
    FP8,
    GROUP,
    LEAST_DEPTH,
    PackedExpertsBuffers,
    PackedExpertsWork,
    copy_blocks,
    packed_block,
    sums_of,
)
from kernels.pallas_gpu.moe.moe_align import ExpertBlocks
from kernels.tiles import ExpertsTiles
from shared.models.activation import Activation
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, shares_of
from shared.spec.reduction_order import SquaresOrder

_SCALE_ROWS = 16
"""Multiple of the rows of `scales_of`."""


class PackedExpertsRefs(NamedTuple):
    """References of a program in global memory; None if absent."""

    x: Any
    weights: Any
    scales: Any
    layer: Any
    ids: Any
    out: Any
    bias: Any = None
    norms: Any = None
    experts: Any = None
    counts: Any = None
    slots: Any = None


def takes(
    x: Float[jax.Array, "R hidden"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    formats: tuple[str, str],
    squares: Float[jax.Array, "R chunks"] | None,
    activation: Activation,
    is_adapted: bool,
    tiles: ExpertsTiles,
) -> bool:
    """Returns whether the functions below support a block: experts of one rank with a gate.

    They are MXFP4, or FP8 with scales of blocks. The rows of the inner columns are those of tiles,
    so another rank could not gather them.
    """
    if not tiles.copies_packed or is_adapted or not has_mosaic():
        return False
    format, *others = formats
    if format not in FORMATS or others != [format]:
        return False
    if format == FP8 and not all(map(_has_block_scales, (gate_up, down))):
        return False
    hidden, inner = x.shape[1], down.weights.shape[3] * FORMATS[format]
    depths = (hidden, tiles.depth), (inner, tiles.down_depth)
    is_whole = all(depth % packed_block(format, inputs) == 0 for inputs, depth in depths)
    is_whole &= min(tiles.depth, tiles.down_depth) >= LEAST_DEPTH
    # A rank of several has a share of the outputs of down.
    is_whole &= hidden % WIDE == 0 and down.weights.shape[2] == hidden
    # A copy of rows has whole lines of the inner columns.
    is_whole &= gate_up.weights.shape[2] % (2 * WIDE) == 0
    is_small = tiles.slots <= 32 if tiles.grouped else len(x) < LINES
    is_gated = squares is not None and activation.is_gated
    return is_whole and is_small and is_gated and x.dtype == jnp.bfloat16


def _has_block_scales(stored):
    """Returns whether FP8 scales are bfloat16, one for each block of outputs and inputs."""
    of_outputs, scales_in = shares_of(stored.weights.shape, stored.scales.shape)
    inputs = stored.weights.shape[3] * FORMATS[FP8]
    is_block = of_outputs == FP8_BLOCK and scales_in == inputs // FP8_BLOCK
    return is_block and stored.scales.dtype == jnp.bfloat16


def outputs_of_slots(
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    ids: Int[jax.Array, "R slots"],
    expert_blocks: ExpertBlocks | None,
    layer: Int[jax.Array, ""],
    *,
    eps: float,
    activation: Activation,
    squares_order: SquaresOrder,
    format: str,
    tiles: ExpertsTiles,
) -> Float[jax.Array, "all_slots hidden"]:
    """Computes the output of its expert for every slot; for the arguments see `experts`."""
    how = {"ids": ids, "expert_blocks": expert_blocks, "layer": layer}
    how |= {"format": format, "tiles": tiles}
    of_rows = {"eps": eps, "activation": activation, "squares_order": squares_order}
    inner = act_and_mul_linear(scaled, squares, gate_up, **of_rows, **how)
    return linear(inner, down, **how)


def act_and_mul_linear(
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"],
    gate_up: ExpertWeights,
    ids: Int[jax.Array, "R slots"],
    expert_blocks: ExpertBlocks | None,
    layer: Int[jax.Array, ""],
    *,
    eps: float,
    activation: Activation,
    squares_order: SquaresOrder,
    format: str,
    tiles: ExpertsTiles,
) -> Float[jax.Array, "all_slots inner"]:
    """Same as `experts.act_and_mul_linear`; with expert blocks, the result has their lanes."""
    (R, hidden), slots = scaled.shape, ids.shape[1]
    count = -(-max(R, tiles.slots) // _SCALE_ROWS) * _SCALE_ROWS
    operands = {"x": scaled, "norms": scales_of(squares, count, hidden, eps, squares_order)}
    has_all = tiles.slots >= R and whole_lines(R) == R
    if expert_blocks is not None and not has_all:
        row = lanes_of(expert_blocks, tiles.slots).reshape(-1) // slots
        operands = {name: x[row] for name, x in operands.items()}
    return _product(
        operands,
        gate_up,
        ids,
        expert_blocks,
        layer,
        rows_of=slots,
        has_all_rows=has_all,
        activation=activation,
        format=format,
        tiles=tiles,
    )


def linear(
    inner: Float[jax.Array, "all_slots inner"],
    down: ExpertWeights,
    ids: Int[jax.Array, "R slots"],
    expert_blocks: ExpertBlocks | None,
    layer: Int[jax.Array, ""],
    *,
    format: str,
    tiles: ExpertsTiles,
) -> Float[jax.Array, "all_slots hidden"]:
    """Computes the down GEMM of every slot, from the result of `act_and_mul_linear`."""
    return _product(
        {"x": inner},
        down,
        ids,
        expert_blocks,
        layer,
        rows_of=1,
        has_all_rows=False,
        activation=None,
        format=format,
        tiles=tiles,
    )


def lanes_of(expert_blocks: ExpertBlocks, lanes: int) -> Int[jax.Array, "tiles lanes"]:
    """Returns the slots of each tile; those of lanes without one are arbitrary, but in bounds."""
    stored, rows = expert_blocks.slots.shape
    first, lane = expert_blocks.firsts[:, None], jnp.arange(lanes)[None, :]
    has_slot = lane < expert_blocks.counts[:, None]
    place = jnp.where(has_slot, first + lane, 0)
    slots = expert_blocks.slots.reshape(stored * rows)
    return jnp.where(has_slot, slots[jnp.clip(place, 0, stored * rows - 1)], 0)


def whole_lines(rows: int) -> int:
    """Returns a number of rows that a TMA descriptor supports: whole groups of lines, or less."""
    return rows if rows < LINES else -(-rows // LINES) * LINES


# Jitted so that a program contains it once for all layers, as `linear_sm90`.
@functools.partial(
    jax.jit, static_argnames=("rows_of", "has_all_rows", "activation", "format", "tiles")
)
def _product(
    operands,
    stored,
    ids,
    expert_blocks,
    layer,
    *,
    rows_of,
    has_all_rows,
    activation,
    format,
    tiles,
):
    """Multiplies the rows of all tiles with their experts; without an activation for down."""
    is_gated, is_grouped = activation is not None, expert_blocks is not None
    (R, slots), (layers, experts, outputs, words) = ids.shape, stored.weights.shape
    outputs //= 2 if is_gated else 1
    scales = stored.scales
    if format != FP8:
        # Scales of consecutive outputs are consecutive bytes, which one copy reads.
        scales = scales.reshape(layers, experts, -1)
    operands |= {"weights": stored.weights, "scales": scales, "layer": layer.reshape(1)}
    operands["ids"] = ids
    if is_grouped:
        operands |= {"experts": expert_blocks.experts, "counts": expert_blocks.counts}
        operands["slots"] = lanes_of(expert_blocks, tiles.slots)
    if stored.bias is not None:
        operands["bias"] = stored.bias
    num_tiles = len(expert_blocks.counts) if is_grouped else R * slots
    work = PackedExpertsWork(
        operands=tuple(operands),
        format=format,
        inputs=words * FORMATS[format],
        outputs=outputs,
        columns=WIDE // (2 if is_gated else 1),
        is_gated=is_gated,
        lanes=tiles.slots if is_grouped else LINES,
        is_grouped=is_grouped,
        slots=slots,
        rows_of=rows_of,
        has_all_rows=is_grouped and has_all_rows,
        depth=tiles.depth if is_gated else tiles.down_depth,
        stages=tiles.stages if is_gated else tiles.down_stages,
        activation=activation,
        out_type=jnp.bfloat16 if is_gated else jnp.float32,
    )
    lines = R * slots
    if is_gated:
        lines = num_tiles * tiles.slots if is_grouped else whole_lines(lines)
    return plgpu.kernel(
        functools.partial(_packed_kernel, work=work),
        out_type=jax.ShapeDtypeStruct((lines, outputs), work.out_type),
        grid=(num_tiles, outputs // work.columns),
        grid_names=("tile", "column"),
        num_threads=2,
        thread_name="group",
        scratch_types={
            k: v for k, v in _buffers(work, stored.bias)._asdict().items() if v is not None
        },
        compiler_params=plgpu.CompilerParams(),
        kernel_name="experts_packed_sm90",
    )(*operands.values())


def _buffers(work, bias):
    """Returns the shared-memory types of a program."""

    def ring(rows, columns, line, dtype):
        swizzle = plgpu.SwizzleTransform(line * np.dtype(dtype).itemsize)
        layout = plgpu.TilingTransform((LINES, line)), swizzle
        return plgpu.SMEM((work.stages, rows, columns), dtype, transforms=layout)

    copies, more = WIDE // work.columns, {}
    if work.format != FP8:
        more["scales"] = plgpu.SMEM((WIDE * (work.inputs // GROUP),), jnp.uint8)
    if bias is not None:
        more["bias"] = plgpu.SMEM((WIDE,), bias.dtype)
    if more:
        more["ready"] = plgpu.Barrier(num_arrivals=copies * len(more))
    if work.is_gated:
        more["sums"] = plgpu.SMEM((WIDE + work.columns, work.lanes), jnp.float32)
    return PackedExpertsBuffers(
        rows=ring(work.lanes, work.depth, LINE_BYTES // 2, jnp.bfloat16),
        words=ring(WIDE, work.depth // work.packed, work.words, jnp.int32),
        full=plgpu.Barrier(num_arrivals=1 + copies, num_barriers=work.stages),
        free=plgpu.Barrier(num_barriers=work.stages),
        out=plgpu.SMEM((work.lanes, WIDE), work.out_type),
        **more,
    )


def _packed_kernel(*refs, work, **shared):
    """One program per tile and block of outputs."""
    *refs, out = refs
    refs = PackedExpertsRefs(out=out, **dict(zip(work.operands, refs, strict=True)))
    shared, tile = PackedExpertsBuffers(**shared), lax.axis_index("tile")
    column = lax.axis_index("column") * work.columns
    if work.is_grouped:
        expert, count = refs.experts[tile], refs.counts[tile]
    else:
        expert = refs.ids[lax.div(tile, work.slots), lax.rem(tile, work.slots)]
        count = jnp.where(expert < 0, 0, 1)

    @pl.when((lax.axis_index("group") == 1) & (count > 0))
    def _copy():
        copy_blocks(refs, shared, work, tile, expert, column)

    @pl.when((lax.axis_index("group") == 0) & (count > 0))
    def _multiply():
        norms = _norms(refs, work, tile) if work.is_gated else None
        sums = sums_of(refs, shared, work, expert, column)
        if norms is not None:
            sums = sums * norms
        if refs.bias is not None:
            bias = plgpu.load(shared.bias, layout=LAYOUT.reduce(1), optimized=False)
            bias = lax.broadcast_in_dim(bias.astype(jnp.float32), sums.shape, [0])
            sums = sum_of(sums, bias)
        if work.is_gated:
            up = _moved_up(sums, shared.sums, work.columns)
            shared.out.T[...] = activated([sums, up], work).astype(work.out_type)
        else:
            _store_turned(sums, shared.out)
        plgpu.commit_smem()
        _store(refs, shared, work, tile, column, count)
        plgpu.wait_smem_to_gmem(0)


def _norms(refs, work, tile):
    """Returns the norm scales of the slots, which are columns of the accumulators."""
    at = refs.norms.at[pl.ds(work.first_row(tile), work.lanes)]
    norms = plgpu.load(at, layout=LAYOUT.reduce(0), optimized=False)
    return lax.broadcast_in_dim(norms, (WIDE, work.lanes), [1])


def _moved_up(values, buffer, count):
    """Moves rows up by a count through shared memory; the last rows are then arbitrary."""
    kind = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=kind)
    def apply(_, values, buffer):
        values.store_untiled(mgpu.memref_slice(buffer, slice(0, WIDE)), optimized=False)
        mgpu.warpgroup_barrier()
        moved = mgpu.memref_slice(buffer, slice(count, count + WIDE))
        layout = values.layout
        return mgpu.FragmentedArray.load_untiled(moved, layout=layout, optimized=False)

    return apply(values, buffer)


def _store_turned(values, buffer):
    """Stores float32, outputs by slots, in shared memory, slots by outputs."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))
    def apply(_, values, buffer):
        values = values.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        values.store_untiled(utils.memref_transpose(buffer, (1, 0)), optimized=False)
        mgpu.warpgroup_barrier()

    apply(values, buffer)


def _store(refs, shared, work, tile, column, count):
    """Copies the result of each slot to its place in global memory."""
    columns = pl.ds(column, work.columns)
    for lane in range(work.lanes if work.is_grouped else 1):

        @pl.when(lane < count)
        def _store_slot(lane=lane):
            slot, line = tile, lax.rem(lax.div(tile, work.rows_of), LINES)
            if work.is_grouped:
                slot, line = refs.slots[tile, lane], lane
            if work.has_all_rows:
                line = lax.div(slot, work.slots)
            if work.is_grouped and work.is_gated:
                slot = tile * work.lanes + lane
            part = shared.out.at[line, pl.ds(0, work.columns)]
            plgpu.copy_smem_to_gmem(part, refs.out.at[slot, columns])
