"""GEMM of rows with a stored weight, with fused prologue and epilogue (Pallas, Triton backend).

Each program computes one tile of rows and outputs, and accumulates along the inputs in one chain.
The bits of a row depend neither on the tiles nor on the number of rows (batch-invariant).
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

from kernels.pallas_gpu.collectives.all_gather import (
    AllGatherArgs,
    GatherTile,
    all_gather,
    all_gather_tiles,
)
from kernels.pallas_gpu.collectives.flag_protocol import PeerView
from kernels.pallas_gpu.gemm.fp8_w8a16 import widened
from kernels.pallas_gpu.gemm.linear_mainloop import Factors, ResultBlock, sums_of
from kernels.pallas_gpu.gemm.linear_sm90 import is_on_hopper, linear_sm90, takes
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, load_squares
from kernels.pallas_gpu.sampling.lm_head_epilogue import (
    BlockPartials,
    RowOutputs,
    partial_shapes,
    store_partials,
)
from kernels.peer_buffers import is_joined
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SquaresOrder

_LOG2_E = 1.4426950408889634


class GemmInputs(NamedTuple):
    """Inputs of the prologue and the epilogue.

    Attributes:
      scales: Scales of stacked FP8 weights.
      row_scales: Scales of quantised rows.
      squares: Sums of squares of the rows per chunk, for their norm.
      bias, added: Added to the accumulators, and to the result.
      norms, norm_layer: Stacked norm scales, and the index of the one that multiplies the result
        for the next norm.
      place: See `all_gather.AllGatherArgs`; None if ranks gather nothing, or in a later kernel.
      asks, temperature, tokens: For an LM head, see `lm_head_epilogue.RowOutputs`.
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
    temperature: Any
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
    gather: AllGatherArgs | None = None,
    asks: RowOutputs | None = None,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R outputs"],
    Float[jax.Array, "R outputs"] | None,
    Float[jax.Array, "R chunks_out"] | None,
    BlockPartials | None,
]:
    """Multiplies rows with a weight, with the layer's prologue and epilogue fused.

    Args:
      x: The rows; or quantised rows of `fp8_activations.quantised`.
      weights: Stacked weights `[outputs, inputs]`; gated weights have the gate's rows, then the up
        projection's. The stack avoids the copy of a slice. Or packed FP8 (W8A16), with the bits of
        the dequantised weight; or FP8, for quantised rows (W8A8).
      scales: Scales of packed FP8, see `shared.models.formats.fp8_w8a16`; or of FP8, as stored.
      row_scales: Scales of quantised rows.
      num_rows: Number of quantised rows without padding.
      layer: Index into the stack. An operand: a constant would compile a kernel per layer.
      first: First output that is computed.
      out_type: Type of the result.
      squares: Sums of squares of the rows per chunk, for a GEMM of their RMS norm. `x` then
        contains the rows times the norm's scale, and the squares are of the rows without it.
      eps: Epsilon of the norm.
      is_gated: Whether the result is silu(gate) * up.
      bias: Stacked biases, added to each row of the product before gating.
      factor: Factor of the result, if it is not gated.
      added: Residual added to the result; the sums of squares per chunk are returned as well.
      norm, norm_layer: Stacked norm scales, and the index of the one that the sum is read through
        next.
      order: Reduction order of squares.
      tiles: Tile config.
      gather: All-gather of the outputs; the weight is this rank's shard.
      asks: Outputs needed from an LM head, of `lm_head_epilogue.row_outputs`. The result is
        float32, and undefined in blocks of rows that need no logits.
      interpret: Run on a CPU.

    Returns:
      The result. With `added`, also the result times the scale of `norm`, if there is one, and its
      sums of squares per chunk. For an LM head, also the block partials. With `gather`, all of them
      are of all ranks, except the result with `added`: it is this rank's shard, and the second
      output is the next GEMM's input, with or without a norm.

    Raises:
      ValueError: The tiles are invalid for this kernel; or rows are quantised and the GPU is not a
        Hopper; tensor cores of other GPUs give other bits.
    """
    if tiles.persistent and not tiles.described:
        raise ValueError("persistent tiles must be described in Pallas")
    is_quantised = row_scales is not None
    if scales is not None and tiles.widens and not is_quantised:
        weights, scales = widened(weights, scales, layer, interpret=interpret)[None], None
        bias, layer = None if bias is None else bias[layer][None], jnp.zeros_like(layer)
    R, N = num_rows or x.shape[0], (weights.shape[1] - first) // (2 if is_gated else 1)
    if asks is not None:  # blocks of an LM head are whole groups
        tiles = tiles.narrowed
    # Mosaic GPU's interpreter supports neither loads in a layout nor PTX, and jax 0.10 has no such
    # interpreter.
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
        found = linear_sm90(
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
        raise ValueError("quantised FP8 rows require a Hopper GPU (H100, H200)")
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
    left = None if asks is None else tuple(partial_shapes(R, N, tiles.columns).values())
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
        name="linear",
    )(
        x,
        weights,
        layer.reshape(1),
        GemmInputs(
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
        return (*found, None if asks is None else BlockPartials(*asks, *left))
    if not joins:
        return _gathered(*found, gather)
    return (found[1], None, None, None) if added is None else (*found, None)


def _gathered(out, scaled, sums, gather):
    """All-gathers the outputs of a GEMM in a separate kernel; same results as a fused gather."""
    values = out if scaled is None else scaled
    every, all_sums = all_gather(values, sums, gather)
    return (every, None, None, None) if sums is None else (out, every, all_sums, None)


def _product_kernel(
    x_ref,
    weights_ref,
    layer_ref,
    inputs,
    out_ref,
    scaled_ref,
    sums_ref,
    left_refs,
    *,
    outputs,
    first,
    eps,
    is_gated,
    factor,
    num_rows,
    row_blocks,
    rows,
    order,
    tiles,
    boxes,
    is_compiled,
):
    """One program per block of outputs and block of rows; rows vary first to share the weight."""
    is_normed, is_added = inputs.squares is not None, inputs.added is not None
    R, K = num_rows, x_ref.shape[1]
    block = lax.div(pl.program_id(0), row_blocks)
    row = lax.rem(pl.program_id(0), row_blocks) * rows + lax.iota(jnp.int32, rows)
    column = block * tiles.columns + lax.iota(jnp.int32, tiles.columns)
    layer = layer_ref[0]
    is_row, is_column = row < R, column < outputs
    is_inside = is_row[:, None] & is_column[None, :]
    # Rows that are not stored get an index outside the array, which the interpreter requires.
    at_row, at_column = jnp.where(is_row, row, R), jnp.where(is_column, column, outputs)
    of_result = (at_row[:, None], at_column[None, :])
    peers = None
    if boxes is not None:
        peers = PeerView.read(inputs.place, boxes, row_blocks * pl.cdiv(outputs, tiles.columns))
    # With few rows, epilogue inputs are loaded before the loop, to hide their latency.
    is_early = rows <= 32
    squares = load_squares(inputs.squares, row, is_row) if is_normed and is_early else None
    added = None
    if is_added and is_early:
        added = pltriton.load(inputs.added.at[of_result], mask=is_inside, other=0.0)
    norm = None
    if inputs.norms is not None and is_early:
        norm = _norm_of(inputs, at_column, is_column)

    sums = sums_of(
        Factors(x_ref, weights_ref, inputs.scales, inputs.row_scales, layer),
        ResultBlock(
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
            squares = load_squares(inputs.squares, row, is_row)
        scale = lax.rsqrt(add_up(squares, order.digits_of_chunks) * (1.0 / K) + eps)
        sums = [x * scale[:, None] for x in sums]
    if inputs.bias is not None:
        for number, x in enumerate(sums):
            at = jnp.where(is_column, first + number * outputs + column, inputs.bias.shape[1])
            bias = pltriton.load(inputs.bias.at[layer, at], mask=is_column, other=0.0)
            sums[number] = x + bias.astype(jnp.float32)[None, :]
    out = sums[0]
    if is_gated:
        out = out / (1.0 + jnp.exp2(-out * _LOG2_E)) * sums[1]
    if factor != 1:
        out = out * factor
    if is_added:
        if added is None:
            added = pltriton.load(inputs.added.at[of_result], mask=is_inside, other=0.0)
        out += added.astype(jnp.float32)
    out = out.astype((scaled_ref if out_ref is None else out_ref).dtype)
    read = out
    if inputs.norms is not None:
        if norm is None:
            norm = _norm_of(inputs, at_column, is_column)
        read = (out.astype(jnp.float32) * norm[None, :]).astype(out.dtype)
    if left_refs is not None:
        store_partials(out, out_ref, inputs, left_refs, row, column, block)
        return
    if peers is not None:
        words = R * outputs * out.dtype.itemsize // 4
        shared = [GatherTile(read, block * tiles.columns, outputs, 0, scaled_ref)]
        if is_added:
            parts, chunks = tiles.columns // order.chunk, pl.cdiv(outputs, order.chunk)
            for place, sums in enumerate(_squares(out, at_column, block, outputs, parts, order)):
                shared.append(
                    GatherTile(sums[:, None], block * parts + place, chunks, words, sums_ref)
                )
            pltriton.store(out_ref.at[of_result], out, mask=is_inside)
        all_gather_tiles(shared, row, is_row, peers, 32 * tiles.warps)
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


def _norm_of(inputs, at_column, is_column):
    """Loads the scale of the next norm for some columns."""
    at = inputs.norms.at[inputs.norm_layer[0], at_column]
    return pltriton.load(at, mask=is_column, other=0.0)


def _squares(out, column, block, outputs, parts, order):
    """Computes the sums of squares of a block of the result, chunk by chunk."""
    terms = out.astype(jnp.float32)
    terms = jnp.where((column < outputs)[None, :], terms * terms, 0.0)
    for place in range(parts):
        is_part = lax.div(column, order.chunk) == block * parts + place
        yield add_up(jnp.where(is_part[None, :], terms, 0.0), order.digits)
