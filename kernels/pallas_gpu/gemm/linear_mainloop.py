"""Main loop of the GEMM of `linear`: one chain along the inputs (Pallas, Triton backend).

Weights are bfloat16 or float32, packed FP8 (W8A16), or FP8 for quantised rows (W8A8).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.fp8_w8a8 import add_codes, load_codes
from kernels.pallas_gpu.gemm.fp8_w8a16 import four
from kernels.tiles import LinearTiles
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, shares_of


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


def sums_of(factors, block, is_compiled):
    """Computes the accumulators of a block, `[rows, columns]` for each weight."""
    tiles = block.tiles
    if factors.row_scales is not None:
        sums = _sums_of_codes(factors, block, is_compiled)
    elif factors.scales is not None:
        sums = _sums_of_words(factors, block, is_compiled)
    else:
        sums = _sums_of_numbers(factors, block)
    if is_compiled:
        sums[0] = let_next_start(sums[0])
    if tiles.swapped:
        sums = [x.T for x in sums]
    if len(sums) < block.weights:
        sums = list(lax.split(sums[0], (tiles.columns, tiles.columns), axis=1))
    return sums


def _sums_of_numbers(factors, block):
    tiles, K = block.tiles, factors.x.shape[1]
    is_row, is_column = block.row < block.num_rows, block.column < block.outputs
    step = lax.iota(jnp.int32, tiles.depth)

    def tile(ref, at, is_one, has_all):
        inside = (at + step)[None, :] < K
        masks = [] if has_all else [is_one[:, None]]
        masks += [] if K % tiles.depth == 0 else [inside]
        shape = (is_one.shape[0], tiles.depth)
        mask = functools.reduce(jnp.logical_and, [jnp.broadcast_to(m, shape) for m in masks], True)
        masked = {"mask": mask, "other": 0.0} if masks else {}
        return lambda *where: pltriton.load(ref.at[(*where, (at + step)[None, :])], **masked)

    def add(i, sums):
        at = i * tiles.depth
        x = tile(factors.x, at, is_row, block.has_all_rows)(block.row[:, None])
        part = tile(factors.weights, at, is_column, block.has_all_columns)
        sums_after = []
        for number, total in enumerate(sums):
            output = block.first + number * block.outputs + block.column
            weight = part(factors.layer, output[:, None])
            sums_after.append(_add_product(total, x, weight, tiles.swapped))
        return tuple(sums_after)

    nothing = (_nothing(block, tiles.columns),) * block.weights
    return list(lax.fori_loop(0, pl.cdiv(K, tiles.depth), add, nothing))


def _sums_of_words(factors, block, is_compiled):
    """Same as `sums_of`, for packed FP8; gate and up share one product to read the rows once."""
    tiles, K, layer = block.tiles, factors.x.shape[1], factors.layer
    width = block.weights * tiles.columns
    both = lax.iota(jnp.int32, width)
    in_result = block.number * tiles.columns + lax.rem(both, tiles.columns)
    output = (block.first + lax.div(both, tiles.columns) * block.outputs + in_result)[:, None]
    is_output = None if block.has_all_columns else in_result < block.outputs
    is_real = None if block.has_all_rows else block.row < block.num_rows

    def scale_at(i):
        share, _ = shares_of(factors.weights.shape, factors.scales.shape)
        at = (layer, lax.div(output, share), jnp.full(output.shape, i))
        return _load(factors.scales, at, is_output)

    only_scale = None
    if factors.scales.shape[-1] == 1:  # one scale for all inputs
        only_scale = scale_at(0)

    def add(i, total):
        lane = lax.iota(jnp.int32, FP8_BLOCK // 4)[None, :]
        words = _load(factors.weights, (layer, output, i * lane.size + lane), is_output)
        scale = scale_at(i) if only_scale is None else only_scale
        for number, weight in enumerate(four(words, scale, is_compiled)):
            at = i * FP8_BLOCK + number * lane.size + lane
            x = _load(factors.x, (block.row[:, None], at), is_real)
            total = _add_product(total, x, weight.astype(x.dtype), is_swapped=True)
        return total

    return [lax.fori_loop(0, pl.cdiv(K, tiles.depth), add, _nothing(block, width))]


def _sums_of_codes(factors, block, is_compiled):
    tiles, K, layer = block.tiles, factors.x.shape[1], factors.layer
    blocks, R = K // FP8_BLOCK, block.num_rows
    # Rows that are not read get an index outside the array, which the interpreter requires.
    at_row = jnp.where(block.row < R, block.row, R)
    is_real = None if block.has_all_rows else block.row < R
    outputs = [
        block.first + i * block.outputs + block.number * tiles.columns for i in range(block.weights)
    ]

    def scales_of(number):
        """Loads the scales of a block of the rows and of a block of each weight."""
        number = jnp.minimum(number, blocks - 1)
        of_weights = [
            pltriton.load(factors.scales.at[layer, lax.div(x, FP8_BLOCK), number]) for x in outputs
        ]
        at = (jnp.full(block.row.shape, number), block.row)
        return pltriton.load(factors.row_scales.at[at]), of_weights

    def add(i, carried):
        sums, (scale, of_weights) = carried
        for number in range(tiles.depth // FP8_BLOCK):
            number += i * (tiles.depth // FP8_BLOCK)
            after = scales_of(number + 1)  # loaded one step ahead to hide the latency
            at = (number * FP8_BLOCK + lax.iota(jnp.int32, FP8_BLOCK))[None, :]
            x = _load(factors.x, (at_row[:, None], at), is_real)
            added = []
            for total, output, of_weight in zip(sums, outputs, of_weights, strict=True):
                codes = load_codes(
                    factors.weights, layer, output, tiles.columns, number, is_compiled
                )
                both = scale * of_weight
                added.append(add_codes(total, x, codes, both, tiles.swapped, is_compiled))
            sums, (scale, of_weights) = tuple(added), after
        return sums, (scale, of_weights)

    nothing = (_nothing(block, tiles.columns),) * block.weights
    steps = pl.cdiv(K, tiles.depth)
    return list(lax.fori_loop(0, steps, add, (nothing, scales_of(0)))[0])


def _nothing(block, width):
    rows = block.row.shape[0]
    return jnp.zeros((width, rows) if block.tiles.swapped else (rows, width), jnp.float32)


def _load(ref, at, is_one):
    """Loads some rows of a reference, zero out of bounds; all are in bounds if `is_one` is None."""
    if is_one is None:
        return pltriton.load(ref.at[at])
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in at))
    other = 0 if ref.dtype == jnp.int32 else 0.0
    return pltriton.load(ref.at[at], mask=jnp.broadcast_to(is_one[:, None], shape), other=other)


def _add_product(total, x, weight, is_swapped):
    exact = {"precision": lax.Precision.HIGHEST}
    if is_swapped:  # swap-AB: outputs are the wide side of the tensor core, rows the narrow one
        return total + pltriton.dot(weight, x.T, **exact)
    return total + pltriton.dot(x, weight.T, **exact)


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
