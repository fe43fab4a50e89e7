"""Vision encoder attention with WGMMA and TMA, warp-specialised (Pallas, Mosaic GPU).

A program has two or three consumer warpgroups, each with 64 patches of a head, and a producer
warpgroup that loads tiles of keys and values for all of them. While a warpgroup computes the
softmax weights of a tile, its tensor cores compute the scores of the next. Tiles and their order
equal those of `encoder_attention`, so results are bitwise equal.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.online_softmax import NEGATIVE
from kernels.pallas_gpu.attention.verify_sm90_mainloop import LANES, TILE, beside
from kernels.pallas_gpu.gemm.linear_sm90 import has_mosaic
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import LINES
from kernels.pallas_gpu.gemm.ptx import (
    LAYOUT,
    divided,
    flushed_power_of_two,
    product_of,
    sum_of,
    times,
)
from kernels.tiles import EncoderAttentionTiles

MAIN, REST, BESIDE = 64, 8, 16
"""Columns of a head's two blocks, and of the second block with the total weight and padding."""
COPYING_REGISTERS = 24
REGISTERS = {2: 240, 3: 160}
"""Registers per consumer thread, by number of consumer warpgroups."""
_OF_ROWS = LAYOUT.reduce(1)


class EncoderRefs(NamedTuple):
    """Global memory references of a program."""

    laid: Any
    count: Any
    out: Any


class EncoderBuffers(NamedTuple):
    """Shared memory of a program, with both column blocks of each array.

    Attributes:
      q, q_rest: Queries of each warpgroup.
      k, k_rest, v, v_beside: Keys and values, one tile per pipeline stage.
      lines, lines_rest: Output rows of each warpgroup, staged for the copy.
      queries_come, come, is_free: Barriers: queries have arrived, a tile has arrived, a tile is
        free.
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    v_beside: Any
    lines: Any
    lines_rest: Any
    queries_come: Any
    come: Any
    is_free: Any


class EncoderSoftmaxState(NamedTuple):
    """Online softmax accumulator: maximum score, weighted values of a head's two column blocks."""

    peak: Any
    main: Any
    beside: Any


class EncoderTileWork(NamedTuple):
    """Compile-time settings of the kernel.

    Attributes:
      heads: Number of heads.
      scale: Multiplier of the scores, times log2(e).
      groups, stages: Consumer warpgroups, and pipeline stages.
    """

    heads: int
    scale: float
    groups: int
    stages: int


def takes(qkv: Float[jax.Array, "R columns"], D: int, tile: int) -> bool:
    """Returns whether `encoder_attention_sm90` supports the arrays: bfloat16 on Hopper.

    Args:
      qkv: See `bidirectional_attention`.
      D: Size of a head.
      tile: Patches of a tile.
    """
    return D == MAIN + REST and tile == TILE and qkv.dtype == jnp.bfloat16 and has_mosaic()


# A separate function, which is lowered and compiled once for all layers: for a Mosaic GPU kernel
# that takes half a second.
@functools.partial(jax.jit, static_argnames=("num_rows", "heads", "scale", "tiles"), inline=False)
def encoder_attention_sm90(
    laid: Float[jax.Array, "rows width"],
    count: Int[jax.Array, " 1"],
    num_rows: int,
    *,
    heads: int,
    scale: float,
    tiles: EncoderAttentionTiles,
) -> Float[jax.Array, "num_rows hidden"]:
    """Same as `bidirectional_attention`, for arrays that `takes` accepts.

    Args:
      laid: Output of `lay`, padded to the rows of whole programs.
      count: See `bidirectional_attention`.
      num_rows: Rows of the result.
      heads: Number of heads.
      scale: Multiplier of the scores, times log2(e).
      tiles: Tile config.
    """
    work = EncoderTileWork(heads=heads, scale=scale, groups=tiles.groups, stages=tiles.described)
    # Mosaic GPU drops a dimension of size 1, and with it the offset along it.
    shape = max(num_rows, 2), heads * (MAIN + REST)
    out = plgpu.kernel(
        functools.partial(_encoder_attention_sm90_kernel, work=work),
        out_type=jax.ShapeDtypeStruct(shape, laid.dtype),
        grid=(heads, len(laid) // (tiles.groups * LANES)),
        grid_names=("head", "block"),
        num_threads=tiles.groups + 1,
        thread_name="group",
        scratch_types=_shared_of(work)._asdict(),
        compiler_params=plgpu.CompilerParams(),
        kernel_name="encoder_attention_sm90",
    )(laid, count)
    return out[:num_rows]


def _shared_of(work):
    """Returns the shared memory types of a program."""
    kind, groups, stages = jnp.bfloat16, work.groups, work.stages

    def block(number, columns):
        line = columns * kind.dtype.itemsize
        layout = plgpu.TilingTransform((LINES, columns)), plgpu.SwizzleTransform(line)
        return plgpu.SMEM((number, TILE, columns), kind, transforms=layout)

    return EncoderBuffers(
        q=block(groups, MAIN),
        q_rest=block(groups, BESIDE),
        k=block(stages, MAIN),
        k_rest=block(stages, BESIDE),
        v=block(stages, MAIN),
        v_beside=block(stages, BESIDE),
        lines=plgpu.SMEM((groups, LANES, MAIN), kind),
        lines_rest=plgpu.SMEM((groups, LANES, REST), kind),
        queries_come=plgpu.Barrier(num_arrivals=2 * groups),
        come=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        is_free=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )


def _encoder_attention_sm90_kernel(*refs, work, **shared):
    """One program per head, and `groups` blocks of 64 rows."""
    refs, shared = EncoderRefs(*refs), EncoderBuffers(**shared)
    head, group = lax.axis_index("head"), lax.axis_index("group")
    first, count = lax.axis_index("block") * work.groups * LANES, refs.count[0]
    tiles = jnp.where(first < count, pl.cdiv(count, TILE), 0)

    @pl.when((group == work.groups) & (tiles > 0))
    def _copy():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        _copy_tiles(refs, shared, first, tiles, head, work)

    @pl.when((group < work.groups) & (tiles > 0))
    def _attend():
        plgpu.set_max_registers(REGISTERS[work.groups], action="increase")
        sums = _sums_of(shared, group, count, tiles, work)
        _write(refs, shared, group, first, head, sums)

    @pl.when((group < work.groups) & (tiles == 0))
    def _clear():
        _write(refs, shared, group, first, head, _nothing())


def _copy_tiles(refs, shared, first, tiles, head, work):
    """Loads the warpgroups' queries, then tiles of keys and values into free stages (producer)."""
    heads = work.heads

    def copy(row, number, to, to_rest, barrier):
        for begin, block in ((0, to), (3 * heads * MAIN, to_rest)):
            columns = block.shape[1]
            tile = refs.laid.at[pl.ds(row, TILE), pl.ds(begin + number * columns, columns)]
            plgpu.copy_gmem_to_smem(tile, block, barrier)

    for group in range(work.groups):
        to, to_rest = shared.q.at[group], shared.q_rest.at[group]
        copy(first + group * LANES, head, to, to_rest, shared.queries_come)

    def copy_tile(i, _):
        slot = lax.rem(i, work.stages)

        @pl.when(i >= work.stages)
        def _wait():
            plgpu.barrier_wait(shared.is_free.at[slot])

        barrier, row = shared.come.at[slot], i * TILE
        copy(row, heads + head, shared.k.at[slot], shared.k_rest.at[slot], barrier)
        copy(row, 2 * heads + head, shared.v.at[slot], shared.v_beside.at[slot], barrier)

    lax.fori_loop(0, tiles, copy_tile, None)


def _nothing():
    """Returns an empty accumulator."""
    return EncoderSoftmaxState(
        plgpu.layout_cast(jnp.full((LANES,), NEGATIVE, jnp.float32), _OF_ROWS),
        *(
            plgpu.layout_cast(jnp.zeros((LANES, columns), jnp.float32), LAYOUT)
            for columns in (MAIN, BESIDE)
        ),
    )


def _sums_of(shared, group, count, tiles, work):
    """Accumulates all patches for the 64 rows of a warpgroup."""
    zeros = plgpu.layout_cast(jnp.zeros((LANES, TILE), jnp.float32), LAYOUT)

    def compute_scores(i, meanwhile):
        """Computes the scores of a tile while `meanwhile` runs."""
        slot = lax.rem(i, work.stages)
        plgpu.barrier_wait(shared.come.at[slot])

        def multiply(scores_ref):
            keys = shared.k.at[slot].transpose((1, 0))
            plgpu.wgmma(scores_ref, shared.q.at[group], keys)
            keys = shared.k_rest.at[slot].transpose((1, 0))
            plgpu.wgmma(scores_ref, shared.q_rest.at[group], keys)
            return meanwhile(), scores_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((LANES, TILE), jnp.float32))

    def softmax_weights(scores, peak):
        highest = jnp.maximum(peak, scores.max(axis=1))
        weights = flushed_power_of_two(scores - beside(highest, TILE)).astype(jnp.bfloat16)
        return highest, weights, flushed_power_of_two(peak - highest, _OF_ROWS)

    def add_values(i, sums, highest, weights, decay):
        slot = lax.rem(i, work.stages)
        scaled = (product_of(x, beside(decay, x.shape[1])) for x in (sums.main, sums.beside))

        def multiply(main_ref, beside_ref):
            plgpu.wgmma(main_ref, weights, shared.v.at[slot])
            plgpu.wgmma(beside_ref, weights, shared.v_beside.at[slot])

        of_main, of_beside = pl.run_state(lambda refs: multiply(*refs))(
            tuple(plgpu.ACC.init(x) for x in scaled)
        )
        plgpu.barrier_arrive(shared.is_free.at[slot])
        return EncoderSoftmaxState(highest, of_main, of_beside)

    def add(i, carry):
        scores, sums = carry
        tile_weights, next_scores = compute_scores(
            i + 1, lambda: softmax_weights(times(scores, work.scale), sums.peak)
        )
        return next_scores, add_values(i, sums, *tile_weights)

    plgpu.barrier_wait(shared.queries_come)
    _, scores = compute_scores(0, lambda: None)
    scores, sums = lax.fori_loop(0, tiles - 1, add, (scores, _nothing()))
    # The last patch is repeated to the end of its tile, with weight 0.
    patch = plgpu.broadcasted_iota(jnp.int32, (LANES, TILE), 1, layout=LAYOUT)
    padding_bias = jnp.where(patch + (tiles - 1) * TILE < count, zeros, zeros + NEGATIVE)
    scores = sum_of(times(scores, work.scale), padding_bias)
    return add_values(tiles - 1, sums, *softmax_weights(scores, sums.peak))


def _write(refs, shared, group, first, head, sums):
    """Divides by the total weight and writes a head of 64 rows."""
    column = plgpu.broadcasted_iota(jnp.int32, (LANES, BESIDE), 1, layout=LAYOUT)
    total = jnp.where(column == REST, sums.beside, 0.0).max(axis=1)
    weight = jnp.maximum(total, 1e-30)
    blocks = (shared.lines, MAIN, sums.main), (shared.lines_rest, REST, sums.beside)
    for lines, columns, value in blocks:
        out = divided(value, beside(weight, value.shape[1]))[:, :columns]
        lines[group] = out.astype(jnp.bfloat16)
    plgpu.commit_smem()
    row, at = first + group * LANES, head * (MAIN + REST)
    for lines, start, columns in (shared.lines, at, MAIN), (shared.lines_rest, at + MAIN, REST):
        to = refs.out.at[pl.ds(row, LANES), pl.ds(start, columns)]
        plgpu.copy_smem_to_gmem(lines.at[group], to)
    plgpu.wait_smem_to_gmem(0)
