"""Mamba2 chunked prefill, in chunks of 64 rows (Pallas, Triton backend).

Three kernels run in sequence: causal convolution of all rows; time steps and decays of all chunks,
and the decayed products of B and C; the recurrent state of each request and head, carried from
chunk to chunk, with the outputs before the norm. B, C and x are bfloat16, as after the convolution.
Decayed products are rounded to bfloat16; all other inputs of the state are split into two bfloat16
parts, so that 16 bits are significant. `kernels/__init__.py` lists what must equal the Triton twin.
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
from kernels.pallas_gpu.attention.attention import clear_padding
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gdn.gdn_chunk import CHUNK, NOTHING, dot, parts_of, share_of
from kernels.pallas_gpu.gdn.gdn_rows import (
    LOG2_E,
    GDNLayerWeights,
    Inputs,
    States,
    convolved,
    of_layer,
    sum_by_halves,
    time_steps,
)
from kernels.pallas_gpu.gdn.prefill_requests import (
    PrefillRequests,
    first_chunk,
    move_window,
    prefill_kernel,
    rows_of,
)
from kernels.recurrent_sizes import columns_of, sizes_of


class ChunkInputs(NamedTuple):
    """Outputs of the second kernel by chunk."""

    scores: Any
    total: Any
    dt: Any


def prefill(
    projected: Float[jax.Array, "R outputs"],
    conv: Float[jax.Array, "*L C 4"],
    conv_bias: Float[jax.Array, "*L C"] | None,
    a_log: Float[jax.Array, "*L H"],
    dt_bias: Float[jax.Array, "*L H"],
    skip: Float[jax.Array, "*L H"],
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
      conv, conv_bias, a_log, dt_bias, skip: Weights of the layer, or of all layers.
      recurrent, window, layer: States of all layers, and the index of the layer to read and write.
        It is an operand, because XLA compiles kernels of equal text once.
      saved_recurrent, saved_window: Snapshots of all layers.
      slots: State slot of each request; distinct, except for requests without rows, which keep
        their states.
      row_starts: First flat row of each request, and the end; later rows are padding.
      save_after: Rows after which a state is saved: 0, a multiple of 64, or all rows of the
        request.
      save: Snapshot index of each request; 0 for none.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The concatenated head outputs before the norm, zeros for padding; the states and snapshots
      after the writes.
    """
    R, B, of = len(projected), len(slots), jax.ShapeDtypeStruct
    has = {"has_delta": False, "has_bias": conv_bias is not None}
    sizes = sizes_of(recurrent.shape, window.shape, **has)
    H, V, C, places = sizes.H, sizes.V, sizes.C, R // CHUNK + B
    columns, block = columns_of(tiles.columns, sizes), min(sizes.K, V)
    half, single = (partial(of, dtype=x) for x in (jnp.bfloat16, jnp.float32))
    weights = GDNLayerWeights(
        conv=conv, conv_bias=conv_bias, a_log=a_log, dt_bias=dt_bias, skip=skip, norm=None
    )
    requests = PrefillRequests(slots=slots, starts=row_starts, save_after=save_after, save=save)
    held = (States(recurrent, window), States(saved_recurrent, saved_window))

    launch = partial(prefill_kernel, interpret=interpret, sizes=sizes)
    channels = launch(
        _rows_kernel,
        (C // block, CHUNK // tiles.rows * places),
        half((R, C)),
        name="mamba2_conv_rows",
        warps=tiles.row_warps,
        rows=tiles.rows,
        block=block,
    )(projected, weights._replace(a_log=None, dt_bias=None, skip=None), window, layer, requests)
    chunks = launch(
        _prepare_kernel,
        (H, places),
        ChunkInputs(
            scores=half((places, H, CHUNK, CHUNK)),
            total=single((places, H, CHUNK)),
            dt=single((places, H, CHUNK)),
        ),
        name="mamba2_chunk_prepare",
        warps=tiles.prepare_warps,
    )(projected, weights, layer, requests, channels)
    # The states and snapshots are updated in place.
    (states, snapshots), out = launch(
        _carry_kernel,
        (V // columns, H, B),
        (jax.tree.map(lambda x: of(x.shape, x.dtype), held), of((R, H * V), projected.dtype)),
        name="mamba2_chunk_state",
        warps=tiles.warps,
        stages=tiles.stages,
        aliases={number: number for number in range(4)},
        columns=columns,
    )(held, projected, skip, layer, requests, channels, chunks)
    return out, *states, *snapshots


def _rows_kernel(
    projected_ref,
    weights,
    window_ref,
    layer_ref,
    requests,
    channels_ref,
    *,
    rows,
    block,
    sizes,
    interpret,
):
    """One program per block of rows of a chunk, and block of channels."""
    R, part = channels_ref.shape[0], pl.program_id(1)
    channel = pl.program_id(0) * block + lax.iota(jnp.int32, block)[None, :]
    chunk = lax.div(part, CHUNK // rows)
    within = lax.rem(part, CHUNK // rows) * rows
    request, start, first, count = rows_of(requests.starts, chunk)

    @pl.when(first + within < count)
    def _():
        node = early(first + within + lax.iota(jnp.int32, rows), interpret)
        keep = (node < count)[:, None]
        inputs = Inputs(
            projected=projected_ref,
            first=sizes.channels,
            window=window_ref,
            layer=layer_ref[0],
            slot=requests.slots[request],
            start=start,
            count=count,
        )
        places = (node, node + 1, node + 2, node + 3)
        _, x = convolved(inputs, weights, places, channel)
        # A row that is not written gets an index out of bounds, for the interpreter.
        to = channels_ref.at[jnp.where(keep, (start + node)[:, None], R), channel]
        pltriton.store(to, x.astype(jnp.bfloat16), mask=keep)


def _prepare_kernel(
    projected_ref,
    weights,
    layer_ref,
    requests,
    channels_ref,
    scores_ref,
    total_ref,
    dt_ref,
    *,
    sizes,
    interpret,
):
    """One program per head and chunk."""
    head, chunk, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    group = lax.div(head, sizes.H // sizes.key_heads)
    _, start, first, count = rows_of(requests.starts, chunk)

    @pl.when(first < count)
    def _():
        row = early(lax.iota(jnp.int32, CHUNK), interpret)
        column = lax.iota(jnp.int32, CHUNK)
        is_row, at = first + row < count, start + first + row
        dt = pltriton.load(projected_ref.at[at, sizes.gates + head], mask=is_row, other=0.0)
        a_log, dt_bias = (of_layer(x, 1, layer, head) for x in (weights.a_log, weights.dt_bias))
        dt, log_decay = time_steps(dt, a_log, dt_bias)
        dt_ref[chunk, head] = jnp.where(is_row, dt, 0.0)
        # Clamped, so that the cumulative sum keeps its precision after a token with decay 0.
        log_decay = jnp.where(is_row, jnp.maximum(log_decay * LOG2_E, NOTHING), 0.0)
        is_before = row[:, None] <= column[None, :]
        total = sum_by_halves(jnp.where(is_before, log_decay[:, None], 0.0))
        total_ref[chunk, head] = total
        # Masked before exp2: above the diagonal the difference is positive and would overflow.
        is_seen = row[:, None] >= column[None, :]
        decay = share_of(jnp.where(is_seen, total[:, None] - total[None, :], 0.0))
        q, k = (
            _loaded(channels_ref, first_channel + group * sizes.K, sizes.K, at, is_row)
            for first_channel in (sizes.q, sizes.k)
        )
        scores = jnp.where(is_seen, dot(q, k.T) * decay, 0.0)
        scores_ref[chunk, head] = scores.astype(jnp.bfloat16)


def _loaded(channels_ref, first, D, row, is_row):
    """Loads some channels of rows; rows past the end of a request are 0."""
    channel = first + lax.iota(jnp.int32, D)[None, :]
    at = channels_ref.at[row[:, None], channel]
    return pltriton.load(at, mask=is_row[:, None], other=0)


def _carry_kernel(
    _,
    projected_ref,
    skip_ref,
    layer_ref,
    requests,
    channels_ref,
    chunks,
    held,
    out_ref,
    *,
    columns,
    sizes,
    interpret,
):
    """One program per block of state columns, head and request."""
    (states, snapshots), R = held, out_ref.shape[0]
    K, V, heads = sizes.K, sizes.V, sizes.H // sizes.key_heads  # of a group
    block, head, request = (pl.program_id(axis) for axis in range(3))
    group, layer = lax.div(head, heads), layer_ref[0]
    start, stop = requests.starts[request], requests.starts[request + 1]
    count, slot = stop - start, requests.slots[request]
    save, save_after = requests.save[request], requests.save_after[request]
    row = early(lax.iota(jnp.int32, CHUNK), interpret)
    given = (requests.starts, out_ref, head, request, 1, V)
    pl.when(block == 0)(partial(clear_padding, *given, programs=1))
    key, column = lax.iota(jnp.int32, K), block * columns + lax.iota(jnp.int32, columns)[None, :]
    state_at = states.recurrent.at[layer, slot, head, key[:, None], column]
    saved_state_at = snapshots.recurrent.at[layer, save, head, key[:, None], column]
    state = pltriton.load(state_at)
    ends = (lax.rem(save_after, CHUNK) == 0) | (save_after == count)
    is_saved = (save != 0) & (save_after >= 0) & (save_after <= count) & ends
    pl.when(is_saved & (save_after == 0))(lambda: pltriton.store(saved_state_at, state))
    skip = of_layer(skip_ref, 1, layer, head)
    first_value = head * V + block * columns

    def advance(i, state):
        place, node = first_chunk(start, request) + i, i * CHUNK + row
        is_row, at = node < count, start + node
        q, k = (
            _loaded(channels_ref, first + group * K, K, at, is_row) for first in (sizes.q, sizes.k)
        )
        x = _loaded(channels_ref, sizes.v + first_value, columns, at, is_row).astype(jnp.float32)
        total, dt = chunks.total[place, head], chunks.dt[place, head]
        end = chunks.total[place, head, CHUNK - 1]
        high, low = parts_of(state)
        out = (dot(q, low) + dot(q, high)) * share_of(total)[:, None]
        stored = dt[:, None] * x
        high, low = parts_of(stored)
        scores = chunks.scores[place, head]
        out = out + dot(scores, low) + dot(scores, high)
        out = (out + skip * x).astype(out_ref.dtype)
        # A row that is not written gets an index out of bounds, for the interpreter.
        to = out_ref.at[jnp.where(is_row, at, R)[:, None], head * V + column]
        pltriton.store(to, out, mask=is_row[:, None])
        high, low = parts_of(stored * share_of(end - total)[:, None])
        state = state * share_of(end) + dot(k.T, low) + dot(k.T, high)
        is_saved_now = is_saved & (jnp.minimum((i + 1) * CHUNK, count) == save_after)
        pl.when(is_saved_now)(lambda: pltriton.store(saved_state_at, state))
        return state

    state = lax.fori_loop(0, pl.cdiv(count, CHUNK), advance, state)
    pl.when(count > 0)(lambda: pltriton.store(state_at, state))
    inputs = Inputs(
        projected=projected_ref,
        first=sizes.channels,
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
        move(sizes.v + first_value, columns)

        @pl.when((lax.rem(head, heads) == 0) & (block == 0))
        def _():
            move(sizes.q + group * K, K)
            move(sizes.k + group * K, K)
