"""TMA loads of tiles and stores of results for warp-specialised attention (Pallas, Mosaic GPU).

Used by `attention_layer_sm90` and `attention_sm90`: the K/V pipeline, rows of queries and outputs,
and padding.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas_gpu.attention.online_softmax import LOG2_E
from kernels.pallas_gpu.attention.verify_sm90_mainloop import (
    GROUPS,
    LANES,
    OF_ROWS,
    TILE,
    VerifyBuffers,
    beside,
)
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import LINE_BYTES, LINES
from kernels.pallas_gpu.gemm.ptx import LAYOUT, divided, flushed_power_of_two, sum_of, times


class WarpgroupTile(NamedTuple):
    """Pairs and columns of a warpgroup.

    Attributes:
      head, column: KV head of the pairs, and the first column in it.
      row, stop: First row of the pairs, and the end of the request's rows.
    """

    head: Any
    column: Any
    row: Any
    stop: Any

    def at(self, work, first=0, count=None):
        """Returns slices of `count` query heads from `first` on (None: all), and of the columns."""
        heads = pl.ds(self.head * work.group + first, count or work.group)
        return heads, pl.ds(self.column, work.width)


def piece_of(group, gate, D):
    """Returns the number of query heads of a KV head in one copy.

    A copy is a group of this many lines in shared memory, and its source must consist of whole
    groups. Gates are read from the projection, as lines of a head's query and gate; keys and values
    follow.
    """
    return group if gate is None else math.gcd(group, gate.shape[1] // (2 * D))


def lane_sinks(sinks, group):
    """Returns the sinks of the lanes of each KV head's warpgroups, [Hk, LANES]."""
    return sinks.reshape(-1, group).astype(jnp.float32)[:, jnp.arange(LANES) % group]


def shared_of(work):
    """Returns the shared memory types of a program."""
    kind = jnp.bfloat16

    def block(*shape):
        line = LINE_BYTES // kind.dtype.itemsize
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(LINE_BYTES)
        return plgpu.SMEM(shape, kind, transforms=layout)

    barrier = plgpu.Barrier(num_arrivals=work.copied, num_barriers=work.stages)
    return VerifyBuffers(
        queries=block(GROUPS, LANES, work.width),
        ones=block(LANES, TILE),
        keys=block(work.stages, work.copied, TILE, work.width),
        values=block(work.stages * work.copied + work.spare, TILE, work.width),
        lines=plgpu.SMEM((GROUPS, LANES, work.width), kind),
        bad=plgpu.SMEM((GROUPS, 2, TILE), jnp.int32),
        lines_come=plgpu.Barrier(num_arrivals=work.rows * work.pieces, num_barriers=GROUPS),
        keys_come=barrier,
        values_come=barrier,
        is_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=work.stages),
        is_ready=plgpu.Barrier(num_arrivals=GROUPS),
    )


def fetch_queries(refs, shared, group, own, work):
    """Loads the queries of a warpgroup, writes the ones, and waits for the other warpgroup."""
    queries = lambda row, heads, columns: refs.q.at[row, heads, columns]  # noqa: E731
    shared.queries[group] = _load_rows(queries, refs, shared, group, own, work)
    shared.ones[...] = plgpu.layout_cast(jnp.ones((LANES, TILE), jnp.bfloat16), LAYOUT)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.is_ready)
    plgpu.barrier_wait(shared.is_ready)


def _load_rows(line_of, refs, shared, group, own, work):
    """Loads the rows of a block; rows past the end repeat the last row of all."""
    lines, barrier = shared.lines.at[group], shared.lines_come.at[group]

    def fetch(i, _):
        each, first = lax.div(i, work.pieces), lax.rem(i, work.pieces) * work.piece
        row = jnp.minimum(own.row + each, refs.q.shape[0] - 1)
        line = lines.at[pl.ds(i * work.piece, work.piece)]
        plgpu.copy_gmem_to_smem(line_of(row, *own.at(work, first, work.piece)), line, barrier)

    lax.fori_loop(0, work.rows * work.pieces, fetch, None)
    plgpu.barrier_wait(barrier)
    return plgpu.load(lines, layout=LAYOUT, optimized=False)


def write_result(refs, shared, group, own, sums, work):
    """Divides by the total weight, applies the sigmoid gate and writes the outputs of some rows."""
    at, lines = own.at(work), shared.lines.at[group]
    total = sums.total
    if work.has_sinks:
        sink = plgpu.load(refs.sinks.at[own.head], layout=OF_ROWS, optimized=False)
        above = flushed_power_of_two(times(sink, LOG2_E, OF_ROWS) - sums.peak, OF_ROWS)
        total = sum_of(total, above, OF_ROWS)
    out = divided(sums.value, beside(jnp.maximum(total, 1e-30), work.width))
    if work.gated:
        gates = lambda row, heads, columns: refs.gate.at[row, heads, 1, columns]  # noqa: E731
        gate = _load_rows(gates, refs, shared, group, own, work).astype(jnp.float32)
        out = divided(out, 1.0 + flushed_power_of_two(times(gate, -LOG2_E)))
    lines[...] = out.astype(jnp.bfloat16)
    plgpu.commit_smem()

    def write(each, _):
        line = lines.at[pl.ds(each * work.group, work.group)]
        plgpu.copy_smem_to_gmem(line, refs.out.at[(own.row + each, *at)])

    lax.fori_loop(0, jnp.minimum(work.rows, own.stop - own.row), write, None)
    plgpu.wait_smem_to_gmem(0)


def clear_padding(refs, shared, group, own, begin, stride, work):
    """Writes zeros to a KV head's outputs in every `stride`-th row from `begin` on."""
    lines, num_rows = shared.lines.at[group], refs.out.shape[0]

    @pl.when(begin < num_rows)
    def _():
        lines[...] = plgpu.layout_cast(jnp.zeros((LANES, work.width), jnp.bfloat16), LAYOUT)
        plgpu.commit_smem()

        def clear(i, _):
            line = lines.at[pl.ds(0, work.group)]
            plgpu.copy_smem_to_gmem(line, refs.out.at[(begin + i * stride, *own.at(work))])

        lax.fori_loop(0, pl.cdiv(num_rows - begin, stride), clear, None)
        plgpu.wait_smem_to_gmem(0)


def copy_tiles(refs, shared, share, request, first_column, work):
    """Loads the tiles of a share into free pipeline stages (producer)."""
    columns, per_page = refs.table.shape[1], work.page // TILE
    layer = refs.layer[0]

    def copy(i, number):
        step = i - share.begin
        slot = lax.rem(step, work.stages)

        @pl.when(step >= work.stages)
        def _wait():
            plgpu.barrier_wait(shared.is_free.at[slot])

        for which, barrier in enumerate((shared.keys_come, shared.values_come)):
            page = (layer * 2 + which) * work.pages + number
            line = page * work.page + lax.rem(i, per_page) * TILE
            for part in range(work.copied):
                column = first_column + part * work.width
                tile = refs.pool.at[pl.ds(line, TILE), pl.ds(column, work.width)]
                keys, values = (slot, part), slot * work.copied + part
                to = shared.values.at[values] if which else shared.keys.at[keys]
                plgpu.copy_gmem_to_smem(tile, to, barrier.at[slot])
        return page_at(i + 1)

    def page_at(i):
        return refs.table[request, jnp.minimum(lax.div(i, per_page), columns - 1)]

    lax.fori_loop(share.begin, share.end, copy, page_at(share.begin))
