"""Tile of the GEMM kernel: its place, its epilogue, and its stores (Pallas, Triton backend)."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.collectives.all_gather import GatherTile, all_gather_tiles
from kernels.pallas_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.pallas_gpu.gemm.linear_launch import GemmTiling
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, load_squares
from kernels.pallas_gpu.sampling.lm_head_epilogue import store_partials

_FEW_ROWS = 32
"""Rows of a tile that loads epilogue inputs before the main loop."""


class Tile(NamedTuple):
    """Tile of the result.

    Attributes:
      layer: Index of the layer in the stacks.
      block: Index of the block of outputs.
      row, column, is_row, is_column: Rows and columns, and masks of those in bounds.
      at_row, at_column: Rows and columns; those that are not stored have an index outside the
        array, which the interpreter requires.
      at, is_inside: Index of the elements, and the mask of those in bounds.
    """

    layer: Any
    block: Any
    row: Any
    column: Any
    is_row: Any
    is_column: Any
    at_row: Any
    at_column: Any
    at: Any
    is_inside: Any

    @classmethod
    def of(cls, number: Any, tiling: GemmTiling, layer_ref: Any) -> "Tile":
        """Returns the tile of a program; rows vary first to share the weight."""
        tiles, blocks = tiling.tiles, tiling.row_blocks
        block = lax.div(number, blocks)
        row = lax.rem(number, blocks) * tiling.rows + lax.iota(jnp.int32, tiling.rows)
        column = block * tiles.columns + lax.iota(jnp.int32, tiles.columns)
        layer = layer_ref[0]
        is_row, is_column = row < tiling.R, column < tiling.N
        is_inside = is_row[:, None] & is_column[None, :]
        at_row = jnp.where(is_row, row, tiling.R)
        at_column = jnp.where(is_column, column, tiling.N)
        at = (at_row[:, None], at_column[None, :])
        return cls(layer, block, row, column, is_row, is_column, at_row, at_column, at, is_inside)


class PreloadedInputs(NamedTuple):
    """Sums of squares, residual and next norm of a tile, if they are loaded before the loop."""

    squares: Any
    added: Any
    norm: Any


def preload(inputs, tile, tiling):
    """Loads the inputs of the epilogue for few rows, to hide their latency.

    With separate segments the last program of a block loads them beside the partial sums.
    """
    if len(tile.row) > _FEW_ROWS or tiling.separate:
        return PreloadedInputs(None, None, None)
    return PreloadedInputs(
        squares=_squares_in(inputs, tile),
        added=_added_in(inputs, tile),
        norm=_norm_in(inputs, tile),
    )


def _squares_in(inputs, tile):
    if inputs.squares is None:
        return None
    return load_squares(inputs.squares, tile.row, tile.is_row)


def _added_in(inputs, tile):
    if inputs.added is None:
        return None
    return pltriton.load(inputs.added.at[tile.at], mask=tile.is_inside, other=0.0)


def _norm_in(inputs, tile):
    """Loads the scale of the next norm for some columns."""
    if inputs.norms is None:
        return None
    at = inputs.norms.at[inputs.norm_layer[0], tile.at_column]
    return pltriton.load(at, mask=tile.is_column, other=0.0)


def store_result(sums, early, refs, inputs, tile, tiling, settings, peers):
    """Applies the epilogue to the accumulators of a tile and stores the results.

    Args:
      sums: Accumulators, `[rows, columns]` for each weight.
      early: Inputs that were loaded before the main loop, see `preload`.
      refs: Results, see `GemmResults`.
      inputs, tile, tiling, settings: Inputs and constants of the call.
      peers: Symmetric buffers of a fused all-gather; None without.
    """
    out_ref, left_refs = refs.out, refs.left
    out = _finished(sums, early, inputs, tile, tiling, settings)
    out = out.astype((refs.scaled if out_ref is None else out_ref).dtype)
    read = out
    if inputs.norms is not None:
        norm = _norm_in(inputs, tile) if early.norm is None else early.norm
        read = (out.astype(jnp.float32) * norm[None, :]).astype(out.dtype)
    if left_refs is not None:
        store_partials(out, out_ref, inputs, left_refs, tile.row, tile.column, tile.block)
    elif peers is not None:
        _share(out, read, refs, tile, tiling, peers, settings.order)
    else:
        _store(out, read, refs, tile, tiling, settings.order)


def add_segments(sums, segment, number, refs, inputs, tile, segments, is_compiled, store):
    """Adds the segments of a block in order, in the last of their programs to end.

    Args:
      sums: Accumulator of a segment, `[rows, columns]`.
      segment, number: Indices of the segment and of the block.
      refs, inputs, tile: Partial sums, counters, and the place of the block.
      segments: Number of segments.
      is_compiled: Whether the kernel is compiled, not interpreted.
      store: Called with the sum by the last program, which sets the counter of the block to zero.
    """

    def part(index):
        return refs.segments.at[(index, *tile.at)]

    pltriton.store(part(segment), sums, mask=tile.is_inside)
    if is_compiled:
        pltriton.debug_barrier()
    counter, one = (number,), number * 0 + 1  # a Python number is no operand
    arrived = pltriton.atomic_add(inputs.arrivals, counter, one)

    @pl.when(arrived == segments - 1)
    def _add():
        if is_compiled:
            pltriton.debug_barrier()
        load = partial(pltriton.load, mask=tile.is_inside, other=0.0)
        total = load(part(0))
        for index in range(1, segments):
            total = total + load(part(index))
        pltriton.atomic_add(inputs.arrivals, counter, -segments * one)
        store(total)


def _finished(sums, early, inputs, tile, tiling, settings):
    """Applies norm, bias, gate, factor and residual to the accumulators of a tile."""
    if inputs.squares is not None:
        squares = _squares_in(inputs, tile) if early.squares is None else early.squares
        mean = add_up(squares, settings.order.digits_of_chunks) * (1.0 / tiling.K)
        scale = lax.rsqrt(mean + settings.eps)
        sums = [x * scale[:, None] for x in sums]
    if inputs.bias is not None:
        sums = _with_bias(sums, inputs.bias, tile, settings.first, tiling.N)
    out = sums[0]
    if settings.is_gated:
        out = act_and_mul(out, sums[1], settings.activation)
    elif not settings.activation.is_gated:
        out = relu_squared(out)
    if settings.factor != 1:
        out = out * settings.factor
    if inputs.added is not None:
        added = _added_in(inputs, tile) if early.added is None else early.added
        out += added.astype(jnp.float32)
    return out


def _with_bias(sums, bias_ref, tile, first, outputs):
    biased = []
    for number, x in enumerate(sums):
        at = first + number * outputs + tile.column
        at = jnp.where(tile.is_column, at, bias_ref.shape[1])
        bias = pltriton.load(bias_ref.at[tile.layer, at], mask=tile.is_column, other=0.0)
        biased.append(x + bias.astype(jnp.float32)[None, :])
    return biased


def _share(out, read, refs, tile, tiling, peers, order):
    """Same as `store`, with all-gather: the next input and the squares are of all ranks."""
    N, tiles = tiling.N, tiling.tiles
    words = tiling.R * N * out.dtype.itemsize // 4
    shared = [GatherTile(read, tile.block * tiles.columns, N, 0, refs.scaled)]
    if refs.sums is not None:
        chunks = pl.cdiv(N, order.chunk)
        parts = tiles.columns // order.chunk
        for place, sums in enumerate(_squares(out, tile, tiling, order)):
            first = tile.block * parts + place
            shared.append(GatherTile(sums[:, None], first, chunks, words, refs.sums))
        pltriton.store(refs.out.at[tile.at], out, mask=tile.is_inside)
    all_gather_tiles(shared, tile.row, tile.is_row, peers, 32 * tiles.warps)


def _store(out, read, refs, tile, tiling, order):
    """Stores a block of the result, the next norm's input, and its sums of squares per chunk."""
    pltriton.store(refs.out.at[tile.at], out, mask=tile.is_inside)
    if refs.scaled is not None:
        pltriton.store(refs.scaled.at[tile.at], read, mask=tile.is_inside)
    if refs.sums is None:
        return
    parts, chunks = tiling.tiles.columns // order.chunk, refs.sums.shape[1]
    for place, sums in enumerate(_squares(out, tile, tiling, order)):
        chunk = place + tile.block * parts
        at = jnp.full(tile.row.shape, jnp.minimum(chunk, chunks - 1))
        is_inside = tile.is_row & (chunk < chunks)
        pltriton.store(refs.sums.at[tile.at_row, at], sums, mask=is_inside)


def _squares(out, tile, tiling, order):
    """Yields the sums of squares of a block of the result, chunk by chunk."""
    parts, terms = tiling.tiles.columns // order.chunk, out.astype(jnp.float32)
    terms = jnp.where((tile.at_column < tiling.N)[None, :], terms * terms, 0.0)
    for place in range(parts):
        is_part = lax.div(tile.at_column, order.chunk) == tile.block * parts + place
        yield add_up(jnp.where(is_part[None, :], terms, 0.0), order.digits)
