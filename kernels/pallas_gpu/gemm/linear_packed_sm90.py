"""WGMMA GEMM of few rows with a packed weight, and TMA copies (Pallas, Mosaic GPU).

Outputs are the wide side of the tensor core, rows the narrow one. A producer warpgroup copies
blocks of packed words and of the rows by TMA. The consumer warpgroup dequantises a part of a block
in registers while the tensor cores multiply the part before it. Gate and up are two accumulators.

With segments along the inputs the programs of a block, one per segment, form a thread block
cluster. The later ones store their partial sums in the shared memory of the first, which adds them
in order.

Accumulation is one chain along the inputs of a segment, a weight is dequantised as by
`block_loaders`, and the epilogue computes as in `linear`, so the bits equal that kernel's and
Triton's.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Float, Int, Int32, Shaped

from kernels.pallas_gpu.gemm.block_loaders import shares_of
from kernels.pallas_gpu.gemm.fp8_w8a16 import fp8_assembly
from kernels.pallas_gpu.gemm.int4_w4a16 import int4_assembly, int4_scales
from kernels.pallas_gpu.gemm.linear_epilogue import PARTS, SQUARES_AT_ONCE, WIDE, added_up
from kernels.pallas_gpu.gemm.linear_sm90 import has_mosaic
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import (
    LINE_BYTES,
    LINES,
    WARPS,
    GemmRefs,
    GemmTileWork,
)
from kernels.pallas_gpu.gemm.linear_swap_ab import SwappedResult
from kernels.pallas_gpu.gemm.ptx import LAYOUT, inverse_root, plus, times
from kernels.tiles import LinearTiles
from shared.models.activation import Activation
from shared.spec.reduction_order import SquaresOrder

FORMATS = {"int4_w4a16": 256, "fp8_w8a16": 128}
"""Formats with a dequantisation below, and their inputs in a block of `WORDS` words."""
WORDS = 32
"""Words of an output in a block, a shared-memory line."""
GROUP = 128
"""Inputs of a scale."""
PAIR = 64
"""Inputs of a product: two parts of a block."""
_AHEAD = 1024
"""Inputs from the loaded scales to the used ones, divided among gate and up."""
_IN_FLIGHT = 2
"""Products that the tensor cores have yet to finish while the next part is dequantised; 1 of them
with a gate, so that two programs have enough registers on a multiprocessor."""
_MOST_SEGMENTS = 8
"""Maximum programs of a portable thread block cluster."""


class PackedBuffers(NamedTuple):
    """Shared memory of a program.

    Attributes:
      rows, words: Rings of blocks; words of gate and up are consecutive.
      full, free: Barriers of the rings: a block is loaded, and is consumed.
      parts, squares: Parts of the result and sums of their squares, see `linear_swap_ab`.
      loaded: Barriers: the residual is loaded, and the sums of squares of the rows.
      chunks, norms: These sums, and the norm scales of the rows.
      partials, received: Partial sums of the later segments, and barriers: a partial sum is stored.
        The first program of a cluster reads them.
    """

    rows: Any
    words: Any
    full: Any
    free: Any
    parts: Any
    squares: Any
    loaded: Any
    chunks: Any = None
    norms: Any = None
    partials: Any = None
    received: Any = None


def takes(
    x: Float[jax.Array, "R inputs"],
    weights: Int32[jax.Array, "L stored words"],
    scales: Shaped[jax.Array, "L scales scales_in"] | None,
    *,
    format: str,
    outputs: int,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None,
    is_plain: bool,
    added: Float[jax.Array, "R outputs"] | None,
    order: SquaresOrder,
    segments: int,
    tiles: LinearTiles,
) -> bool:
    """Returns whether `linear` supports a call: few bfloat16 rows, scales of 128 inputs.

    `is_plain` states that there is neither a bias nor an LM-head epilogue. The rows are fewer than
    a group of lines, or whole groups. Segments must be whole steps, without a norm before.
    """
    if scales is None or not tiles.copies_packed or format not in FORMATS or not has_mosaic():
        return False
    rows, inputs = x.shape
    is_tile = rows <= tiles.rows and tiles.columns == WIDE and tiles.warps == WARPS
    is_tile &= rows < LINES or rows % LINES == 0
    is_whole = inputs % tiles.depth == 0 and inputs == GROUP * scales.shape[2]
    # All outputs of a tile are in one block of scales.
    is_whole &= outputs % WIDE == 0 and first % WIDE == 0 and order.chunk == WIDE
    is_whole &= squares is None or squares.shape[1] % SQUARES_AT_ONCE == 0
    is_typed = x.dtype == jnp.bfloat16 and x.dtype == out_type
    is_typed &= scales.dtype in (jnp.bfloat16, jnp.int32)
    is_typed &= added is None or added.dtype == x.dtype
    if segments > 1:
        is_whole &= inputs % (segments * tiles.depth) == 0 and squares is None
        is_tile &= tiles.separate and segments <= _MOST_SEGMENTS
    return is_tile and is_whole and is_typed and is_plain


# Jitted so that a program contains it once for all layers, as `linear_sm90`.
@functools.partial(
    jax.jit,
    static_argnames=(
        *("format", "first", "out_type", "eps", "is_gated", "activation"),
        *("factor", "order", "tiles", "segments"),
    ),
)
def linear(
    x: Float[jax.Array, "R inputs"],
    weights: Int32[jax.Array, "L stored words"],
    scales: Shaped[jax.Array, "L scales scales_in"],
    layer: Int[jax.Array, ""],
    *,
    format: str,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None,
    eps: float,
    is_gated: bool,
    activation: Activation,
    factor: float,
    added: Float[jax.Array, "R outputs"] | None,
    norm: Float[jax.Array, "L2 outputs"] | None,
    norm_layer: Int[jax.Array, ""],
    order: SquaresOrder,
    tiles: LinearTiles,
    segments: int,
) -> tuple[
    Float[jax.Array, "R outputs"],
    Float[jax.Array, "R outputs"] | None,
    Float[jax.Array, "R chunks_out"] | None,
    None,
]:
    """Same as `linear.product`, for arrays that `takes` accepts."""
    (R, inputs), N = x.shape, (weights.shape[1] - first) // (2 if is_gated else 1)
    tiles = replace(tiles, rows=max(LINES, pl.next_power_of_2(R)))
    operands = {"x": x, "weights": weights, "layer": layer.reshape(1), "scales": scales}
    results = {"out": jax.ShapeDtypeStruct((R, N), out_type)}
    if squares is not None:
        operands["squares"] = squares
    if added is not None:
        operands["added"] = added
        if norm is not None:
            operands |= {"norms": norm, "norm_layer": norm_layer.reshape(1)}
            results["scaled"] = results["out"]
        results["sums"] = jax.ShapeDtypeStruct((R, N // order.chunk), jnp.float32)
    work = GemmTileWork(
        operands=tuple(operands),
        results=tuple(results),
        outputs=N,
        first=first,
        is_gated=is_gated,
        activation=activation,
        factor=factor,
        eps=eps,
        order=order,
        row_blocks=1,
        blocks=N // WIDE,
        steps=inputs // tiles.depth,
        segments=segments,
        tiles=tiles,
    )
    cluster = {"cluster": (segments,), "cluster_names": ("segment",)} if segments > 1 else {}
    out, *left = plgpu.kernel(
        functools.partial(_packed_kernel, work=work, format=format),
        out_type=tuple(results.values()),
        grid=(1, work.blocks),
        grid_names=("row", "column"),
        **cluster,
        num_threads=2,
        thread_name="group",
        scratch_types={k: v for k, v in _buffers(work, format, squares)._asdict().items() if v},
        compiler_params=plgpu.CompilerParams(),
        kernel_name="linear_packed_sm90",
    )(*operands.values())
    if added is None:
        return out, None, None, None
    return out, None if norm is None else left[0], left[-1], None


def _buffers(work, format, squares):
    """Returns the shared-memory types of a program."""
    tiles, blocks = work.tiles, work.tiles.depth // FORMATS[format]

    def swizzled(count, rows, columns, dtype):
        item_bytes = np.dtype(dtype).itemsize
        line = min(LINE_BYTES // item_bytes, columns)
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(line * item_bytes)
        return plgpu.SMEM((count, rows, columns), dtype, transforms=layout)

    more = {}
    if squares is not None:
        more["chunks"] = plgpu.SMEM((WIDE, squares.shape[1]), jnp.float32)
        more["norms"] = plgpu.SMEM((WIDE,), jnp.float32)
    if work.segments > 1:
        more["partials"] = swizzled(work.segments - 1, WIDE, tiles.rows, jnp.float32)
        more["received"] = plgpu.Barrier(num_barriers=work.segments - 1)
    return PackedBuffers(
        rows=swizzled(tiles.stages, tiles.rows, tiles.depth, jnp.bfloat16),
        words=swizzled(tiles.stages, work.weights * WIDE, blocks * WORDS, jnp.int32),
        full=plgpu.Barrier(num_arrivals=1 + work.weights, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_barriers=tiles.stages),
        parts=plgpu.SMEM((PARTS, tiles.rows, WIDE), jnp.bfloat16),
        squares=plgpu.SMEM((tiles.rows,), jnp.float32),
        loaded=plgpu.Barrier(num_barriers=2),
        **more,
    )


def _packed_kernel(*refs, work, format, **shared):
    """One program per block of outputs and segment of the inputs."""
    refs = GemmRefs(**dict(zip((*work.operands, *work.results), refs, strict=True)))
    shared, group = PackedBuffers(**shared), lax.axis_index("group")
    row, column = lax.axis_index("row") * work.tiles.rows, lax.axis_index("column") * WIDE
    segment = lax.axis_index("segment") if work.segments > 1 else 0
    begin = segment * work.segment_steps

    @pl.when(group == 1)
    def _copy():
        _copy_blocks(refs, shared, work, format, row, column, begin)

    @pl.when(group == 0)
    def _multiply():
        if work.segments > 1:
            _multiply_segment(refs, shared, work, format, row, column, segment)
            return
        if work.has_squares:
            chunks = refs.squares.at[pl.ds(row, WIDE)]
            plgpu.copy_gmem_to_smem(chunks, shared.chunks, shared.loaded.at[1])
        turned = SwappedResult(refs, shared, work, row, column)
        turned.prepare()
        norms = _norms(shared, work, refs.x.shape[1]) if work.has_squares else None
        turned.store(_sums(refs, shared, work, format, column, begin), norms)
        plgpu.wait_smem_to_gmem(0)


def _multiply_segment(refs, shared, work, format, row, column, segment):
    """Consumer of one segment. The first program of the cluster adds all, and stores the result.

    It waits for every partial sum, so it does not end before the others have written to its shared
    memory.
    """
    turned = SwappedResult(refs, shared, work, row, column)

    @pl.when(segment == 0)
    def _prepare():
        turned.prepare()

    begin = segment * work.segment_steps
    (sums,) = _sums(refs, shared, work, format, column, begin)  # no gate with segments

    @pl.when(segment > 0)
    def _send():
        partial, received = shared.partials.at[segment - 1], shared.received.at[segment - 1]
        to = {"cluster_idx": jnp.int32(0), "cluster_dim": "segment"}
        plgpu.async_store_smem(sums, partial, received, **to)

    @pl.when(segment == 0)
    def _store():
        total = sums
        for index in range(work.segments - 1):
            plgpu.barrier_wait(shared.received.at[index])
            total = total + plgpu.load(shared.partials.at[index], layout=LAYOUT)
        turned.store([total])
        plgpu.wait_smem_to_gmem(0)


def _copy_blocks(refs, shared, work, format, row, column, begin):
    """Producer: copies the blocks of a segment, from step `begin`; rows out of bounds are zero."""
    tiles, count = work.tiles, work.tiles.depth // FORMATS[format] * WORDS
    weight_ref = refs.weights.at[refs.layer[0]]

    def copy(k, _):
        slot = lax.rem(k, tiles.stages)

        @pl.when(k >= tiles.stages)
        def _wait():
            plgpu.barrier_wait(shared.free.at[slot])

        full = shared.full.at[slot]
        for number in range(work.weights):
            first = work.first + number * work.outputs + column
            words = weight_ref.at[pl.ds(first, WIDE), pl.ds((begin + k) * count, count)]
            place = shared.words.at[slot, pl.ds(number * WIDE, WIDE)]
            plgpu.copy_gmem_to_smem(words, place, full)
        x = refs.x.at[pl.ds(row, tiles.rows), pl.ds((begin + k) * tiles.depth, tiles.depth)]
        plgpu.copy_gmem_to_smem(x, shared.rows.at[slot], full)

    lax.fori_loop(0, work.segment_steps, copy, None)


def _norms(shared, work, inputs):
    """Returns the norm scales of the rows, which are columns of the accumulators."""
    plgpu.barrier_wait(shared.loaded.at[1])
    squares = plgpu.load(shared.chunks, layout=LAYOUT, optimized=False)
    of_rows = LAYOUT.reduce(1)
    mean = times(added_up([squares], work.order.digits_of_chunks), 1.0 / inputs, layout=of_rows)
    shared.norms[...] = inverse_root(plus(mean, work.eps, layout=of_rows), layout=of_rows)
    norms = shared.norms.at[pl.ds(0, work.tiles.rows)]
    return plgpu.load(norms, layout=LAYOUT.reduce(0), optimized=False)


def _sums(refs, shared, work, format, column, begin):
    """Consumer: multiplies the blocks of a segment, from step `begin`.

    Returns the accumulators, outputs by rows.
    """
    tiles, layer = work.tiles, refs.layer[0]
    groups, inputs = tiles.depth // GROUP, FORMATS[format]
    blocks, ahead = tiles.depth // inputs, max(1, _AHEAD // work.weights // tiles.depth)
    outputs = [work.first + i * work.outputs + column for i in range(work.weights)]
    share, _ = shares_of(refs.weights.shape, refs.scales.shape)

    def scales_at(step):
        first = (begin + jnp.minimum(step, work.segment_steps - 1)) * groups
        return [[_stored(refs, layer, o, share, first + i) for i in range(groups)] for o in outputs]

    def add_all(*sums_refs):
        def add(k, later):
            scales, *later = [*later, scales_at(k + ahead)]
            slot = lax.rem(k, tiles.stages)

            # Products in flight are of the previous step: those of the step before are complete.
            @pl.when(k > 1)
            def _free():
                plgpu.barrier_arrive(shared.free.at[lax.rem(k - 2, tiles.stages)])

            plgpu.barrier_wait(shared.full.at[slot])
            for block, (i, sums_ref) in itertools.product(range(blocks), enumerate(sums_refs)):
                at = pl.ds(i * WIDE, WIDE), pl.ds(block * WORDS, WORDS)
                words = plgpu.load(shared.words.at[slot, *at], layout=LAYOUT)
                for number in range(inputs // PAIR):
                    first = block * inputs + number * PAIR
                    x = shared.rows.at[slot, :, pl.ds(first, PAIR)]
                    weight = _dequantised(words, scales[i][first // GROUP], number, format)
                    plgpu.wgmma(sums_ref, weight, x.transpose((1, 0)))
                    plgpu.wgmma_wait(_IN_FLIGHT // work.weights)
            return tuple(later)

        lax.fori_loop(0, work.segment_steps, add, tuple(map(scales_at, range(ahead))))
        plgpu.wgmma_wait(0)
        return [sums_ref[...] for sums_ref in sums_refs]

    shape = plgpu.ACC((WIDE, tiles.rows), jnp.float32)
    return pl.run_scoped(add_all, *[shape] * work.weights)


def _stored(refs, layer, output, share, group):
    """Loads the scales of `WIDE` outputs in a group: a vector, or one number for all."""
    if share > 1:
        return refs.scales[layer, lax.div(output, share), group]
    at = refs.scales.at[layer, pl.ds(output, WIDE), group]
    return plgpu.load(at, layout=LAYOUT.reduce(1), optimized=False)


def _dequantised(words, stored, number, format):
    """Dequantises two neighbouring parts of a block as an operand of WGMMA in registers."""
    if format == "int4_w4a16":
        scales = int4_scales(stored)
        texts = [int4_assembly(2 * number + i, scales.rest is not None) for i in range(2)]
        columns = [scales.upper, *([] if scales.rest is None else [scales.rest, scales.shift])]
    else:
        texts = [fp8_assembly(2 * number + i, is_scaled=True) for i in range(2)]
        columns = [stored]
    columns = [_across(column, words.shape) for column in columns]
    kind = plgpu.ShapeDtypeStruct((WIDE, PAIR), jnp.bfloat16, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * (1 + len(columns)), return_type=kind)
    def apply(_, words, *columns):
        parts = [words._pointwise(functools.partial(_two_codes, text), *columns) for text in texts]
        registers = np.concatenate([part.registers for part in parts], axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return apply(words, *columns)


def _across(column, shape):
    if column.ndim:
        return lax.broadcast_in_dim(column, shape, [0])
    return plgpu.layout_cast(lax.broadcast(column, shape), LAYOUT)


def _two_codes(text, words, *scales):
    """Applies PTX to the codes of two neighbouring words of a thread."""
    word = ir.IntegerType.get_signless(32)
    places = [ir.DenseI64ArrayAttr.get([i]) for i in range(2)]
    given = [vector.extract(words, dynamic_position=[], static_position=at) for at in places]
    given += [llvm.bitcast(word, scale) for scale in scales]
    made = llvm.inline_asm(word, given, text, ",".join(["=r"] + ["r"] * len(given)))
    return llvm.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), made)
