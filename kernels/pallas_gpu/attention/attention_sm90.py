"""Paged attention of `attend` with WGMMA and TMA, warp-specialised (Pallas, Mosaic GPU).

A program has two consumer warpgroups: each processes up to 64 (row, query head) pairs of one KV
head, or one half of the values of a 256-wide head. A third warpgroup, the producer, loads tiles for
both. Tiles, splits, spans and their order equal those of `attention`, so results are bitwise equal.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.attention_layer_sm90 import (
    COLUMNS,
    COPYING_REGISTERS,
    REGISTERS,
)
from kernels.pallas_gpu.attention.online_softmax import LOG2_E
from kernels.pallas_gpu.attention.verify_sm90_loads import (
    WarpgroupTile,
    clear_padding,
    copy_tiles,
    fetch_queries,
    lane_sinks,
    piece_of,
    shared_of,
    write_result,
)
from kernels.pallas_gpu.attention.verify_sm90_mainloop import (
    GROUPS,
    LANES,
    TILE,
    PairMask,
    SplitRange,
    VerifyBuffers,
    VerifyTileWork,
    folded,
    loaded_pairs,
    nothing,
    spans_of,
    sum_span,
)
from kernels.tiles import AttentionTiles

_MOST_STAGED = 8 * COLUMNS
"""Maximum columns of all tiles of keys and values in shared memory."""


class PrefillRefs(NamedTuple):
    """Global memory references of a program.

    Attributes:
      q, gate, out: Queries, gates and outputs.
      pool: Keys and values of all layers, one row per position.
      layer, table, starts: See `attention`.
      pairs: `first` and `until` of all (row, query head) pairs.
      block_bounds: Bounds of each block: first visible position of any row and the end, and the
        range of positions that are visible to all rows.
      sinks: See `verify_sm90_loads.lane_sinks`; None without.
    """

    q: Any
    gate: Any
    pool: Any
    layer: Any
    table: Any
    starts: Any
    pairs: Any
    block_bounds: Any
    out: Any
    sinks: Any


def attention_sm90(
    q: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R outputs"] | None,
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    sinks: Float[jax.Array, "L2 Hq"] | None,
    sink_layer: Int[jax.Array, " 1"] | None,
    *,
    max_rows: int,
    span: int,
    split: int,
    scale: float,
    tiles: AttentionTiles,
) -> Float[jax.Array, "R outputs_of_heads"]:
    """Same as `attention.attend`, for arrays that `takes` accepts and rows without tree windows.

    Args:
      q, gate, kv, layer, page_table, row_starts, first, until, sinks, sink_layer: See `attend`.
      max_rows, span, split, scale, tiles: See `attend`.

    Raises:
      ValueError: `tiles` has more stages than shared memory allows.
    """
    (_, Hq, D), (P, page, Hk, _) = q.shape, kv.shape[2:]
    group, width = Hq // Hk, min(D, COLUMNS)
    rows, copied = min(LANES // group, max_rows), D // width
    blocks = pl.cdiv(max_rows, rows)
    work = VerifyTileWork(
        group=group,
        piece=piece_of(group, gate, D),
        D=D,
        width=width,
        copied=copied,
        rows=rows,
        blocks=blocks + blocks % 2 if copied == 1 else blocks,
        pages=P,
        programs=1,
        span=span,
        split=split,
        page=page,
        stages=tiles.described,
        scale=scale * LOG2_E,
        has_sinks=sinks is not None,
        gated=gate is not None,
    )
    room = _MOST_STAGED // width - work.spare
    if 2 * work.stages * copied > room:
        most = room // (2 * copied)
        raise ValueError(f"stages must be at most {most} for head size {D}, got {work.stages}")
    own = None if sinks is None else lane_sinks(sinks[sink_layer[0]], group)
    rows = page_table, row_starts, first, until
    return _attend(q, gate, kv, layer, *rows, own, work=work)


# A separate function, for the same reason as `attention_layer_sm90`.
@functools.partial(jax.jit, static_argnames=("work",), inline=False)
def _attend(q, gate, kv, layer, page_table, row_starts, first, until, sinks, *, work):
    (R, Hq, D), (L, _, P, page, Hk, _) = q.shape, kv.shape
    gates = q if gate is None else gate.reshape(R, -1, 2, D)
    pairs = jnp.repeat(jnp.stack([first, until]).astype(jnp.int32), work.group, axis=1)
    # Blocks past the last row read up to this many more pairs.
    pairs = jnp.pad(pairs, ((0, 0), (0, 2 * LANES)))
    out = plgpu.kernel(
        functools.partial(_attention_sm90_kernel, work=work),
        out_type=jax.ShapeDtypeStruct((R, Hq, D), q.dtype),
        grid=(len(page_table), work.blocks * work.parts // GROUPS, Hk),
        grid_names=("request", "number", "head"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=shared_of(work)._asdict(),
        compiler_params=plgpu.CompilerParams(),
        kernel_name="attention_sm90",
    )(
        *(q, gates, kv.reshape(L * 2 * P * page, Hk * D), layer, page_table, row_starts),
        *(pairs, _block_bounds_of(row_starts, first, until, work)),
        *([] if sinks is None else [sinks]),
    )
    return out.reshape(R, Hq * D)


def _block_bounds_of(row_starts, first, until, work):
    """Returns the mask bounds of the rows of each block; a block without rows has no positions."""
    start, stop = (x[:, None, None] for x in (row_starts[:-1], row_starts[1:]))
    row = start + jnp.arange(work.blocks)[:, None] * work.rows + jnp.arange(work.rows)
    is_one, row = row < stop, jnp.minimum(row, len(first) - 1)
    first, until, most = first[row], until[row], jnp.iinfo(jnp.int32).max
    block_bounds = [
        jnp.where(is_one, jnp.minimum(first, until), most).min(axis=2),
        jnp.where(is_one, until, 0).max(axis=2),
        jnp.where(is_one, first, 0).max(axis=2),
        jnp.where(is_one, until, most).min(axis=2),
    ]
    return jnp.stack(block_bounds, axis=2).astype(jnp.int32)


def _attention_sm90_kernel(*refs, work, **shared):
    """One program per request, two blocks of rows (one for a 256-wide head), and KV head."""
    *read, out = refs
    sinks = read.pop() if work.has_sinks else None
    refs, shared = PrefillRefs(*read, out, sinks), VerifyBuffers(**shared)
    request, head = lax.axis_index("request"), lax.axis_index("head")
    group, programs = lax.axis_index("group"), work.blocks * work.parts // GROUPS
    # The last rows attend to most positions: their programs, the longest, start first for all
    # heads.
    number = programs - 1 - lax.axis_index("number")
    first_block = number * GROUPS if work.is_shared else number
    start, stop = refs.starts[request], refs.starts[request + 1]
    share = _share(refs, request, first_block, start + first_block * work.rows < stop, work)

    @pl.when(group == GROUPS)
    def _copy():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        copy_tiles(refs, shared, share, request, head * work.D, work)

    @pl.when(group < GROUPS)
    def _attend_block():
        plgpu.set_max_registers(REGISTERS, action="increase")
        block = first_block + group if work.is_shared else first_block
        column = 0 if work.is_shared else group * work.width
        own = WarpgroupTile(head=head, column=column, row=start + block * work.rows, stop=stop)
        num_requests = refs.starts.shape[0] - 1
        index = request * work.blocks + block
        begin, stride = refs.starts[num_requests] + index, num_requests * work.blocks
        clear_padding(refs, shared, group, own, begin, stride, work)

        @pl.when(share.is_one)
        def _():
            fetch_queries(refs, shared, group, own, work)
            at = pl.ds(own.row * work.group, LANES)
            mask = PairMask(
                pairs=loaded_pairs(refs.pairs.at[i, at] for i in range(2)),
                whole_from=refs.block_bounds[request, block, 2],
                whole_until=refs.block_bounds[request, block, 3],
                old_from=0,
                old_until=0,
            )

            # Separate loop: within a span the total over spans is not used and may leave the
            # registers.
            def add(span, sums):
                return folded(sums, sum_span(shared, share, span, group, mask, work))

            sums = lax.fori_loop(*spans_of(share, work), add, nothing(work.width))
            write_result(refs, shared, group, own, sums, work)


def _share(refs, request, block, has_rows, work):
    """Returns the tiles that any row of a program attends to."""
    lows, highs = (
        [refs.block_bounds[request, block + i, which] for i in range(work.spare or 1)]
        for which in range(2)
    )
    low, high = functools.reduce(jnp.minimum, lows), functools.reduce(jnp.maximum, highs)
    high = jnp.minimum(high, refs.table.shape[1] * work.page)
    begin = lax.div(low, TILE)
    is_one = has_rows & (low < high)
    end = jnp.where(is_one, pl.cdiv(high, TILE), begin)
    return SplitRange(begin=begin, end=end, base=0, is_alone=True, is_one=has_rows)
