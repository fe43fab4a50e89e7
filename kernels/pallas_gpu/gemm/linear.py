"""GEMM of rows with a stored weight, with fused prologue and epilogue (Pallas, Triton backend).

Each program computes one tile of rows and outputs, and accumulates along the inputs in one chain,
or in one chain per segment; or separate programs compute the segments. The bits of a row depend
neither on the tiles nor on the number of rows (batch-invariant).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int, Int32, Shaped

from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs
from kernels.pallas_gpu.collectives.flag_protocol import PeerView
from kernels.pallas_gpu.gemm.block_loaders import ResultBlock
from kernels.pallas_gpu.gemm.dequantize import dequantize, is_packed
from kernels.pallas_gpu.gemm.linear_launch import (
    GemmInputs,
    GemmResults,
    GemmSettings,
    GemmTiling,
    copied,
    gathered,
    joins,
)
from kernels.pallas_gpu.gemm.linear_mainloop import (
    ExpandInputs,
    adapted,
    inputs_beside_loop,
    split_weights,
    sums_of,
)
from kernels.pallas_gpu.gemm.linear_sm90 import is_on_hopper
from kernels.pallas_gpu.gemm.linear_tile import Tile, add_segments, preload, store_result
from kernels.pallas_gpu.gemm.lora import RowAdapters
from kernels.pallas_gpu.gemm.lora_shrink import shrink_ahead
from kernels.pallas_gpu.sampling.lm_head_epilogue import BlockPartials, RowOutputs
from kernels.tiles import LinearTiles
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SquaresOrder


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
    segments: int = 1,
    arrivals: Int[jax.Array, " counters"] | None = None,
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
      segments: Equal segments of the inputs, see `LinearOrder`.
      arrivals: Counters for separate segments, zero before and after; without, a program computes
        all segments of its block.
      interpret: Run on a CPU.

    Returns:
      The result. With `added`, also the result times the scale of `norm`, if there is one, and its
      sums of squares per chunk. For an LM head, also the block partials. With `gather`, all of them
      are of all ranks, except the result with `added`: it is this rank's shard, and the second
      output is the next GEMM's input, with or without a norm.

    Raises:
      ValueError: The tiles are invalid for this kernel; or segments are no whole steps; or rows are
        quantised and the GPU is not a Hopper, as tensor cores of other GPUs give other bits.
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
        arrivals=arrivals,
        **(asks or RowOutputs(None, None, None))._asdict(),
    )
    # Mosaic GPU's interpreter supports neither loads in a layout nor PTX, and jax 0.10 has no such
    # interpreter.
    if tiles.described and lora is None and not interpret:
        sizes = (R, N, segments)
        found = copied(x, weights, layer, inputs, settings, tiles, asks, sizes, format)
        if found is not None:
            return found if gather is None else gathered(*found[:3], gather)
    if row_scales is not None and not (interpret or is_on_hopper()):
        raise ValueError("quantised FP8 rows require a Hopper GPU (H100, H200)")
    tiling = GemmTiling.of(
        R,
        N,
        x.shape[1],
        tiles,
        format,
        is_gated=is_gated,
        is_adapted=lora is not None,
        segments=segments,
        counters=0 if arrivals is None else len(arrivals),
    )
    return _launched(x, weights, layer, inputs, settings, tiling, gather, asks, interpret)


def _launched(x, weights, layer, inputs, settings, tiling, gather, asks, interpret):
    """Launches the kernel; returns the results of `product`."""
    is_joined, warps = joins(tiling, settings, inputs, gather), tiling.tiles.warps
    tiling = tiling.with_gather if is_joined else tiling
    if settings.shrink is not None:
        shrink = settings.shrink.before(tiling.programs, tiling.blocks)
        settings = settings._replace(shrink=shrink)
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
        grid=(settings.programs_ahead + tiling.programs,),
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
            arrivals=inputs.arrivals if tiling.separate else None,
        ),
    )
    return GemmResults(*found).outputs(gather, asks, is_joined=is_joined)


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
    segments_ref,
    *,
    tiling,
    settings,
    boxes,
    is_compiled,
):
    """One program per block of outputs and block of rows, after those of a shrink."""
    refs = GemmResults(out_ref, scaled_ref, sums_ref, left_refs, shrunk_ref, segments_ref)
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
    """Computes one block of outputs and rows, or a segment of it."""
    segments, segment = tiling.segments, None
    if tiling.separate:
        number, segment = lax.div(number, segments), lax.rem(number, segments)
    tile = Tile.of(number, tiling, layer_ref)
    peers = None if boxes is None else PeerView.read(inputs.place, boxes, tiling.blocks)
    early = preload(inputs, tile, tiling)
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
    adapters, parts, lora, beside = inputs.adapters, settings.parts, None, None
    if adapters is not None:
        lora = ExpandInputs.of(block, tiling, adapters, parts, settings.shrink)
        beside = inputs_beside_loop(lora, tiling, adapters, parts)
    sums, found = sums_of(operands, tiling, block, is_compiled, segment, beside)
    if beside is not None:
        lora = [own.after_loop(x) for own, x in zip(lora, found, strict=True)]

    def store(sums):
        if adapters is not None:
            sums = list(adapted(sums, lora, adapters, parts))
        sums = split_weights(sums, block)
        store_result(sums, early, refs, inputs, tile, tiling, settings, peers)

    if not tiling.separate:
        store(sums)
        return
    (acc,) = sums  # GEMMs with segments have no gate
    where = {"refs": refs, "inputs": inputs, "tile": tile, "segments": segments}
    add_segments(acc, segment, number, **where, is_compiled=is_compiled, store=lambda x: store([x]))
