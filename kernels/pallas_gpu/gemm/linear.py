"""GEMM of rows with a stored weight, with fused prologue and epilogue (Pallas, Triton backend).

Each program computes one tile of rows and outputs, and accumulates along the inputs in one chain.
The bits of a row depend neither on the tiles nor on the number of rows (batch-invariant).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int, Int32, Shaped

from kernels.pallas_gpu.collectives.all_gather import (
    AllGatherArgs,
    GatherTile,
    all_gather_tiles,
)
from kernels.pallas_gpu.collectives.flag_protocol import PeerView
from kernels.pallas_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.pallas_gpu.gemm.block_loaders import ResultBlock
from kernels.pallas_gpu.gemm.dequantize import dequantize, is_packed
from kernels.pallas_gpu.gemm.linear_launch import (
    GemmInputs,
    GemmResults,
    GemmSettings,
    GemmTiling,
    gathered,
    joins,
)
from kernels.pallas_gpu.gemm.linear_mainloop import sums_of
from kernels.pallas_gpu.gemm.linear_sm90 import is_on_hopper, linear_sm90, takes
from kernels.pallas_gpu.gemm.lora import RowAdapters
from kernels.pallas_gpu.gemm.lora_shrink import shrink_ahead
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, load_squares
from kernels.pallas_gpu.sampling.lm_head_epilogue import (
    BlockPartials,
    RowOutputs,
    store_partials,
)
from kernels.tiles import LinearTiles
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SquaresOrder

_FEW_ROWS = 32
"""Rows of a tile that loads epilogue inputs before the main loop."""


def product(
    x: Float[jax.Array, "R inputs"],
    weights: Float[jax.Array, "L stored inputs"] | Int32[jax.Array, "L stored words"],
    scales: Shaped[jax.Array, "L scales scales_in"] | None,
    layer: Int[jax.Array, ""],
    row_scales: Float32[jax.Array, "blocks_in rows"] | None = None,
    *,
    format: str,
    num_rows: int | None = None,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    activation: Activation = SILU_AND_MUL,
    bias: Float[jax.Array, "L stored"] | None = None,
    factor: float = 1.0,
    added: Float[jax.Array, "R outputs"] | None = None,
    norm: Float[jax.Array, "L2 outputs"] | None = None,
    norm_layer: Int[jax.Array, ""],
    order: SquaresOrder,
    tiles: LinearTiles,
    gather: AllGatherArgs | None = None,
    asks: RowOutputs | None = None,
    lora: RowAdapters | None = None,
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
        projection's. The stack avoids the copy of a slice. Or packed (W8A16, W4A16), with the
        bits of the dequantised weight; or FP8, for quantised rows (W8A8).
      scales: Scales of packed weights, see `shared.models.formats`; or of FP8, as stored.
      row_scales: Scales of quantised rows.
      format: Name of the weight format, which selects the block loader.
      num_rows: Number of quantised rows without padding.
      layer: Index into the stack. An operand: a constant would compile a kernel per layer.
      first: First output that is computed.
      out_type: Type of the result.
      squares: Sums of squares of the rows per chunk, for a GEMM of their RMS norm. `x` then
        contains the rows times the norm's scale, and the squares are of the rows without it.
      eps: Epsilon of the norm.
      is_gated, activation: Whether the result is an activation of gate and up, and which one. An
        activation without a gate applies to the result, the usual one does not.
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
      lora: Adapters of the rows, of `lora.shrink`.
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
    if tiles.widens and is_packed(format):
        weights = dequantize(weights, scales, layer, format, x.shape[1], interpret=interpret)[None]
        scales = None
        bias, layer = None if bias is None else bias[layer][None], jnp.zeros_like(layer)
        format = PLAIN
    R, N = num_rows or x.shape[0], (weights.shape[1] - first) // (2 if is_gated else 1)
    if asks is not None:  # blocks of an LM head are whole groups
        tiles = tiles.narrowed
    parts, within = ((), None) if lora is None else (lora.parts, lora.shrink)
    settings = GemmSettings(
        first, out_type, eps, is_gated, activation, factor, order, parts, within
    )
    inputs = GemmInputs(
        scales=scales,
        row_scales=row_scales,
        squares=squares,
        bias=bias,
        added=added,
        norms=norm,
        norm_layer=norm_layer,
        place=None,
        adapters=None if lora is None else lora.operands,
        **(asks or RowOutputs(None, None, None))._asdict(),
    )
    # Mosaic GPU's interpreter supports neither loads in a layout nor PTX, and jax 0.10 has no such
    # interpreter.
    may_copy = tiles.described and lora is None and not interpret
    if may_copy and _is_copied(x, weights, N, inputs, settings, tiles):
        how = {"squares": squares, "bias": bias, "added": added, "asks": asks, "tiles": tiles}
        how |= {"norm": norm, "norm_layer": norm_layer, "num_rows": R, **settings._asdict()}
        del how["parts"], how["shrink"]
        found = linear_sm90(x, weights, layer, scales, row_scales, **how)
        return found if gather is None else gathered(*found[:3], gather)
    if row_scales is not None and not (interpret or is_on_hopper()):
        raise ValueError("quantised FP8 rows require a Hopper GPU (H100, H200)")
    kind = {"is_gated": is_gated, "is_adapted": lora is not None}
    tiling = GemmTiling.of(R, N, x.shape[1], tiles, format, **kind)
    if within is not None:
        settings = settings._replace(shrink=within.before(tiling.blocks))
    return _launched(x, weights, layer, inputs, settings, tiling, gather, asks, interpret)


def _is_copied(x, weights, outputs, inputs, settings, tiles):
    """Returns whether `linear_sm90` computes a call."""
    is_alone = inputs.squares is None and inputs.bias is None and inputs.asks is None
    return takes(
        x,
        weights,
        outputs=outputs,
        first=settings.first,
        out_type=settings.out_type,
        is_normed=inputs.squares is not None,
        is_plain=is_alone and not settings.is_gated and settings.activation.is_gated,
        added=inputs.added,
        order=settings.order,
        tiles=tiles,
    )


def _launched(x, weights, layer, inputs, settings, tiling, gather, asks, interpret):
    """Launches the kernel, with one program per block; returns the results of `product`."""
    is_joined, warps = joins(tiling, settings, inputs, gather), tiling.tiles.warps
    fused = gather if is_joined else None
    shapes = GemmResults.of(tiling, settings, inputs, fused, asks)
    found = pl.pallas_call(
        functools.partial(
            _product_kernel,
            tiling=tiling,
            settings=settings,
            boxes=None if fused is None else fused.boxes,
            is_compiled=not interpret,
        ),
        grid=(settings.programs_ahead + tiling.blocks,),
        out_shape=tuple(shapes),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=tiling.tiles.stages),
        interpret=interpret,
        name="linear",
    )(
        x,
        weights,
        layer.reshape(1),
        inputs._replace(
            norm_layer=inputs.norm_layer.reshape(1),
            place=None if fused is None else fused.place,
        ),
    )
    return GemmResults(*found).outputs(gather, asks, is_joined=is_joined)


class _Tile(NamedTuple):
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
    def of(cls, number: Any, tiling: GemmTiling, layer_ref: Any) -> "_Tile":
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


class _PreloadedInputs(NamedTuple):
    """Sums of squares, residual and next norm of a tile, if they are loaded before the loop."""

    squares: Any
    added: Any
    norm: Any


def _preload(inputs, tile):
    """Loads the inputs of the epilogue for few rows, to hide their latency."""
    if len(tile.row) > _FEW_ROWS:
        return _PreloadedInputs(None, None, None)
    return _PreloadedInputs(
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


def _product_kernel(
    x_ref,
    weights_ref,
    layer_ref,
    inputs,
    out_ref,
    scaled_ref,
    sums_ref,
    left_refs,
    shrunk_ref,
    *,
    tiling,
    settings,
    boxes,
    is_compiled,
):
    """One program per block of outputs and block of rows, after those of a shrink."""
    refs = GemmResults(out_ref, scaled_ref, sums_ref, left_refs, shrunk_ref)
    how = {"tiling": tiling, "settings": settings, "boxes": boxes, "is_compiled": is_compiled}
    program, shrink = pl.program_id(0), settings.shrink
    number = program - settings.programs_ahead
    if shrink is None:
        _multiply_block(number, x_ref, weights_ref, layer_ref, inputs, refs, **how)
        return
    adapters = inputs.adapters._replace(sums=shrunk_ref)

    @pl.when(number < 0)
    def _shrink():
        shrink_ahead(program, x_ref, adapters, shrink, not is_compiled)

    @pl.when(number >= 0)
    def _multiply():
        own = inputs._replace(adapters=adapters)
        _multiply_block(number, x_ref, weights_ref, layer_ref, own, refs, **how)


def _multiply_block(
    number,
    x_ref,
    weights_ref,
    layer_ref,
    inputs,
    refs,
    *,
    tiling,
    settings,
    boxes,
    is_compiled,
):
    """Computes one block of outputs and rows."""
    order, out_ref, left_refs = settings.order, refs.out, refs.left
    tile = _Tile.of(number, tiling, layer_ref)
    peers = None if boxes is None else PeerView.read(inputs.place, boxes, tiling.blocks)
    early = _preload(inputs, tile)
    operands = {"x": x_ref, "weights": weights_ref, "stack": (tile.layer,)}
    operands |= {"scales": inputs.scales, "row_scales": inputs.row_scales}
    block = ResultBlock(
        number=tile.block,
        row=tile.row,
        column=tile.column,
        num_rows=tiling.R,
        outputs=tiling.N,
        first=settings.first,
        weights=2 if settings.is_gated else 1,
        tiles=tiling.tiles,
    )
    own = {"adapters": inputs.adapters, "parts": settings.parts, "shrink": settings.shrink}
    sums = sums_of(operands, tiling.format, block, is_compiled, **own)
    out = _finished(sums, early, inputs, tile, x_ref.shape[1], tiling.N, settings)
    out = out.astype((refs.scaled if out_ref is None else out_ref).dtype)
    read = out
    if inputs.norms is not None:
        norm = _norm_in(inputs, tile) if early.norm is None else early.norm
        read = (out.astype(jnp.float32) * norm[None, :]).astype(out.dtype)
    if left_refs is not None:
        store_partials(out, out_ref, inputs, left_refs, tile.row, tile.column, tile.block)
    elif peers is not None:
        _share(out, read, refs, tile, tiling, peers, order)
    else:
        _store(out, read, refs, tile, tiling, order)


def _finished(sums, early, inputs, tile, K, N, settings):
    """Applies norm, bias, gate, factor and residual to the accumulators of a tile."""
    if inputs.squares is not None:
        squares = _squares_in(inputs, tile) if early.squares is None else early.squares
        mean = add_up(squares, settings.order.digits_of_chunks) * (1.0 / K)
        scale = lax.rsqrt(mean + settings.eps)
        sums = [x * scale[:, None] for x in sums]
    if inputs.bias is not None:
        sums = _with_bias(sums, inputs.bias, tile, settings.first, N)
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
    """Same as `_store`, with all-gather: the next input and the squares are of all ranks."""
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
