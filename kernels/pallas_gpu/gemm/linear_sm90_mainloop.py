"""The ring of blocks that a product of `linear_described` multiplies, for Pallas by Mosaic GPU.

One warpgroup copies blocks of the rows and of the weight into shared memory, ahead of the others,
which multiply them; barriers tell each side how far the other is.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas_gpu.gemm.linear_epilogue import PARTS, WIDE
from kernels.pallas_gpu.gemm.ptx import multiplied_sum
from kernels.tiles import LinearTiles
from shared.models.fp8_packing import FP8_BLOCK
from shared.spec.reduction_order import SquaresOrder

WARPS = 4
"""Of a warpgroup."""
LINE_BYTES, LINES = 128, 8
"""Blocks lie in shared memory in lines of so many bytes, and the pieces of lines are exchanged
within so many lines, so that the matrix units read all banks at once. A descriptor counts such
groups of lines."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is multiplied, and how it is cut.

    Attributes:
      operands, results: Their names, in order.
      outputs, first, is_gated, factor, eps, order: As of `product`.
      row_blocks, blocks: Blocks of the result in a column, and in all.
      steps: Along the inputs.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    outputs: int
    first: int
    is_gated: bool
    factor: float
    eps: float
    order: SquaresOrder
    row_blocks: int
    blocks: int
    steps: int
    tiles: LinearTiles

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return self.tiles.warps // WARPS

    @property
    def weights(self) -> int:
        """Blocks of the weight that belong to one of the result: a gate's, and that of up."""
        return 2 if self.is_gated else 1

    @property
    def is_quantised(self) -> bool:
        """Whether rows and weights are codes of FP8."""
        return "row_scales" in self.operands

    @property
    def is_normed(self) -> bool:
        """Whether each row has a scale."""
        return "scale" in self.operands or self.has_squares

    @property
    def has_squares(self) -> bool:
        """Whether these scales are found from squares."""
        return "squares" in self.operands

    @property
    def is_biased(self) -> bool:
        """Whether there is a bias."""
        return "bias" in self.operands

    @property
    def is_added(self) -> bool:
        """Whether something is added."""
        return "added" in self.operands


class Refs(NamedTuple):
    """What a program reads and writes in the GPU's memory; None for what is not there."""

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
    warmth: Any = None
    tokens: Any = None
    scaled: Any = None
    sums: Any = None
    keys: Any = None
    ids: Any = None
    bad: Any = None
    peaks: Any = None
    masses: Any = None


class Shared(NamedTuple):
    """What a program has in shared memory.

    Attributes:
      rows, weight: Rings of blocks; those of gate and up stand one below the other.
      parts: Of the result, for each warpgroup.
      full, free: Barriers of the rings: a block has come, and all have multiplied it.
      come: Barriers of the parts: what is added has come.
      squares: Of rows, where tiles are swapped.
    """

    rows: Any
    weight: Any
    parts: Any
    full: Any
    free: Any
    come: Any
    squares: Any = None


def ring_of(work, dtype, out_type):
    """The shared memory of a program."""
    tiles = work.tiles

    def block(shape, dtype):
        line = min(LINE_BYTES // dtype.itemsize, shape[-1])
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(line * dtype.itemsize)
        return plgpu.SMEM(shape, dtype, transforms=layout)

    # 96 columns are three lines of half the bytes.
    line = math.gcd(tiles.columns, LINE_BYTES // out_type.itemsize)
    parts, more = block((work.groups, PARTS, WIDE, line), out_type), {}
    if tiles.swapped:
        parts = plgpu.SMEM((PARTS, tiles.rows, tiles.columns), out_type)
        more["squares"] = plgpu.SMEM((tiles.rows,), jnp.float32)
    return Shared(
        rows=block((tiles.stages, tiles.rows, tiles.depth), dtype),
        weight=block((tiles.stages, work.weights * tiles.columns, tiles.depth), dtype),
        parts=parts,
        full=plgpu.Barrier(num_arrivals=1 + work.weights, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_arrivals=work.groups, num_barriers=tiles.stages),
        come=plgpu.Barrier(num_barriers=work.groups * PARTS),
        **more,
    )


def copy_blocks(x_ref, weight_ref, shared, work, done, row, column):
    """Copies all that a block of the result is the product of; what lies outside is zero."""
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
            # A last block of the gate goes on with rows of up, whose columns nothing stores.
            first = work.first + number * work.outputs + column
            weight = weight_ref.at[pl.ds(first, tiles.columns), at]
            to = shared.weight.at[slot, pl.ds(number * tiles.columns, tiles.columns)]
            plgpu.copy_gmem_to_smem(weight, to, full)

    lax.fori_loop(0, work.steps, copy, None)


def sums_of(shared, work, group, done):
    """The product of a warpgroup's rows with the blocks of the weight, or its transposed."""
    tiles = work.tiles
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

            @pl.when(k > 0)  # the product before this one is done
            def _free():
                plgpu.barrier_arrive(shared.free.at[lax.rem(done + k - 1, tiles.stages)])

        lax.fori_loop(0, work.steps, add, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.free.at[lax.rem(done + work.steps - 1, tiles.stages)])
        sums, columns = sums_ref[...], tiles.columns
        if tiles.swapped:
            return [sums]
        return [sums[:, i * columns : (i + 1) * columns] for i in range(work.weights)]

    return pl.run_scoped(add_all, plgpu.ACC(shape[::-1] if tiles.swapped else shape, jnp.float32))


def sums_of_codes(refs, shared, work, group, done, row, column):
    """As `sums_of`, of codes: those of a block are added from zero, and times both scales."""
    tiles, layer = work.tiles, refs.layer[0]
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
        after = scales_at(k + 1)  # asked for a step ahead: they come from memory
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
    carried = [nothing] * work.weights, scales_at(0)
    return lax.fori_loop(0, work.steps, add, carried)[0]
