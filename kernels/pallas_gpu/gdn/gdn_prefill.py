"""Gated delta net chunked prefill, in chunks of 64 rows (Pallas, Triton backend).

Four kernels run in sequence: causal convolution and norms of all rows; gates of all chunks, and the
inverse of the triangular system by which a token's update depends on earlier tokens of its chunk;
the recurrent state of each request and head, carried from chunk to chunk; the gated norm of the
outputs. Tensor-core operands are bfloat16. Queries and decayed query-key scores are rounded to
bfloat16; all inputs of the state are split into two bfloat16 parts, so that 16 bits are
significant. `kernels/__init__.py` lists what must equal the Triton twin.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.gdn_tiles import GDNPrefillTiles
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gdn.gdn_chunk import (
    CHUNK,
    NOTHING,
    add_product,
    dot,
    inverse_of,
    parts_of,
    share_of,
)
from kernels.pallas_gpu.gdn.gdn_rows import (
    LOG2_E,
    GDNLayerWeights,
    Inputs,
    States,
    convolved,
    gated_norm,
    gates,
    of_layer,
    sum_by_halves,
    unit,
)
from kernels.pallas_gpu.gdn.prefill_requests import (
    PrefillRequests,
    first_chunk,
    move_window,
    prefill_kernel,
    rows_of,
)


class PrefillRows(NamedTuple):
    """Outputs of the first kernel by row; `keys` contains queries and both parts of keys."""

    keys: Any
    v: Any


class ChunkOutputs(NamedTuple):
    """Outputs of the second kernel by chunk."""

    solved: Any
    scores: Any
    total: Any


def prefill(
    projected: Float[jax.Array, "R outputs"],
    conv: Float[jax.Array, "*L C 4"],
    a_log: Float[jax.Array, "*L H"],
    dt_bias: Float[jax.Array, "*L H"],
    norm: Float[jax.Array, "*L V"],
    recurrent: Float[jax.Array, "L states H K V"],
    window: Float[jax.Array, "L states 3 C"],
    saved_recurrent: Float[jax.Array, "L snapshots H K V"],
    saved_window: Float[jax.Array, "L snapshots 3 C"],
    layer: Int[jax.Array, " 1"],
    slots: Int[jax.Array, " B"],
    row_starts: Int[jax.Array, " B1"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
    *,
    eps: float,
    digits: int,
    tiles: GDNPrefillTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R values"],
    Float[jax.Array, "L states H K V"],
    Float[jax.Array, "L states 3 C"],
    Float[jax.Array, "L snapshots H K V"],
    Float[jax.Array, "L snapshots 3 C"],
]:
    """Same as `shared.spec.recurrent_layer.prefill`, for flat bfloat16 rows grouped by request.

    Args:
      projected: See `shared.spec.recurrent_mixer.split_inputs`.
      conv, a_log, dt_bias, norm: Weights of the layer, or of all layers.
      recurrent, window, layer: States of all layers, and the index of the layer to read and write.
        It is an operand, because XLA compiles kernels of equal text once.
      saved_recurrent, saved_window: Snapshots of all layers.
      slots: State slot of each request; distinct, except for requests without rows, which keep
        their states.
      row_starts: First flat row of each request, and the end; later rows are padding.
      save_after: Rows after which a state is saved: 0, a multiple of 64, or all rows of the
        request.
      save: Snapshot index of each request; 0 for none.
      eps: Epsilon of the norm.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The concatenated head outputs, zeros for padding; the states and snapshots after the writes.
    """
    R, (H, K, V), C, B = len(projected), recurrent.shape[2:], window.shape[3], len(slots)
    places, key_heads = R // CHUNK + B, (C - H * V) // (2 * K)
    of, columns = jax.ShapeDtypeStruct, min(tiles.columns, V)
    half, single = (partial(of, dtype=x) for x in (jnp.bfloat16, jnp.float32))
    weights = GDNLayerWeights(
        conv=conv, conv_bias=None, a_log=a_log, dt_bias=dt_bias, skip=None, norm=norm
    )
    requests = PrefillRequests(slots=slots, starts=row_starts, save_after=save_after, save=save)
    held = (States(recurrent, window), States(saved_recurrent, saved_window))

    launch = partial(prefill_kernel, interpret=interpret)
    rows = launch(
        _rows_kernel,
        (2 * key_heads + H, CHUNK // tiles.rows * places),
        PrefillRows(keys=half((R, 3 * key_heads, K)), v=single((R, H, V))),
        name="gdn_conv_rows",
        warps=tiles.row_warps,
        rows=tiles.rows,
        digits=digits,
    )(projected, weights._replace(a_log=None, dt_bias=None, norm=None), window, layer, requests)
    chunks = launch(
        _prepare_kernel,
        (H, places),
        ChunkOutputs(
            solved=half((places, H, 2, CHUNK, CHUNK)),
            scores=half((places, H, CHUNK, CHUNK)),
            total=single((places, H, CHUNK)),
        ),
        name="gdn_chunk_prepare",
        warps=tiles.prepare_warps,
    )(projected, weights, layer, requests, rows)
    # The states and snapshots are updated in place.
    (states, snapshots), read = launch(
        _carry_kernel,
        (V // columns, H, B),
        (jax.tree.map(lambda x: of(x.shape, x.dtype), held), single((R, H, V))),
        name="gdn_chunk_state",
        warps=tiles.warps,
        stages=tiles.stages,
        aliases={number: number for number in range(4)},
        columns=columns,
    )(held, projected, layer, requests, rows, chunks)
    out = launch(
        _norm_kernel,
        (H, pl.cdiv(R, tiles.rows)),
        of((R, H * V), projected.dtype),
        name="gdn_output_norm",
        warps=tiles.row_warps,
        rows=tiles.rows,
        eps=eps,
        digits=digits,
    )(projected, weights, layer, requests, read)
    return out, *states, *snapshots


def _rows_kernel(
    projected_ref,
    weights,
    window_ref,
    layer_ref,
    requests,
    keys_ref,
    v_ref,
    *,
    rows,
    digits,
    interpret,
):
    """One program per block of rows of a chunk, and query, key or value head."""
    (R, _, V), key_heads, K = v_ref.shape, keys_ref.shape[1] // 3, keys_ref.shape[2]
    head, part, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    chunk = lax.div(part, CHUNK // rows)
    within = lax.rem(part, CHUNK // rows) * rows
    request, start, first, count = rows_of(requests.starts, chunk)

    @pl.when(first + within < count)
    def _():
        node = early(first + within + lax.iota(jnp.int32, rows), interpret)
        keep = (node < count)[:, None]
        # A row that is not written gets an index out of bounds, for the interpreter.
        row = jnp.where(keep, (start + node)[:, None], R)
        inputs = Inputs(
            projected=projected_ref,
            first=0,
            window=window_ref,
            layer=layer,
            slot=requests.slots[request],
            start=start,
            count=count,
        )
        places = (node, node + 1, node + 2, node + 3)

        @pl.when(head < 2 * key_heads)
        def _():
            key = lax.iota(jnp.int32, K)[None, :]
            _, x = convolved(inputs, weights, places, head * K + key)
            x = unit(x, digits)

            @pl.when(head < key_heads)
            def _():
                q = (x * (K**-0.5)).astype(jnp.bfloat16)
                pltriton.store(keys_ref.at[row, head, key], q, mask=keep)

            @pl.when(head >= key_heads)
            def _():
                for place, k in zip((head, head + key_heads), parts_of(x), strict=True):
                    pltriton.store(keys_ref.at[row, place, key], k, mask=keep)

        @pl.when(head >= 2 * key_heads)
        def _():
            value_head, column = head - 2 * key_heads, lax.iota(jnp.int32, V)[None, :]
            channel = 2 * key_heads * K + value_head * V + column
            _, v = convolved(inputs, weights, places, channel)
            pltriton.store(v_ref.at[row, value_head, column], v, mask=keep)


def _prepare_kernel(
    projected_ref,
    weights,
    layer_ref,
    requests,
    rows,
    solved_ref,
    scores_ref,
    total_ref,
    *,
    interpret,
):
    """One program per value head and chunk."""
    H, key_heads = total_ref.shape[1], rows.keys.shape[1] // 3
    first_gate = projected_ref.shape[1] - 2 * H
    head, chunk, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    key_head = lax.div(head, H // key_heads)
    _, start, first, count = rows_of(requests.starts, chunk)

    @pl.when(first < count)
    def _():
        row = early(lax.iota(jnp.int32, CHUNK), interpret)
        column = lax.iota(jnp.int32, CHUNK)
        is_row, at = first + row < count, start + first + row
        b, a = (
            pltriton.load(projected_ref.at[at, first_gate + each + head], mask=is_row, other=0.0)
            for each in (0, H)
        )
        a_log, dt_bias = (of_layer(x, 1, layer, head) for x in (weights.a_log, weights.dt_bias))
        log_decay, beta = gates(b, a, a_log, dt_bias)
        # Clamped, so that the cumulative sum keeps its precision after a token with decay 0.
        log_decay = jnp.where(is_row, jnp.maximum(log_decay * LOG2_E, NOTHING), 0.0)
        beta = jnp.where(is_row, beta, 0.0)
        is_before = row[:, None] <= column[None, :]
        total = sum_by_halves(jnp.where(is_before, log_decay[:, None], 0.0))
        total_ref[chunk, head] = total
        # Masked before exp2: above the diagonal the difference is positive and would overflow.
        is_seen = row[:, None] >= column[None, :]
        decay = share_of(jnp.where(is_seen, total[:, None] - total[None, :], 0.0))
        decay = jnp.where(is_seen, decay, 0.0)
        q, *k = _keys(rows.keys, key_head, at[:, None], is_row[:, None])
        high, low = transposed = [x.T for x in k]
        scores = (dot(q, low) + dot(q, high)) * decay
        scores_ref[chunk, head] = scores.astype(jnp.bfloat16)
        lower = add_product(jnp.zeros_like(decay), k, transposed) * decay * beta[:, None]
        lower = jnp.where(row[:, None] > column[None, :], lower, 0.0)
        for place, part in enumerate(parts_of(inverse_of(lower) * beta[None, :])):
            solved_ref[chunk, head, place] = part


def _keys(keys_ref, key_head, row, is_row):
    """Loads queries and both parts of keys; rows past the end of a request are 0."""
    key_heads, K = keys_ref.shape[1] // 3, keys_ref.shape[2]
    key = lax.iota(jnp.int32, K)[None, :]
    return [
        pltriton.load(keys_ref.at[row, part * key_heads + key_head, key], mask=is_row, other=0)
        for part in range(3)
    ]


def _carry_kernel(
    _, projected_ref, layer_ref, requests, rows, chunks, held, read_ref, *, columns, interpret
):
    """One program per block of state columns, value head and request."""
    states, snapshots = held
    R, (H, K, V), C = rows.v.shape[0], states.recurrent.shape[2:], states.window.shape[3]
    key_heads = (C - H * V) // (2 * K)
    block, head, request = (pl.program_id(axis) for axis in range(3))
    key_head, layer = lax.div(head, H // key_heads), layer_ref[0]
    start, stop = requests.starts[request], requests.starts[request + 1]
    count, slot = stop - start, requests.slots[request]
    save, save_after = requests.save[request], requests.save_after[request]
    row = early(lax.iota(jnp.int32, CHUNK), interpret)
    key, column = lax.iota(jnp.int32, K), block * columns + lax.iota(jnp.int32, columns)[None, :]
    state_at = states.recurrent.at[layer, slot, head, key[:, None], column]
    saved_state_at = snapshots.recurrent.at[layer, save, head, key[:, None], column]
    state = pltriton.load(state_at)
    ends = (lax.rem(save_after, CHUNK) == 0) | (save_after == count)
    is_saved = (save != 0) & (save_after >= 0) & (save_after <= count) & ends
    pl.when(is_saved & (save_after == 0))(lambda: pltriton.store(saved_state_at, state))

    nothing = jnp.zeros((CHUNK, columns), jnp.float32)

    def advance(i, state):
        place, node = first_chunk(start, request) + i, i * CHUNK + row
        is_row, at = (node < count)[:, None], (start + node)[:, None]

        q, *k = _keys(rows.keys, key_head, at, is_row)
        v = pltriton.load(rows.v.at[at, head, column], mask=is_row, other=0.0)
        total, end = chunks.total[place, head], chunks.total[place, head, CHUNK - 1]
        decay_from_start, (high, low) = share_of(total)[:, None], parts_of(state)
        predicted = add_product(nothing, k, (high, low))
        out = (dot(q, low) + dot(q, high)) * decay_from_start
        solved = (chunks.solved[place, head, 0], chunks.solved[place, head, 1])
        stored = add_product(nothing, solved, parts_of(v - predicted * decay_from_start))
        high, low = parts_of(stored)
        scores = chunks.scores[place, head]
        out = out + dot(scores, low) + dot(scores, high)
        # A row that is not written gets an index out of bounds, for the interpreter.
        pltriton.store(read_ref.at[jnp.where(is_row, at, R), head, column], out, mask=is_row)
        update = parts_of(stored * share_of(end - total)[:, None])
        state = add_product(state * share_of(end), [x.T for x in k], update)
        is_saved_now = is_saved & (jnp.minimum((i + 1) * CHUNK, count) == save_after)
        pl.when(is_saved_now)(lambda: pltriton.store(saved_state_at, state))
        return state

    state = lax.fori_loop(0, pl.cdiv(count, CHUNK), advance, state)
    pl.when(count > 0)(lambda: pltriton.store(state_at, state))

    inputs = Inputs(
        projected=projected_ref,
        first=0,
        window=states.window,
        layer=layer,
        slot=slot,
        start=start,
        count=count,
    )

    def move(first, D):
        move_window(
            inputs, snapshots.window, save, save_after, is_saved, first, D, interpret=interpret
        )

    @pl.when((count > 0) | is_saved)
    def _():
        move(2 * key_heads * K + head * V + block * columns, columns)

        @pl.when((lax.rem(head, H // key_heads) == 0) & (block == 0))
        def _():
            move(key_head * K, K)
            move((key_heads + key_head) * K, K)


def _norm_kernel(
    projected_ref,
    weights,
    layer_ref,
    requests,
    read_ref,
    out_ref,
    *,
    rows,
    eps,
    digits,
    interpret,
):
    """One program per block of rows and value head."""
    R, H, V = read_ref.shape
    C = projected_ref.shape[1] - H * V - 2 * H
    head = pl.program_id(0)
    row = early(pl.program_id(1) * rows + lax.iota(jnp.int32, rows), interpret)[:, None]
    column = lax.iota(jnp.int32, V)[None, :]
    keep = row < requests.starts[requests.starts.shape[0] - 1]  # later rows are padding
    read = pltriton.load(read_ref.at[row, head, column], mask=keep, other=0.0)
    z_at = projected_ref.at[row, C + head * V + column]
    z = pltriton.load(z_at, mask=keep, other=0.0)
    weight = of_layer(weights.norm, 1, layer_ref[0], column)
    out = jnp.where(keep, gated_norm(read, z, weight, eps, digits), 0.0)
    # Rows past the end are out of bounds in the interpreter too.
    pltriton.store(out_ref.at[row, head * V + column], out.astype(out_ref.dtype), mask=row < R)
