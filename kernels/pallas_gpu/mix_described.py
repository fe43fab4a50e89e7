"""The attention of `mix` by a Hopper's wide matrix unit and tensor descriptors (TMA), in Pallas.

A kernel for Mosaic GPU. A program has two warpgroups that multiply, each up to 64 pairs of a row
and a query head, which are the 64 rows that its matrix units take at once: of two key heads, or of
the two halves of a large one's values. One warpgroup more copies tiles of keys and values ahead.
Tiles, splits and spans are those of `mix`, added in its order, so that the bits are its bits. The
queries are made, and the keys and values written, by `place`.

A request of one span is one program's. The spans of longer ones are shared out, and a kernel of
Pallas for Triton adds them behind.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.attention import LOG2_E, Sums, fold
from kernels.pallas_gpu.instructions import LAYOUT, divided, flushed_power_of_two, times
from kernels.pallas_gpu.linear_described import is_on_hopper
from kernels.pallas_gpu.linear_ring import LINE_BYTES, LINES
from kernels.pallas_gpu.pair_sums import (
    GROUPS,
    LANES,
    TILE,
    Refs,
    Share,
    Shared,
    Work,
    attend_pairs,
    beside,
)
from kernels.tiles import MixTiles

COLUMNS = 128
"""Most columns of the values of a warpgroup."""
_MOST_STAGED = 2 * COLUMNS
"""Columns of a warpgroup's part in all stages."""
_COPYING_REGISTERS, _REGISTERS = 24, 240


def takes(kv: Float[jax.Array, "L 2 P page Hk D"], tile: int) -> bool:
    """Whether `mix_described` can be called: with bfloat16, whole tiles in a page, and on a Hopper.

    Args:
      kv: The pools, whose heads are two by two the two warpgroups'.
      tile: Positions of one.
    """
    page, k_heads, D = kv.shape[3:]
    is_whole = page % TILE == 0 and tile == TILE
    is_even = D == GROUPS * COLUMNS or (D in (COLUMNS, COLUMNS // 2) and k_heads % GROUPS == 0)
    return is_whole and is_even and kv.dtype == jnp.bfloat16 and is_on_hopper()


# A function of its own in a program, which has it once for all layers: lowering and compiling a
# kernel of Mosaic GPU takes half a second.
@functools.partial(
    jax.jit, static_argnames=("max_rows", "span", "split", "scale", "tiles"), inline=False
)
def mix_described(
    q: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R outputs"] | None,
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    bounds: Int[jax.Array, "B bounds"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    *,
    max_rows: int,
    span: int,
    split: int,
    scale: float,
    tiles: MixTiles,
) -> Float[jax.Array, "R outputs_of_heads"]:
    """As `mix.mix` behind `place`, of arrays that `takes` accepts.

    Args:
      q: Of `place`, which has written the new keys and values.
      gate: The projection that the queries come from, if each has its gate there behind it.
      kv, layer, bounds, page_table, row_starts, first, until, window: See `mix.mix`.
      max_rows, span, split, scale, tiles: The same.

    Raises:
      ValueError: There is no room for so many stages.
    """
    (R, Hq, D), (L, _, P, page, Hk, _) = q.shape, kv.shape
    B, columns = page_table.shape
    group, width = Hq // Hk, min(D, COLUMNS)
    if tiles.stages * width > _MOST_STAGED:
        most = _MOST_STAGED // width
        raise ValueError(f"heads of {D} have room for {most} stages, got {tiles.stages}")
    rows = min(LANES // group, max_rows)
    spans = pl.cdiv(columns * page, span)
    work = Work(
        group=group,
        D=D,
        width=width,
        rows=rows,
        blocks=pl.cdiv(max_rows, rows),
        pages=P,
        programs=min(tiles.programs, spans),
        span=span,
        split=split,
        nodes=window.shape[1],
        page=page,
        stages=tiles.stages,
        scale=scale * LOG2_E,
        gated=gate is not None,
    )
    gates = q if gate is None else gate.reshape(R, -1, 2, D)
    pairs, sights = _pairs_of(row_starts, first, until, window, work)
    numbers = Hk * work.parts * work.blocks
    of, single = jax.ShapeDtypeStruct, jnp.float32
    out, *left = plgpu.kernel(
        functools.partial(_mix_described_kernel, work=work),
        out_type=(
            of((R, Hq, D), q.dtype),
            of((spans, B, numbers, LANES, width), single),
            *(of((spans, B, numbers, LANES), single),) * 2,
        ),
        grid=(numbers // GROUPS, B, work.programs),
        grid_names=("number", "request", "share"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=_shared_of(work)._asdict(),
        compiler_params=plgpu.CompilerParams(),
        kernel_name="mix_described",
    )(
        *(q, gates, kv.reshape(L * 2 * P * page, Hk * D), layer, page_table, row_starts, bounds),
        *(pairs, sights),
    )
    out = out.reshape(R, Hq * D)
    if spans == 1:
        return out
    return _combined(out, q if gate is None else gate, left, bounds, row_starts, columns, work)


def _pairs_of(row_starts, first, until, window, work):
    """What the pairs of each block see; of a spare pair, what the last row sees."""
    start, stop = (x[:, None, None] for x in (row_starts[:-1], row_starts[1:]))
    of_block = jnp.arange(work.blocks)[:, None] * work.rows + jnp.arange(LANES) // work.group
    row = jnp.clip(jnp.minimum(start + of_block, stop - 1), 0)
    words = []
    for begin in (0, 32):
        bits = window[:, begin : begin + 32]
        bit = jnp.left_shift(jnp.int32(1), jnp.arange(bits.shape[1], dtype=jnp.int32))
        words.append(jnp.where(bits, bit, 0).sum(axis=1, dtype=jnp.int32))
    each = [x[row].astype(jnp.int32) for x in (first, until, *words)]
    pairs = jnp.stack(each, axis=2).reshape(-1, len(each), LANES)
    sights = jnp.stack([each[0].max(axis=2), each[1].min(axis=2)], axis=2)
    return pairs, sights.reshape(-1, 2)


def _shared_of(work):
    """The shared memory of a program."""
    kind = jnp.bfloat16

    def block(*shape):
        line = LINE_BYTES // kind.dtype.itemsize
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(LINE_BYTES)
        return plgpu.SMEM(shape, kind, transforms=layout)

    rings = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=work.stages)
    return Shared(
        queries=block(GROUPS, LANES, work.width),
        ones=block(LANES, TILE),
        keys=block(work.stages, GROUPS, TILE, work.width),
        values=block(work.stages, GROUPS, TILE, work.width),
        lines=plgpu.SMEM((GROUPS, LANES, work.width), kind),
        bad=plgpu.SMEM((GROUPS, 2, TILE), jnp.int32),
        lines_come=plgpu.Barrier(num_arrivals=work.rows, num_barriers=GROUPS),
        keys_come=rings,
        values_come=rings,
        is_free=rings,
        is_ready=plgpu.Barrier(num_arrivals=GROUPS),
    )


def _share(number, bounds, has_rows, reach, work):
    """Of the program of that number."""
    low, _, seen_until, *_ = bounds
    high = jnp.minimum(seen_until + work.nodes, reach)
    base = lax.div(low, work.span)
    spans = jnp.maximum(pl.cdiv(high, work.span) - base, 1)
    each = pl.cdiv(spans, jnp.minimum(work.programs, spans))
    begin = lax.div(jnp.maximum(low, (base + number * each) * work.span), TILE)
    end = pl.cdiv(jnp.minimum(high, (base + (number + 1) * each) * work.span), TILE)
    is_one = has_rows & (number < pl.cdiv(spans, each))
    end = jnp.where((low < high) & is_one, jnp.maximum(end, begin), begin)
    return Share(begin=begin, end=end, base=base, is_alone=spans == 1, is_one=is_one)


def _mix_described_kernel(*refs, work, **shared):
    """One program per two parts of key heads of a block of rows, request, and share."""
    refs, shared = Refs(*refs), Shared(**shared)
    number, request = lax.axis_index("number"), lax.axis_index("request")
    group, share_number = lax.axis_index("group"), lax.axis_index("share")
    pair, block = lax.div(number, work.blocks), lax.rem(number, work.blocks)
    bounds = [refs.bounds[request, i] for i in range(refs.bounds.shape[1])]
    row, num_rows = refs.starts[request] + block * work.rows, refs.q.shape[0]
    stop = refs.starts[request + 1]
    reach = refs.table.shape[1] * work.page
    share = _share(share_number, bounds, row < stop, reach, work)

    @pl.when(group == GROUPS)
    def _copy():
        plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")
        _copy_tiles(refs, shared, share, request, pair, work)

    @pl.when(group < GROUPS)
    def _attend():
        plgpu.set_max_registers(_REGISTERS, action="increase")
        part = pair * GROUPS + group
        head, column = lax.div(part, work.parts), lax.rem(part, work.parts) * work.width
        lines = shared.lines.at[group]

        @pl.when((share_number == 0) & (block == 0))
        def _():
            _clear_padding(refs, lines, head * work.group, column, request, work)

        at = pl.ds(head * work.group, work.group), pl.ds(column, work.width)

        @pl.when(share.is_one)
        def _():
            come = shared.lines_come.at[group]
            _fetch_lines(lambda each: refs.q.at[(each, *at)], lines, come, row, num_rows, work)
            shared.queries[group] = plgpu.load(lines, layout=LAYOUT, optimized=False)
            shared.ones[...] = plgpu.layout_cast(jnp.ones((LANES, TILE), jnp.bfloat16), LAYOUT)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.is_ready)
            plgpu.barrier_wait(shared.is_ready)

            def store(unit, sums):
                place = (unit - share.base, request, part * work.blocks + block)
                refs.sums[place] = sums.value
                refs.peaks[place] = sums.peak
                refs.totals[place] = sums.total

            index = request * work.blocks + block
            sums = attend_pairs(refs, shared, share, index, group, bounds, work, store=store)

            @pl.when(share.is_alone)
            def _finish():
                out = divided(sums.value, beside(jnp.maximum(sums.total, 1e-30), work.width))
                if work.gated:
                    heads = pl.ds(head * work.group, work.group), 1, at[1]
                    gates = lambda each: refs.gate.at[(each, *heads)]  # noqa: E731
                    _fetch_lines(gates, lines, come, row, num_rows, work)
                    gate = plgpu.load(lines, layout=LAYOUT, optimized=False).astype(jnp.float32)
                    out = divided(out, 1.0 + flushed_power_of_two(times(gate, -LOG2_E)))
                lines[...] = out.astype(jnp.bfloat16)
                plgpu.commit_smem()

                def write(each, _):
                    own = lines.at[pl.ds(each * work.group, work.group)]
                    plgpu.copy_smem_to_gmem(own, refs.out.at[(row + each, *at)])

                lax.fori_loop(0, jnp.minimum(work.rows, stop - row), write, None)
                plgpu.wait_smem_to_gmem(0)


def _fetch_lines(line_of, lines, come, row, num_rows, work):
    """Copies what the rows of a block have; a spare row has what the last row of all has."""
    for each in range(work.rows):
        own = lines.at[pl.ds(each * work.group, work.group)]
        plgpu.copy_gmem_to_smem(line_of(jnp.minimum(row + each, num_rows - 1)), own, come)
    plgpu.barrier_wait(come)


def _clear_padding(refs, lines, q_head, column, request, work):
    """Writes 0 for a key head's queries of every so manyth row of padding."""
    num_requests, num_rows = refs.starts.shape[0] - 1, refs.out.shape[0]
    begin = refs.starts[num_requests] + request

    @pl.when(begin < num_rows)
    def _():
        lines[...] = plgpu.layout_cast(jnp.zeros((LANES, work.width), jnp.bfloat16), LAYOUT)
        plgpu.commit_smem()
        at = pl.ds(q_head, work.group), pl.ds(column, work.width)

        def clear(i, _):
            own = lines.at[pl.ds(0, work.group)]
            plgpu.copy_smem_to_gmem(own, refs.out.at[(begin + i * num_requests, *at)])

        lax.fori_loop(0, pl.cdiv(num_rows - begin, num_requests), clear, None)
        plgpu.wait_smem_to_gmem(0)


def _copy_tiles(refs, shared, share, request, pair, work):
    """Copies the tiles of a share, as long as there is room in the rings."""
    columns, per_page = refs.table.shape[1], work.page // TILE
    layer, parts = refs.layer[0], pair * GROUPS

    def copy(i, number):
        turn = i - share.begin
        slot = lax.rem(turn, work.stages)

        @pl.when(turn >= work.stages)
        def _wait():
            plgpu.barrier_wait(shared.is_free.at[slot])

        for which, ring, come in (
            (0, shared.keys, shared.keys_come),
            (1, shared.values, shared.values_come),
        ):
            page = (layer * 2 + which) * work.pages + number
            line = page * work.page + lax.rem(i, per_page) * TILE
            for part in range(GROUPS):
                column = (parts + part) * work.width
                tile = refs.pool.at[pl.ds(line, TILE), pl.ds(column, work.width)]
                plgpu.copy_gmem_to_smem(tile, ring.at[slot, part], come.at[slot])
        return page_at(i + 1)

    def page_at(i):
        return refs.table[request, jnp.minimum(lax.div(i, per_page), columns - 1)]

    lax.fori_loop(share.begin, share.end, copy, page_at(share.begin))


def _combined(out, gate, left, bounds, row_starts, columns, work):
    """Adds the spans that programs have left, and finishes the rows of such requests."""
    _, B, numbers, *_ = left[0].shape
    return pl.pallas_call(
        functools.partial(_combine_kernel, reach=columns * work.page, work=work),
        grid=(numbers, B),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="combine_spans",
    )(out, gate, *left, bounds, row_starts)


def _combine_kernel(
    _, gate_ref, sums_ref, peaks_ref, totals_ref, bounds_ref, starts_ref, out_ref, *, reach, work
):
    """One program per block of pairs and part of a key head's values, and request."""
    number, request = pl.program_id(0), pl.program_id(1)
    part, block = lax.div(number, work.blocks), lax.rem(number, work.blocks)
    head, column = lax.div(part, work.parts), lax.rem(part, work.parts) * work.width
    low = bounds_ref[request, 0]
    high = jnp.minimum(bounds_ref[request, 2] + work.nodes, reach)
    spans = pl.cdiv(high, work.span) - lax.div(low, work.span)
    start, stop = starts_ref[request] + block * work.rows, starts_ref[request + 1]

    @pl.when((spans > 1) & (low < high) & (start < stop))
    def _():
        lane, of_lane = lax.iota(jnp.int32, LANES), lax.iota(jnp.int32, work.width)
        each = lax.div(lane, work.group)
        row, q_head = start + each, head * work.group + lax.rem(lane, work.group)

        def add(unit, sums):
            at = unit, request, number
            more = Sums(
                pltriton.load(sums_ref.at[(*at, lane[:, None], of_lane[None, :])]),
                pltriton.load(peaks_ref.at[(*at, lane)]),
                pltriton.load(totals_ref.at[(*at, lane)]),
            )
            return fold(sums, more)

        sums = lax.fori_loop(0, spans, add, Sums.nothing(LANES, work.width))
        keep = ((row < stop) & (each < work.rows))[:, None]
        out = sums.value / jnp.maximum(sums.total, 1e-30)[:, None]
        at = q_head[:, None] * work.D + column + of_lane[None, :]
        if work.gated:
            gate_at = gate_ref.at[row[:, None], at + (q_head[:, None] + 1) * work.D]
            gate = pltriton.load(gate_at, mask=keep, other=0.0).astype(jnp.float32)
            out = out / (1.0 + jnp.exp2(gate * -LOG2_E))
        pltriton.store(out_ref.at[row[:, None], at], out.astype(out_ref.dtype), mask=keep)
