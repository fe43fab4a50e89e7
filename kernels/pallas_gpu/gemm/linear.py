"""Products of rows with a stored weight, and what stands before and after them, for Pallas.

A program has a block of rows and a block of outputs and adds along the inputs in one chain, so that
a row's bits depend neither on the blocks nor on how many rows there are.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int, Int32

from kernels.pallas_gpu.collectives.all_gather import Gather, Tile, gathered, share_tiles
from kernels.pallas_gpu.collectives.flag_protocol import Link
from kernels.pallas_gpu.gemm.fp8_w8a16 import widened
from kernels.pallas_gpu.gemm.linear_mainloop import Block, Factors, sums_of
from kernels.pallas_gpu.gemm.linear_sm90 import described_product, is_on_hopper, takes
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, load_squares
from kernels.pallas_gpu.sampling.lm_head_epilogue import (
    Asks,
    Leaves,
    room_of,
    store_leaves,
)
from kernels.peer_buffers import is_joined
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SquaresOrder

_LOG2_E = 1.4426950408889634


class Given(NamedTuple):
    """What stands before and after the sums.

    Attributes:
      scales: Of a stack of weights in FP8.
      row_scales: Of rows that are codes.
      squares: Of the rows, in chunks, for their norm.
      bias, added: What is added to the sums, and to the result.
      norms, norm_layer: A stack of scales of norms, and which of it multiplies the result for its
        next reader.
      place: See `ranks.Gather`; None where ranks gather nothing, or afterwards.
      asks, warmth, tokens: Of a head, see `leaves.Asks`.
    """

    scales: Any
    row_scales: Any
    squares: Any
    bias: Any
    added: Any
    norms: Any
    norm_layer: Any
    place: Any
    asks: Any
    warmth: Any
    tokens: Any


def product(
    x: Float[jax.Array, "R inputs"],
    weights: Float[jax.Array, "L stored inputs"] | Int32[jax.Array, "L stored words"],
    scales: Float[jax.Array, "L scales scales_in"] | None,
    layer: Int[jax.Array, ""],
    row_scales: Float32[jax.Array, "blocks_in rows"] | None = None,
    *,
    num_rows: int | None = None,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    bias: Float[jax.Array, "L stored"] | None = None,
    factor: float = 1.0,
    added: Float[jax.Array, "R outputs"] | None = None,
    norm: Float[jax.Array, "L2 outputs"] | None = None,
    norm_layer: Int[jax.Array, ""],
    order: SquaresOrder,
    tiles: LinearTiles,
    gather: Gather | None = None,
    asks: Asks | None = None,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R outputs"],
    Float[jax.Array, "R outputs"] | None,
    Float[jax.Array, "R chunks_out"] | None,
    Leaves | None,
]:
    """Multiplies each row by a weight, and does what a layer does right before and after it.

    Args:
      x: The rows; or their codes, as `fp8_activations.quantised` gives them.
      weights: A stack of weights `[outputs, inputs]`; where they are gated, the gate's rows and
        then those of up. A slice of it would be copied for the kernel. Or FP8 in words of four,
        with the bits of the widened weight; or codes, where rows are codes.
      scales: Of FP8; see `shared.models.fp8_packing`. Of codes, as they are stored.
      row_scales: Of rows that are codes.
      num_rows: How many rows there are, where they are codes.
      layer: Which of the stack. An operand: as a constant, each layer would be a kernel of its own.
      first: The outputs from here on.
      out_type: Of the result.
      squares: The rows' squares in chunks, where the product is that of their RMS norm; `x` are
        the rows times the norm's scale then, and the squares those of the rows without it.
      eps: Of the norm.
      is_gated: Whether the result is silu(gate) * up.
      bias: A stack as the weights are: what is added to each row of the product, before it is
        gated.
      factor: What the result is multiplied by, if it is not gated.
      added: What is added to the result; its squares in chunks are returned as well.
      norm, norm_layer: A stack of scales of norms; the sum is read next through that of the layer.
      order: How squares are summed.
      tiles: How the work is cut.
      gather: How ranks exchange their outputs, of which the weight has a rank's.
      asks: Of a head, as `leaves.asking` gives it: the result, which is float32, is there for
        blocks of rows of which one asks, and undefined elsewhere.
      interpret: Run on a CPU.

    Returns:
      The result; where something was added, the result times the scale of `norm`, if there is one,
      and its squares in chunks; of a head, what blocks leave. Gathered, all is that of all ranks,
      but for the result where something was added: it is this rank's, and the second is what is
      read next, with a norm or without.

    Raises:
      ValueError: The tiles are none for a kernel here; or rows are codes, which only a Hopper's
        matrix units add in the bits that are meant.
    """
    if tiles.persistent and not tiles.described:
        raise ValueError("in Pallas only what descriptors copy is persistent")
    is_quantised = row_scales is not None
    if scales is not None and tiles.widens and not is_quantised:
        weights, scales = widened(weights, scales, layer, interpret=interpret)[None], None
        bias, layer = None if bias is None else bias[layer][None], jnp.zeros_like(layer)
    R, N = num_rows or x.shape[0], (weights.shape[1] - first) // (2 if is_gated else 1)
    if asks is not None:  # blocks of a head have whole groups
        tiles = tiles.narrowed
    # Mosaic GPU's interpreter knows neither loads in a layout nor instructions of PTX, and jax 0.10
    # has none to call.
    if (
        tiles.described
        and not interpret
        and takes(
            x,
            weights,
            outputs=N,
            first=first,
            out_type=out_type,
            is_normed=squares is not None,
            is_plain=not is_gated and all(x is None for x in (squares, bias, asks)),
            added=added,
            order=order,
            tiles=tiles,
        )
    ):
        found = described_product(
            x,
            weights,
            layer,
            scales,
            row_scales,
            num_rows=R,
            first=first,
            out_type=out_type,
            squares=squares,
            eps=eps,
            is_gated=is_gated,
            bias=bias,
            factor=factor,
            added=added,
            norm=norm,
            norm_layer=norm_layer,
            order=order,
            tiles=tiles,
            asks=asks,
        )
        return found if gather is None else _gathered(*found[:3], gather)
    if is_quantised and not (interpret or is_on_hopper()):
        raise ValueError("rows in FP8 are multiplied on a Hopper alone")
    tiles = tiles.narrowed
    rows = max(16, min(tiles.rows, pl.next_power_of_2(R)))
    if is_quantised:
        rows = tiles.rows_of_codes(rows)
        tiles = replace(tiles, depth=tiles.depth_of_codes(x.shape[1]))
    elif scales is None:
        tiles = replace(tiles, depth=tiles.depth_of(x.shape[1]))
    blocks = (pl.cdiv(R, rows), pl.cdiv(N, tiles.columns))
    shape, out = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((R, N), out_type)
    scaled = sums = None
    chunks = 0 if added is None else pl.cdiv(N, order.chunk)
    if added is not None:
        scaled = None if norm is None else out
        sums = shape((R, chunks), jnp.float32)
    joins = gather is not None and is_joined(R, N, out.dtype.itemsize, chunks)
    if gather is not None and joins:
        scaled = shape((R, gather.boxes.ranks * N), out_type)
        sums = None if sums is None else shape((R, gather.boxes.ranks * chunks), jnp.float32)
        out = None if added is None else out
    left = None if asks is None else tuple(room_of(R, N, tiles.columns).values())
    *found, left = pl.pallas_call(
        functools.partial(
            _product_kernel,
            outputs=N,
            first=first,
            eps=eps,
            is_gated=is_gated,
            factor=factor,
            num_rows=R,
            row_blocks=blocks[0],
            rows=rows,
            order=order,
            tiles=tiles,
            boxes=gather.boxes if gather is not None and joins else None,
            is_compiled=not interpret,
        ),
        grid=(blocks[0] * blocks[1],),
        out_shape=(out, scaled, sums, left),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="product",
    )(
        x,
        weights,
        layer.reshape(1),
        Given(
            scales,
            row_scales,
            squares,
            bias,
            added,
            norm,
            norm_layer.reshape(1),
            gather.place if gather is not None and joins else None,
            *(asks or (None, None, None)),
        ),
    )
    if gather is None:
        return (*found, None if asks is None else Leaves(*asks, *left))
    if not joins:
        return _gathered(*found, gather)
    return (found[1], None, None, None) if added is None else (*found, None)


def _gathered(out, scaled, sums, gather):
    """As a product that gathers gives it, by a kernel of its own."""
    values = out if scaled is None else scaled
    every, all_sums = gathered(values, sums, gather)
    return (every, None, None, None) if sums is None else (out, every, all_sums, None)


def _product_kernel(
    x_ref, weights_ref, layer_ref, given, out_ref, scaled_ref, sums_ref, left_refs, *, outputs,
    first, eps, is_gated, factor, num_rows, row_blocks, rows, order, tiles, boxes, is_compiled,
):  # fmt: skip
    """One program per block of outputs and block of rows, the rows first: they share the weight."""
    is_normed, is_added = given.squares is not None, given.added is not None
    R, K = num_rows, x_ref.shape[1]
    block = lax.div(pl.program_id(0), row_blocks)
    row = lax.rem(pl.program_id(0), row_blocks) * rows + lax.iota(jnp.int32, rows)
    column = block * tiles.columns + lax.iota(jnp.int32, tiles.columns)
    layer = layer_ref[0]
    is_row, is_column = row < R, column < outputs
    is_inside = is_row[:, None] & is_column[None, :]
    # A row that is not written gets an index outside, for the interpreter.
    at_row, at_column = jnp.where(is_row, row, R), jnp.where(is_column, column, outputs)
    of_result = (at_row[:, None], at_column[None, :])
    link = None
    if boxes is not None:
        link = Link.read(given.place, boxes, row_blocks * pl.cdiv(outputs, tiles.columns))
    # Asked for before the loop where they are few, so that nothing waits for them after it.
    is_early = rows <= 32
    squares = load_squares(given.squares, row, is_row) if is_normed and is_early else None
    added = None
    if is_added and is_early:
        added = pltriton.load(given.added.at[of_result], mask=is_inside, other=0.0)
    norm = None
    if given.norms is not None and is_early:
        norm = _norm_of(given, at_column, is_column)

    sums = sums_of(
        Factors(x_ref, weights_ref, given.scales, given.row_scales, layer),
        Block(
            number=block,
            row=row,
            column=column,
            num_rows=R,
            outputs=outputs,
            first=first,
            weights=2 if is_gated else 1,
            tiles=tiles,
        ),
        is_compiled,
    )

    if is_normed:
        if squares is None:
            squares = load_squares(given.squares, row, is_row)
        scale = lax.rsqrt(add_up(squares, order.digits_of_chunks) * (1.0 / K) + eps)
        sums = [x * scale[:, None] for x in sums]
    if given.bias is not None:
        for number, x in enumerate(sums):
            at = jnp.where(is_column, first + number * outputs + column, given.bias.shape[1])
            bias = pltriton.load(given.bias.at[layer, at], mask=is_column, other=0.0)
            sums[number] = x + bias.astype(jnp.float32)[None, :]
    out = sums[0]
    if is_gated:
        out = out / (1.0 + jnp.exp2(-out * _LOG2_E)) * sums[1]
    if factor != 1:
        out = out * factor
    if is_added:
        if added is None:
            added = pltriton.load(given.added.at[of_result], mask=is_inside, other=0.0)
        out += added.astype(jnp.float32)
    out = out.astype((scaled_ref if out_ref is None else out_ref).dtype)
    read = out
    if given.norms is not None:
        if norm is None:
            norm = _norm_of(given, at_column, is_column)
        read = (out.astype(jnp.float32) * norm[None, :]).astype(out.dtype)
    if left_refs is not None:
        store_leaves(out, out_ref, given, left_refs, row, column, block)
        return
    if link is not None:
        words = R * outputs * out.dtype.itemsize // 4
        shared = [Tile(read, block * tiles.columns, outputs, 0, scaled_ref)]
        if is_added:
            parts, chunks = tiles.columns // order.chunk, pl.cdiv(outputs, order.chunk)
            for place, sums in enumerate(_squares(out, at_column, block, outputs, parts, order)):
                shared.append(Tile(sums[:, None], block * parts + place, chunks, words, sums_ref))
            pltriton.store(out_ref.at[of_result], out, mask=is_inside)
        share_tiles(shared, row, is_row, link, 32 * tiles.warps)
        return
    pltriton.store(out_ref.at[of_result], out, mask=is_inside)
    if scaled_ref is not None:
        pltriton.store(scaled_ref.at[of_result], read, mask=is_inside)
    if is_added:
        parts = tiles.columns // order.chunk
        for place, sums in enumerate(_squares(out, at_column, block, outputs, parts, order)):
            place += block * parts
            at = jnp.full(row.shape, jnp.minimum(place, sums_ref.shape[1] - 1))
            is_inside = is_row & (place < sums_ref.shape[1])
            pltriton.store(sums_ref.at[at_row, at], sums, mask=is_inside)


def _norm_of(given, at_column, is_column):
    """The scale of the next norm of some columns."""
    at = given.norms.at[given.norm_layer[0], at_column]
    return pltriton.load(at, mask=is_column, other=0.0)


def _squares(out, column, block, outputs, parts, order):
    """The squares of a block of the result, chunk by chunk."""
    terms = out.astype(jnp.float32)
    terms = jnp.where((column < outputs)[None, :], terms * terms, 0.0)
    for place in range(parts):
        is_part = lax.div(column, order.chunk) == block * parts + place
        yield add_up(jnp.where(is_part[None, :], terms, 0.0), order.digits)
