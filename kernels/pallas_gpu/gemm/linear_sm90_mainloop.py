"""Main loop of the WGMMA GEMM: multistage pipeline of TMA copies (Pallas, Mosaic GPU).

One producer warpgroup copies blocks of rows and weight into a ring in shared memory, ahead of the
consumer warpgroups. mbarriers synchronise the two sides.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas_gpu.gemm.linear_epilogue import PARTS, WIDE
from kernels.pallas_gpu.gemm.ptx import LAYOUT, multiplied_sum
from kernels.tiles import LinearTiles
from shared.models.activation import Activation
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from shared.spec.reduction_order import SquaresOrder

WARPS = 4
"""Warps of a warpgroup."""
MOST_SUMS = 64 * 32
"""Maximum sums of finished segments in the registers of a warp: 64 of a thread."""
LINE_BYTES, LINES = 128, 8
"""Bytes of a shared-memory line, and lines of a swizzle group.

Blocks are stored in lines, swizzled within each group, so that WGMMA reads all banks at once. A
descriptor counts such groups.
"""


@dataclass(frozen=True, kw_only=True)
class GemmTileWork:
    """Problem size and tile config.

    Attributes:
      operands, results: Their names, in order.
      outputs, first, is_gated, activation, factor, eps, order: Same as for `product`.
      row_blocks, blocks: Row blocks of the result, and blocks in all.
      steps: Steps along the inputs, a multiple of the segments.
      segments: Segments of the inputs, see `LinearOrder`.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    outputs: int
    first: int
    is_gated: bool
    activation: Activation
    factor: float
    eps: float
    order: SquaresOrder
    row_blocks: int
    blocks: int
    steps: int
    segments: int
    tiles: LinearTiles

    @property
    def segment_steps(self) -> int:
        """Returns the steps along the inputs of a segment."""
        return self.steps // self.segments

    @property
    def stores_sums(self) -> bool:
        """Returns whether shared memory has half of the sums of finished segments."""
        sums = self.tiles.rows * self.tiles.columns
        return self.segments > 1 and not self.tiles.swapped and sums > MOST_SUMS * self.tiles.warps

    @property
    def groups(self) -> int:
        """Returns the number of consumer warpgroups."""
        return self.tiles.warps // WARPS

    @property
    def weights(self) -> int:
        """Returns the weight blocks per result block: 2 for gate and up, else 1."""
        return 2 if self.is_gated else 1

    @property
    def is_quantised(self) -> bool:
        """Returns whether rows and weights are quantised (W8A8)."""
        return "row_scales" in self.operands

    @property
    def is_normed(self) -> bool:
        """Returns whether each row has a norm scale."""
        return "scale" in self.operands or self.has_squares

    @property
    def has_squares(self) -> bool:
        """Returns whether norm scales are computed from sums of squares."""
        return "squares" in self.operands

    @property
    def is_biased(self) -> bool:
        """Returns whether there is a bias."""
        return "bias" in self.operands

    @property
    def is_added(self) -> bool:
        """Returns whether a residual is added."""
        return "added" in self.operands


class GemmRefs(NamedTuple):
    """References of a program in global memory; None if absent."""

    x: Any
    weights: Any
    layer: Any
    out: Any
    scales: Any = None
    row_scales: Any = None
    scale: Any = None
    squares: Any = None
    bias: Any = None
    added: Any = None
    norms: Any = None
    norm_layer: Any = None
    asks: Any = None
    temperature: Any = None
    tokens: Any = None
    scaled: Any = None
    sums: Any = None
    keys: Any = None
    ids: Any = None
    bad: Any = None
    peaks: Any = None
    masses: Any = None


class GemmBuffers(NamedTuple):
    """Shared memory of a program.

    Attributes:
      rows, weight: Rings of blocks; blocks of gate and up are consecutive.
      parts: Parts of the result, per warpgroup.
      full, free: Barriers of the rings: a block is loaded, and all consumers have used it.
      loaded: Barriers of the parts: the residual is loaded.
      squares: Sums of squares of rows, for swap-AB tiles.
      finished: Sums of finished segments in the right half of the columns, per warpgroup.
    """

    rows: Any
    weight: Any
    parts: Any
    full: Any
    free: Any
    loaded: Any
    squares: Any = None
    finished: Any = None


def ring_of(work, dtype, out_type):
    """Returns the shared-memory types of a program."""
    tiles = work.tiles

    def block(shape, dtype):
        line = min(LINE_BYTES // dtype.itemsize, shape[-1])
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(line * dtype.itemsize)
        return plgpu.SMEM(shape, dtype, transforms=layout)

    # 96 columns are three half lines.
    line, more = math.gcd(tiles.columns, LINE_BYTES // out_type.itemsize), {}
    if work.stores_sums:
        line //= 2  # half lines leave space for the sums
        half = work.groups, tiles.rows // work.groups, tiles.columns // 2
        more["finished"] = block(half, np.dtype(np.float32))
    parts = block((work.groups, PARTS, WIDE, line), out_type)
    if tiles.swapped:
        parts = plgpu.SMEM((PARTS, tiles.rows, tiles.columns), out_type)
        more["squares"] = plgpu.SMEM((tiles.rows,), jnp.float32)
    return GemmBuffers(
        rows=block((tiles.stages, tiles.rows, tiles.depth), dtype),
        weight=block((tiles.stages, work.weights * tiles.columns, tiles.depth), dtype),
        parts=parts,
        full=plgpu.Barrier(num_arrivals=1 + work.weights, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_arrivals=work.groups, num_barriers=tiles.stages),
        loaded=plgpu.Barrier(num_barriers=work.groups * PARTS),
        **more,
    )


def copy_blocks(x_ref, weight_ref, shared, work, done, row, column):
    """Producer: copies the operand blocks of one result block; out-of-bounds elements are zero."""
    tiles = work.tiles

    def copy(k, _):
        slot, at = lax.rem(done + k, tiles.stages), pl.ds(k * tiles.depth, tiles.depth)

        @pl.when(done + k >= tiles.stages)
        def _wait():
            plgpu.barrier_wait(shared.free.at[slot])

        full = shared.full.at[slot]
        rows = x_ref.at[pl.ds(row, tiles.rows), at]
        plgpu.copy_gmem_to_smem(rows, shared.rows.at[slot], full)
        for number in range(work.weights):
            # The last block of the gate extends into rows of up; their columns are never stored.
            first = work.first + number * work.outputs + column
            weight = weight_ref.at[pl.ds(first, tiles.columns), at]
            to = shared.weight.at[slot, pl.ds(number * tiles.columns, tiles.columns)]
            plgpu.copy_gmem_to_smem(weight, to, full)

    lax.fori_loop(0, work.steps, copy, None)


def sums_of(shared, work, group, done):
    """Consumer: multiplies a warpgroup's rows with the weight blocks, or transposed for swap-AB."""
    steps, columns = work.segment_steps, work.tiles.columns
    if work.stores_sums:
        return [sums_of_halves(shared, work, group, done)]
    sums = _sums_of_segment(shared, work, group, done)
    for segment in range(1, work.segments):
        sums = sums + _sums_of_segment(shared, work, group, done + segment * steps)
    if work.tiles.swapped:
        return [sums]
    return [sums[:, i * columns : (i + 1) * columns] for i in range(work.weights)]


def sums_of_halves(shared, work, group, done):
    """Adds segments; finished sums are half in registers and half in shared memory.

    The chain of a segment starts at zero, so its sums are never -0 and may be added to zero.
    """
    finished_ref, line = shared.finished.at[group], LINE_BYTES // 4
    half = finished_ref.shape[1]

    def add(segment, left):
        sums = _sums_of_segment(shared, work, group, done + segment * work.segment_steps)
        left = left + sums[:, :half]
        for at in range(0, half, line):  # registers hold a line at a time
            part_ref = finished_ref.at[:, pl.ds(at, line)]
            right = sums[:, half + at : half + at + line]
            part_ref[...] = plgpu.load(part_ref, layout=LAYOUT) + right
        return left

    nothing = plgpu.layout_cast(jnp.zeros(finished_ref.shape, jnp.float32), LAYOUT)
    finished_ref[...] = nothing
    left = lax.fori_loop(0, work.segments, add, nothing)
    return lax.concatenate([left, plgpu.load(finished_ref, layout=LAYOUT)], 1)


def _sums_of_segment(shared, work, group, done):
    """Accumulates the blocks of a segment from zero, of all weights side by side."""
    tiles, steps = work.tiles, work.segment_steps
    rows = tiles.rows // work.groups
    shape = (rows, shared.weight.shape[1])

    def add_all(sums_ref):
        def add(k, _):
            slot = lax.rem(done + k, tiles.stages)
            plgpu.barrier_wait(shared.full.at[slot])
            sides = shared.rows.at[slot, pl.ds(group * rows, rows)], shared.weight.at[slot]
            wide, narrow = sides[::-1] if tiles.swapped else sides
            plgpu.wgmma(sums_ref, wide, narrow.transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)  # the previous product is complete
            def _free():
                plgpu.barrier_arrive(shared.free.at[lax.rem(done + k - 1, tiles.stages)])

        lax.fori_loop(0, steps, add, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.free.at[lax.rem(done + steps - 1, tiles.stages)])
        return sums_ref[...]

    return pl.run_scoped(add_all, plgpu.ACC(shape[::-1] if tiles.swapped else shape, jnp.float32))


def sums_of_codes(refs, shared, work, group, done, row, column):
    """Same as `sums_of`, for FP8: each block is accumulated from zero, then scaled."""
    (tiles, steps), layer = (work.tiles, work.segment_steps), refs.layer[0]
    shape = (tiles.rows // work.groups, tiles.columns)
    outputs = [work.first + i * work.outputs + column for i in range(work.weights)]

    def scales_at(k):
        k = jnp.minimum(k, work.steps - 1)
        at = refs.row_scales.at[k, pl.ds(row, shape[0])]
        of_rows = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return [of_rows * refs.scales[layer, lax.div(o, FP8_BLOCK), k] for o in outputs]

    def multiply(group_rows, weight, part_ref):
        plgpu.wgmma(part_ref, group_rows, weight.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return part_ref[...]

    def add(k, carried):
        sums, scales = carried
        after = scales_at(k + 1)  # loaded one step ahead to hide the latency
        slot = lax.rem(done + k, tiles.stages)
        plgpu.barrier_wait(shared.full.at[slot])

        group_rows = shared.rows.at[slot, pl.ds(group * shape[0], shape[0])]
        sums_after = []
        for i, (total, scale) in enumerate(zip(sums, scales, strict=True)):
            weight = shared.weight.at[slot, pl.ds(i * tiles.columns, tiles.columns)]
            part = pl.run_scoped(
                functools.partial(multiply, group_rows, weight), plgpu.ACC(shape, jnp.float32)
            )
            across = lax.broadcast_in_dim(scale, shape, [0])
            sums_after.append(multiplied_sum(part, across, total))
        plgpu.barrier_arrive(shared.free.at[slot])
        return sums_after, after

    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    total, scales = None, scales_at(0)
    for segment in range(work.segments):
        carried = [nothing] * work.weights, scales
        end = (segment + 1) * steps
        sums, scales = lax.fori_loop(end - steps, end, add, carried)
        total = sums if total is None else [x + y for x, y in zip(total, sums, strict=True)]
    return total
