"""Main loop of the GEMM kernels: one chain along the inputs (Pallas, Triton backend)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.block_loaders import OperandTiles, loader_of
from kernels.tiles import LinearTiles


class Factors(NamedTuple):
    """Operands: rows and a layer of stacked weights, with scales if they are FP8.

    Attributes:
      scales: Scales of stacked FP8 weights.
      row_scales: Scales of quantised rows.
      layer: Index into the stack.
    """

    x: Any
    weights: Any
    scales: Any
    row_scales: Any
    layer: Any


class ResultBlock(NamedTuple):
    """Block of the result.

    Attributes:
      number: Index of the block of outputs.
      row, column: Rows and columns of the block.
      num_rows, outputs, first: Problem size.
      weights: 2 with a gate, else 1.
    """

    number: Any
    row: Any
    column: Any
    num_rows: int
    outputs: int
    first: int
    weights: int
    tiles: LinearTiles

    @property
    def has_all_rows(self) -> bool:
        """Returns whether every block of rows is full."""
        return self.num_rows % self.row.shape[0] == 0

    @property
    def has_all_columns(self) -> bool:
        """Returns whether every block of outputs is full."""
        return self.outputs % self.tiles.columns == 0

    def first_of(self, weight: int) -> Any:
        """Returns the first output of the block, of the gate or of up."""
        return self.first + weight * self.outputs + self.number * self.tiles.columns

    def column_of(self, weight: int) -> Any:
        """Returns the outputs of the block, a column."""
        return (self.first + weight * self.outputs + self.column)[:, None]


def sums_of(factors, block, is_compiled):
    """Computes the accumulators of a block, `[rows, columns]` for each weight."""
    tiles, rows = block.tiles, block.row.shape[0]
    tile = _tile_of(factors, block)
    shape = (tile.columns, rows) if tiles.swapped else (rows, tile.columns)
    loader = loader_of(tile, tiles.depth, is_compiled)
    steps = pl.cdiv(factors.x.shape[1], tiles.depth)
    sums = accumulate(loader, shape, len(tile.outputs), steps, tiles.swapped)
    if is_compiled:
        sums[0] = let_next_start(sums[0])
    if tiles.swapped:
        sums = [x.T for x in sums]
    if len(sums) < block.weights:
        sums = list(lax.split(sums[0], (tiles.columns, tiles.columns), axis=1))
    return sums


def accumulate(loader, shape, count, steps, is_swapped):
    """Adds the products of all blocks of a tile, for every weight format.

    Args:
      loader: Block loader of the format.
      shape, count: Shape and number of the accumulators.
      steps: Steps along the inputs.
      is_swapped: Whether the operands are swapped (swap-AB).
    """

    def add(step, state):
        sums, carried = state
        for number in loader.blocks(step):
            after = loader.after(number)
            for x, weights in loader.parts(number, carried):
                pairs = zip(sums, weights, strict=True)
                sums = tuple(loader.add(total, x, weight, is_swapped) for total, weight in pairs)
            carried = after
        return sums, carried

    nothing = (jnp.zeros(shape, jnp.float32),) * count
    return list(lax.fori_loop(0, steps, add, (nothing, loader.start()))[0])


def _tile_of(factors, block):
    """Returns the tile of a block as its loader reads it."""
    tiles, row, is_row, is_output = block.tiles, block.row, None, None
    columns = tiles.columns
    if factors.row_scales is not None:  # outputs are whole blocks
        # Rows that are not read get an index outside the array, which the interpreter requires.
        row = jnp.where(row < block.num_rows, row, block.num_rows)
        is_row = None if block.has_all_rows else block.row < block.num_rows
        outputs = [functools.partial(block.first_of, i) for i in range(block.weights)]
    elif factors.scales is not None:  # gate and up share one product, to read the rows once
        columns *= block.weights
        both = lax.iota(jnp.int32, columns)
        in_result = block.number * tiles.columns + lax.rem(both, tiles.columns)
        output = (block.first + lax.div(both, tiles.columns) * block.outputs + in_result)[:, None]
        outputs = [lambda: output]
        is_output = None if block.has_all_columns else in_result < block.outputs
        is_row = None if block.has_all_rows else block.row < block.num_rows
    else:
        is_row, is_output = block.row < block.num_rows, block.column < block.outputs
        outputs = [functools.partial(block.column_of, i) for i in range(block.weights)]
    return OperandTiles(
        x=factors.x,
        row_scales=factors.row_scales,
        weights=factors.weights,
        scales=factors.scales,
        stack=(factors.layer,),
        row=row,
        scale_row=block.row,
        outputs=outputs,
        columns=columns,
        is_row=is_row,
        is_output=is_output,
        has_all_rows=block.has_all_rows,
        has_all_outputs=block.has_all_columns,
        loads_weight_first=factors.scales is not None,
    )


def let_next_start(x):
    """Lets the next kernel launch early; every kernel waits for the previous ones anyway.

    The assembly counts as free of side effects, so a needed value must pass through it.
    """
    kind = "f" if x.dtype == jnp.float32 else "r"
    (same,) = pltriton.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[x],
        constraints=f"={kind},{kind}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return same
