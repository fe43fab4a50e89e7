"""WGMMA GEMM with TMA copies and warp specialisation (Pallas, Mosaic GPU).

A program has the consumer warpgroups of its tiles and one producer warpgroup. The producer fills a
ring of blocks of rows and weight in shared memory. Programs are persistent, one per multiprocessor:
the first copies of a block overlap with the epilogue of the block before it.

With swap-AB tiles one program has all rows, which are few, and fewer operations can be fused, see
`takes`; the epilogue is in `linear_swap_ab`.

Accumulation is one chain along the inputs and the epilogue computes as in `linear`, so the bits
equal that kernel's and Triton's. If rows are not whole blocks, separate kernels compute the scales
of norms before the GEMM and the outputs next to the result after it.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32, Int

from kernels.pallas_gpu.gemm.layers import beside
from kernels.pallas_gpu.gemm.linear_epilogue import (
    PARTS,
    SQUARES_AT_ONCE,
    WIDE,
    EpilogueOutputs,
    scales_from,
    scales_of,
)
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import (
    LINE_BYTES,
    LINES,
    MOST_SUMS,
    WARPS,
    GemmBuffers,
    GemmRefs,
    GemmTileWork,
    copy_blocks,
    ring_of,
    sums_of,
    sums_of_codes,
)
from kernels.pallas_gpu.gemm.linear_swap_ab import SwappedResult
from kernels.pallas_gpu.sampling.lm_head_epilogue import (
    GROUP_SUMEXP,
    LOGITS,
    BlockPartials,
    RowOutputs,
    partial_shapes,
)
from kernels.tiles import LinearTiles
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from shared.models.formats.weight_format import first_row
from shared.spec.reduction_order import SquaresOrder

_PROGRAMS = 2
"""Concurrent programs on a multiprocessor, for FP8 and one consumer warpgroup."""
_JAX = (0, 11)
"""Version of jax with a supported Mosaic GPU; no jax from 0.11 on runs on Python 3.11."""
_SHARED_BYTES = (227 - 2) * 1024
"""Shared memory of a program of an H100 or H200, without barriers and padding."""
_COPYING_REGISTERS, _REGISTERS = 40, 512
"""Registers of a producer thread, and of one thread of every warpgroup together."""


def takes(
    x: Float[jax.Array, "R inputs"],
    weights: Float[jax.Array, "L stored inputs"],
    *,
    outputs: int,
    first: int,
    out_type: np.dtype | type,
    is_normed: bool,
    is_plain: bool,
    added: Float[jax.Array, "R outputs"] | None,
    order: SquaresOrder,
    tiles: LinearTiles,
    segments: int,
) -> bool:
    """Returns whether `linear_sm90` supports a call: bfloat16 or FP8, whole lines, Hopper.

    A norm before and a residual after are not supported together, because the compiler may fuse a
    product with a sum here.

    `is_plain` states that there is neither a norm before, nor a gate, a bias or an LM-head epilogue
    after it, as swap-AB tiles require. Their rows are fewer than a group of lines, or whole groups.
    Segments must be whole steps.
    """
    line = LINE_BYTES // x.dtype.itemsize
    is_whole = not (x.shape[1] % line or outputs % line or first % LINES)
    is_addable = added is None or (added.dtype == np.dtype(out_type) and not is_normed)
    is_supported = is_whole and is_addable and x.dtype == weights.dtype
    is_supported &= segments == 1 or x.shape[1] % (segments * tiles.depth) == 0
    is_supported &= x.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    if tiles.swapped:
        are_lines = len(x) < LINES or len(x) % LINES == 0
        is_supported &= is_plain and are_lines and len(x) <= tiles.rows and order.chunk == WIDE
        # Parts in shared memory are read and written transposed, which requires 16-bit elements.
        is_supported &= x.dtype == out_type
    return is_supported and has_mosaic()


def is_on_hopper() -> bool:
    """Returns whether the GPU is a Hopper, or is described as one for a trace without a GPU."""
    return _tma_gpu() is not None or getattr(_gpu(), "compute_capability", None) == "9.0"


def has_mosaic() -> bool:
    """Returns whether Mosaic GPU kernels can run: on a Hopper, with the supported jax.

    Other versions have another Mosaic GPU: jax 0.10 cannot trace these kernels, 0.12 cannot lower
    them.
    """
    return is_on_hopper() and jax.__version_info__[:2] == _JAX


# Jitted so that a program contains it once for all layers: lowering and compiling a Mosaic GPU
# kernel takes half a second.
@functools.partial(
    jax.jit,
    static_argnames=(
        *("num_rows", "first", "out_type", "eps", "is_gated", "activation"),
        *("factor", "order", "tiles", "segments"),
    ),
)
def linear_sm90(
    x: Float[jax.Array, "R inputs"],
    weights: Float[jax.Array, "L stored inputs"],
    layer: Int[jax.Array, ""],
    scales: Float32[jax.Array, "L blocks blocks_in"] | None = None,
    row_scales: Float32[jax.Array, "blocks_in rows"] | None = None,
    *,
    num_rows: int | None = None,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None,
    eps: float,
    is_gated: bool,
    activation: Activation = SILU_AND_MUL,
    bias: Float[jax.Array, "L stored"] | None,
    factor: float,
    added: Float[jax.Array, "R outputs"] | None,
    norm: Float[jax.Array, "L2 outputs"] | None,
    norm_layer: Int[jax.Array, ""],
    order: SquaresOrder,
    tiles: LinearTiles,
    asks: RowOutputs | None = None,
    segments: int = 1,
) -> tuple[
    Float[jax.Array, "R outputs"],
    Float[jax.Array, "R outputs"] | None,
    Float[jax.Array, "R chunks_out"] | None,
    BlockPartials | None,
]:
    """Same as `linear.product`, for arrays that `takes` accepts.

    Raises:
      ValueError: The tiles are invalid for this kernel; the message names the rule.
    """
    K, N = x.shape[1], (weights.shape[1] - first) // (2 if is_gated else 1)
    _check(tiles, np.dtype(out_type))
    tiles = tiles if segments == 1 else tiles_of_segments(tiles, x.dtype.itemsize)
    R, programs = num_rows or len(x), 1
    row_blocks = pl.cdiv(R, tiles.rows)
    operands = {"x": _pad_to_lines(x), "weights": weights, "layer": layer.reshape(1)}
    if row_scales is not None:
        _check_codes(tiles, first)
        operands |= {"scales": scales, "row_scales": row_scales}
        # With one consumer warpgroup, several programs fit a multiprocessor.
        programs = _PROGRAMS if tiles.warps == WARPS else 1
    columns = pl.cdiv(N, tiles.columns)
    programs = min(row_blocks * columns, programs * _multiprocessors())
    is_whole = R % tiles.rows == 0
    if squares is not None:
        # Computed once per program, if all its blocks have the same rows.
        is_found = is_whole and not (programs % row_blocks or squares.shape[1] % SQUARES_AT_ONCE)
        if is_found:
            operands["squares"] = squares
        else:
            operands["scale"] = scales_of(squares, row_blocks * tiles.rows, K, eps, order)
    if bias is not None:
        operands["bias"] = bias
    results = {"out": jax.ShapeDtypeStruct((len(operands["x"]), N), out_type)}
    fuses_next_norm = added is not None and (is_whole or tiles.swapped)
    fuses_next_norm &= tiles.columns % order.chunk == 0
    if added is not None:
        operands["added"] = _pad_to_lines(added)
    if fuses_next_norm:
        if norm is not None:
            operands |= {"norms": norm, "norm_layer": norm_layer.reshape(1)}
            results["scaled"] = results["out"]
        results["sums"] = jax.ShapeDtypeStruct((R, pl.cdiv(N, order.chunk)), jnp.float32)
    if asks is not None:
        needed, temperature = (jnp.pad(x, (0, row_blocks * tiles.rows - R)) for x in asks[:2])
        # The temperature of padding rows divides values that are never read.
        needed = needed.reshape(-1, WIDE)
        needed = (needed & LOGITS).max(axis=1) | (needed & GROUP_SUMEXP).max(axis=1)
        operands |= {"asks": needed, "temperature": temperature}
        operands["tokens"] = asks.tokens
        results |= partial_shapes(len(temperature), N, tiles.columns)
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
        row_blocks=row_blocks,
        blocks=row_blocks * columns,
        steps=pl.cdiv(K, tiles.depth),
        segments=segments,
        tiles=tiles,
    )
    out, *left = plgpu.kernel(
        functools.partial(_product_kernel, work=work),
        out_type=tuple(results.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=work.groups + 1,
        thread_name="group",
        scratch_types=ring_of(work, x.dtype, np.dtype(out_type))._asdict(),
        compiler_params=plgpu.CompilerParams(),
        kernel_name="linear_sm90",
    )(*operands.values())
    out = out[:R]
    if fuses_next_norm:
        return out, None if norm is None else left[0][:R], left[-1], None
    if added is not None:
        return (out, *beside(out, norm, norm_layer, order=order), None)
    return out, None, None, BlockPartials(*asks, *left) if asks else None


def tiles_of_segments(tiles: LinearTiles, item_bytes: int) -> LinearTiles:
    """Returns tiles with space for both the finished sums and the accumulators of a segment.

    Registers hold both, or shared memory next to the ring half of the finished sums. Otherwise the
    tiles get fewer columns, which leave shared memory for more stages.
    """
    most = MOST_SUMS * tiles.warps // tiles.rows
    if tiles.swapped or tiles.columns <= most or _stores_half(tiles, 2 * most, item_bytes):
        return tiles
    stages = tiles.stages * (tiles.rows + tiles.columns) // (tiles.rows + most)
    return replace(tiles, columns=most, stages=stages)


def _stores_half(tiles, columns, item_bytes):
    """Returns whether tiles have the columns, and half of the sums fits next to the ring."""
    ring = tiles.stages * (tiles.rows + tiles.columns) * tiles.depth * item_bytes
    parts = tiles.warps // WARPS * PARTS * WIDE * LINE_BYTES // 2
    half = 4 * tiles.rows * tiles.columns // 2
    return tiles.columns == columns and ring + parts + half <= _SHARED_BYTES


def _check(tiles: LinearTiles, out_type: np.dtype) -> None:
    groups, line = tiles.warps // WARPS, LINE_BYTES // out_type.itemsize
    wide = tiles.columns if tiles.swapped else tiles.rows
    wrong = {
        "be persistent": not tiles.persistent,
        f"have {WARPS} warps or more": not groups,
        f"have {WIDE} columns and {WARPS} warps where they are swapped": tiles.swapped
        and (wide, tiles.warps) != (WIDE, WARPS),
        f"have {WIDE} rows or more for {WARPS} warps": groups * WIDE > wide,
        f"have {line} columns or more": tiles.columns < line,
        "have a depth of 32 or more": tiles.depth < LINE_BYTES // 4,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"described tiles must {what}, got {tiles}")


def _check_codes(tiles: LinearTiles, first: int) -> None:
    wrong = {
        "not be swapped": tiles.swapped,
        f"have a depth of {FP8_BLOCK}": tiles.depth != FP8_BLOCK,
        f"have columns that divide {FP8_BLOCK}": FP8_BLOCK % tiles.columns,
        f"have rows that divide {FP8_BLOCK}": FP8_BLOCK % tiles.rows,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"tiles of FP8 rows must {what}, got {tiles}")
    first_row(first, FP8_BLOCK, 1)


def _pad_to_lines(x):
    """Pads rows to whole groups of lines; fewer rows than a group are not padded."""
    spare = -len(x) % LINES if len(x) > LINES else 0
    return jnp.pad(x, ((0, spare), (0, 0))) if spare else x


def _multiprocessors():
    described = _tma_gpu()
    return _gpu().core_count if described is None else described.num_cores


def _tma_gpu():
    """Returns the GPU described for a trace without a GPU, as in `bench.kernels.aot`."""
    return jax.sharding.get_abstract_mesh().abstract_device


def _gpu():
    return jax.devices()[0]


def _product_kernel(*refs, work, **shared):
    """One persistent program per multiprocessor, with strided blocks; rows vary first."""
    refs = GemmRefs(**dict(zip((*work.operands, *work.results), refs, strict=True)))
    shared = GemmBuffers(**shared)
    program, group = lax.axis_index("program"), lax.axis_index("group")
    programs = lax.axis_size("program")
    count = pl.cdiv(work.blocks - program, programs)
    # A lone consumer warpgroup needs few registers, so another program can use the rest.
    is_alone = work.is_quantised and work.groups == 1

    def tile_origin(i):
        # Concurrent programs share blocks of the weight; the rows are in the L2 cache anyway.
        block = program + i * programs
        row, column = lax.rem(block, work.row_blocks), lax.div(block, work.row_blocks)
        return row * work.tiles.rows, column * work.tiles.columns

    def rows_of_group(row):
        return row + group * (work.tiles.rows // work.groups)

    @pl.when(group == work.groups)
    def _copy():
        if not is_alone:
            plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")
        layer = refs.layer[0]

        def copy(i, _):
            copy_blocks(
                refs.x, refs.weights.at[layer], shared, work, i * work.steps, *tile_origin(i)
            )

        lax.fori_loop(0, count, copy, None)

    @pl.when(group < work.groups)
    def _multiply():
        if not is_alone:
            plgpu.set_max_registers(_multiplying_registers(work.groups), action="increase")

        scales = None
        if work.has_squares:
            scales = scales_from(refs, work, rows_of_group(tile_origin(0)[0]))

        def multiply(i, _):
            row, column = tile_origin(i)
            row = rows_of_group(row)
            if work.tiles.swapped:
                turned = SwappedResult(refs, shared, work, row, column)
                turned.prepare()
                turned.store(sums_of(shared, work, group, i * work.steps))
                return
            result = EpilogueOutputs(refs, shared, work, group, row, column, scales)
            result.prepare()
            if work.is_quantised:
                sums = sums_of_codes(refs, shared, work, group, i * work.steps, row, column)
            else:
                sums = sums_of(shared, work, group, i * work.steps)
            if refs.asks is None:
                result.store(sums)
            else:
                result.store_block_partials(sums)

        lax.fori_loop(0, count, multiply, None)
        plgpu.wait_smem_to_gmem(0)


def _multiplying_registers(groups):
    """Returns the registers of a consumer thread; a warpgroup can request a multiple of 8."""
    return min(240, (_REGISTERS - _COPYING_REGISTERS) // groups // 8 * 8)
