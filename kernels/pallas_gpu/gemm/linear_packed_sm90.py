"""WGMMA GEMM of few rows with a packed weight, and TMA copies (Pallas, Mosaic GPU).

Outputs are the wide side of the tensor core, rows the other one. Gate and up are two accumulators.
The main loop is in `linear_packed_sm90_mainloop`.

With segments along the inputs the programs of a block, one per segment, form a thread block
cluster. The later ones store their partial sums in the shared memory of the first, which adds them
in order.

Accumulation is one chain along the inputs of a segment, a weight is dequantised as by
`block_loaders`, and the epilogue computes as in `linear`, so the bits equal that kernel's and
Triton's.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int, Int32, Shaped

from kernels.pallas_gpu.gemm.linear_epilogue import PARTS, SQUARES_AT_ONCE, WIDE, added_up
from kernels.pallas_gpu.gemm.linear_packed_sm90_mainloop import (
    FORMATS,
    GROUPS,
    WORDS,
    copy_blocks,
    is_large,
    sums_of,
)
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
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from shared.spec.reduction_order import SquaresOrder

_MOST_SEGMENTS = 8
"""Maximum programs of a portable thread block cluster."""
_SHARED_BYTES = (227 - 4) * 1024
"""Shared memory of a program of an H100 or H200, without barriers and padding."""


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
    """Returns whether `linear` supports a call: few bfloat16 rows, scales of `GROUPS` inputs.

    `is_plain` states that there is neither a bias nor an LM-head epilogue. The rows are fewer than
    a group of lines, or whole groups; several tiles have `WIDE` rows or more. Segments must be
    whole steps, without a norm before.
    """
    if scales is None or not tiles.copies_swapped or format not in FORMATS or not has_mosaic():
        return False
    rows, inputs = x.shape
    is_tile = tiles.columns == WIDE and tiles.warps == WARPS
    is_tile &= rows < LINES or rows % LINES == 0
    is_tile &= rows <= tiles.rows or tiles.rows >= WIDE
    is_whole = inputs % tiles.depth == 0 and tiles.depth % (2 * FP8_BLOCK) == 0
    is_whole &= inputs in (group * scales.shape[2] for group in GROUPS[format])
    # All outputs of a tile are in one block of scales.
    is_whole &= outputs % WIDE == 0 and first % WIDE == 0 and order.chunk == WIDE
    is_typed = x.dtype == jnp.bfloat16 and x.dtype == out_type
    is_typed &= scales.dtype in (jnp.bfloat16, jnp.int32)
    is_typed &= added is None or added.dtype == x.dtype
    if segments > 1:
        is_whole &= inputs % (segments * tiles.depth) == 0 and squares is None
        is_tile &= tiles.separate and segments <= _MOST_SEGMENTS
    sizes = {"weights": (weights.shape[1] - first) // outputs, "segments": segments}
    is_tile &= _stages(tiles, rows, format, squares, added, **sizes) > 1
    return is_tile and is_whole and is_typed and is_plain


def _rows(tiles, rows):
    """Returns the rows of a tile of a call."""
    return max(LINES, min(tiles.rows, pl.next_power_of_2(rows)))


def _parts(rows, weights, added):
    """Returns the number of parts of a result."""
    return 1 if is_large(rows, weights) and added is None else PARTS


def _filled(chunks):
    """Returns the sums of squares of a row in whole columns of the layout."""
    return pl.cdiv(chunks, SQUARES_AT_ONCE) * SQUARES_AT_ONCE


def _stages(tiles, rows, format, squares, added, *, weights, segments):
    """Returns the stages of a call, at most those that shared memory has space for."""
    rows = _rows(tiles, rows)
    words = weights * WIDE * (tiles.depth // FORMATS[format]) * WORDS
    fixed = _parts(rows, weights, added) * rows * WIDE * 2 + (segments - 1) * WIDE * rows * 4
    if squares is not None:
        fixed += max(WIDE, rows) * (_filled(squares.shape[1]) + 1) * 4
    return min(tiles.stages, (_SHARED_BYTES - fixed) // (rows * tiles.depth * 2 + words * 4))


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
    if squares is not None:  # zeros add nothing
        chunks = squares.shape[1]
        squares = jnp.pad(squares, ((0, 0), (0, _filled(chunks) - chunks)))
    sizes = {"weights": 2 if is_gated else 1, "segments": segments}
    stages = _stages(tiles, R, format, squares, added, **sizes)
    tiles = replace(tiles, rows=_rows(tiles, R), stages=stages)
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
        row_blocks=pl.cdiv(R, tiles.rows),
        blocks=N // WIDE,
        steps=inputs // tiles.depth,
        segments=segments,
        tiles=tiles,
    )
    buffers = _buffers(work, format, squares, added)._asdict()
    # Programs of the same weight are neighbours.
    grid = {"row": 1, "column": work.blocks}
    if work.row_blocks > 1:
        grid = {"column": work.blocks, "row": work.row_blocks}
    cluster = {"cluster": (segments,), "cluster_names": ("segment",)} if segments > 1 else {}
    out, *left = plgpu.kernel(
        functools.partial(_packed_kernel, work=work, format=format),
        out_type=tuple(results.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        **cluster,
        num_threads=2,
        thread_name="group",
        scratch_types={name: kind for name, kind in buffers.items() if kind},
        compiler_params=plgpu.CompilerParams(),
        kernel_name="linear_packed_sm90",
    )(*operands.values())
    if added is None:
        return out, None, None, None
    return out, None if norm is None else left[0], left[-1], None


def _buffers(work, format, squares, added):
    """Returns the shared-memory types of a program."""
    tiles, blocks = work.tiles, work.tiles.depth // FORMATS[format]

    def swizzled(count, rows, columns, dtype):
        item_bytes = np.dtype(dtype).itemsize
        line = min(LINE_BYTES // item_bytes, columns)
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(line * item_bytes)
        return plgpu.SMEM((count, rows, columns), dtype, transforms=layout)

    more = {}
    if squares is not None:
        rows = max(WIDE, tiles.rows)
        more["chunks"] = plgpu.SMEM((rows, squares.shape[1]), jnp.float32)
        more["norms"] = plgpu.SMEM((rows,), jnp.float32)
    if work.segments > 1:
        more["partials"] = swizzled(work.segments - 1, WIDE, tiles.rows, jnp.float32)
        more["received"] = plgpu.Barrier(num_barriers=work.segments - 1)
    return PackedBuffers(
        rows=swizzled(tiles.stages, tiles.rows, tiles.depth, jnp.bfloat16),
        words=swizzled(tiles.stages, work.weights * WIDE, blocks * WORDS, jnp.int32),
        full=plgpu.Barrier(num_arrivals=1 + work.weights, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_barriers=tiles.stages),
        parts=plgpu.SMEM((_parts(tiles.rows, work.weights, added), tiles.rows, WIDE), jnp.bfloat16),
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
        copy_blocks(refs, shared, work, format, row, column, begin)

    @pl.when(group == 0)
    def _multiply():
        if work.segments > 1:
            _multiply_segment(refs, shared, work, format, row, column, segment)
            return
        if work.has_squares:
            chunks = refs.squares.at[pl.ds(row, max(WIDE, work.tiles.rows))]
            plgpu.copy_gmem_to_smem(chunks, shared.chunks, shared.loaded.at[1])
        turned = SwappedResult(refs, shared, work, row, column)
        turned.prepare()
        norms = _norms(shared, work, refs.x.shape[1]) if work.has_squares else None
        turned.store(sums_of(refs, shared, work, format, column, begin), norms)
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
    (sums,) = sums_of(refs, shared, work, format, column, begin)  # no gate with segments

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


def _norms(shared, work, inputs):
    """Returns the norm scales of the rows, which are columns of the accumulators."""
    plgpu.barrier_wait(shared.loaded.at[1])
    of_rows = LAYOUT.reduce(1)
    for first in range(0, shared.norms.shape[0], WIDE):
        rows = pl.ds(first, WIDE)
        squares = plgpu.load(shared.chunks.at[rows], layout=LAYOUT, optimized=False)
        mean = times(added_up([squares], work.order.digits_of_chunks), 1.0 / inputs, layout=of_rows)
        norms = inverse_root(plus(mean, work.eps, layout=of_rows), layout=of_rows)
        shared.norms.at[rows][...] = norms
    norms = shared.norms.at[pl.ds(0, work.tiles.rows)]
    return plgpu.load(norms, layout=LAYOUT.reduce(0), optimized=False)
