"""A gated-delta layer between its two products, and the replay of accepted paths, in Pallas.

A program has some columns of the state of a request and value head. Convolution, norms and gates of
all nodes are found at once and written; then the recurrence runs from node to node, down the paths
of a tree anew, so that a node has the bits of plain decoding. The last of a head's programs to
arrive norms what all have read. Sums over keys are by halves, as `sum_by_halves`.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention import clear_padding
from kernels.pallas_gpu.delta_rows import (
    WINDOW,
    convolved,
    gated_norm,
    gates,
    of_layer,
    power,
    sum_by_halves,
    unit,
)
from kernels.pallas_gpu.heads import early
from kernels.pallas_gpu.reach import is_in
from kernels.tiles import DeltaTiles

LEAST = 16
"""Of the sizes of keys and values, which are powers of two."""
MOST_NODES = 64
"""Of a tree."""


def verify(
    projected: Float[jax.Array, "R outputs"],
    conv: Float[jax.Array, "*L C 4"],
    a_log: Float[jax.Array, "*L H"],
    dt_bias: Float[jax.Array, "*L H"],
    norm: Float[jax.Array, "*L V"],
    recurrent: Float[jax.Array, "L states H K V"],
    window: Float[jax.Array, "L states 3 C"],
    layer: Int[jax.Array, " 1"],
    slots: Int[jax.Array, " B"],
    row_starts: Int[jax.Array, " B1"],
    parents: Int[jax.Array, "B N"] | None,
    kept: Sequence[Float[jax.Array, "L B N ..."]],
    arrivals: Int[jax.Array, "B H"],
    *,
    eps: float,
    digits: int,
    tiles: DeltaTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R values"],
    Float[jax.Array, "L states H K V"],
    tuple[Float[jax.Array, "L B N ..."], ...],
    Int[jax.Array, "B H"],
]:
    """As `shared.spec.delta_mix.verify` or `advance`, for rows that lie together by request.

    Args:
      projected: See `shared.spec.mamba_state.split_inputs`.
      conv, a_log, dt_bias, norm: Of the layer, or of all.
      eps: Of the norm.
      recurrent, window, layer: The states of all layers, and which are read. An operand: XLA
        compiles kernels of equal text once.
      slots: The states of the requests. Those of plain decoding are different ones, but for
        padding.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      parents: The trees; None for chains.
      kept: What a replay needs is written to these, fields of `Kept`. Where there are inputs only,
        each request has one node, as in plain decoding, and its recurrent state is advanced.
      arrivals: Zeros: here programs count themselves.
      digits: Of a unit of the squares: the order of their sums.
      tiles: How the work is cut.
      interpret: Run on a CPU.

    Returns:
      The heads' outputs side by side, and the recurrent states, `kept` and the zeros again after
      the writes.
    """
    (R, (B, N)), (H, K, V) = (len(projected), kept[-1].shape[1:3]), recurrent.shape[2:]
    advances, columns = len(kept) == 1, min(tiles.columns, V)
    written = [*kept, arrivals, *([recurrent] if advances else [])]
    made = (((R, H * V), projected.dtype), ((B, N, H, K), jnp.float32), ((B, N, H, V), jnp.float32))
    how = {"columns": columns, "eps": eps, "digits": digits, "interpret": interpret}
    out, *found = pl.pallas_call(
        partial(_verify_kernel, advances=advances, is_chain=parents is None, **how),
        grid=(H * (V // columns), B),
        out_shape=[
            *(jax.ShapeDtypeStruct(*x) for x in made),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written),
        ],
        input_output_aliases={11 + number: 3 + number for number in range(len(written))},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="delta_mix",
    )(
        *(projected, conv, a_log, dt_bias, norm, slots if advances else recurrent, window, layer),
        *(slots, row_starts, slots if parents is None else parents, *written),
    )
    _, _, *found = found
    kept, (arrivals, *new) = found[: len(kept)], found[len(kept) :]
    return out, new[0] if advances else recurrent, tuple(kept), arrivals


def commit(
    recurrent: Float[jax.Array, "L states H K V"],
    window: Float[jax.Array, "L states 3 C"],
    saved_recurrent: Float[jax.Array, "L snapshots H K V"],
    saved_window: Float[jax.Array, "L snapshots 3 C"],
    kept: Sequence[Float[jax.Array, "L B N ..."]],
    slots: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
    *,
    tiles: DeltaTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "L states H K V"],
    Float[jax.Array, "L states 3 C"],
    Float[jax.Array, "L snapshots H K V"],
    Float[jax.Array, "L snapshots 3 C"],
]:
    """As `shared.spec.delta_mix.commit`, of all layers in one launch.

    Args:
      recurrent, window, kept, slots: See `verify`. Where it has advanced the states, only the
        windows follow.
      saved_recurrent, saved_window: The snapshots of all layers.
      path, counts, save_after: As in the specification.
      save: Which snapshot a request's is written to; 0: none.
      interpret: Run on a CPU.

    Returns:
      The states and the snapshots after the writes.
    """
    columns = min(tiles.commit_columns, recurrent.shape[4])
    states = (recurrent, window, saved_recurrent, saved_window)
    return tuple(
        pl.pallas_call(
            partial(_commit_kernel, columns=columns, interpret=interpret),
            grid=(recurrent.shape[2] * (recurrent.shape[4] // columns), len(slots), len(recurrent)),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in states],
            input_output_aliases={number: number for number in range(len(states))},
            compiler_params=pltriton.CompilerParams(num_warps=tiles.commit_warps, num_stages=1),
            interpret=interpret,
            name="commit_states",
        )(*states, slots, path, counts, save_after, save, *kept)
    )


def _verify_kernel(
    projected_ref, conv_ref, a_log_ref, dt_bias_ref, norm_ref, state_ref, window_ref, layer_ref,
    slots_ref, starts_ref, parents_ref, *refs, columns, advances, is_chain, eps, digits, interpret,
):  # fmt: skip
    """One program per columns of a value head, and request."""
    out_ref, q_ref, read_ref, *kept_refs = refs[(len(refs) - 3) // 2 :]
    if advances:
        state_ref = kept_refs.pop()
    *kept_refs, arrivals_ref = kept_refs
    N, C, (H, K, V) = kept_refs[-1].shape[2], window_ref.shape[3], state_ref.shape[2:]
    parts = V // columns
    head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    request, layer = pl.program_id(1), layer_ref[0]
    nodes, key_heads = pl.next_power_of_2(N), (C - H * V) // (2 * K)
    group = H // key_heads
    key_head = lax.div(head, group)
    slot, start, stop = slots_ref[request], starts_ref[request], starts_ref[request + 1]
    count = jnp.minimum(stop - start, N)

    @pl.when(part == 0)
    def _():
        clear_padding(starts_ref, out_ref, head, request, 1, V, programs=1)

    @pl.when(count > 0)
    def _():
        node = early(lax.iota(jnp.int32, nodes), interpret)
        key, own = lax.iota(jnp.int32, K), lax.iota(jnp.int32, columns)
        column = part * columns + own
        is_node = node < count
        keep = is_node[:, None]
        row = start + jnp.where(is_node, node, 0)
        sources = (projected_ref, window_ref, conv_ref, layer, slot, start, count)
        places = _places(node, count, None if is_chain else parents_ref, request)
        *fields, inputs_ref = kept_refs
        at, keeps_key = (request, node[:, None]), (lax.rem(head, group) == 0) & (part == 0)
        is_only = advances or nodes == 1

        def convolve(first, lanes, is_kept=None):
            """The rows of some channels after their convolution; what was before it is kept."""
            channel = (first + lanes)[None, :]
            raw, x = convolved(sources, places, channel)
            keep_raw = partial(pltriton.store, inputs_ref.at[(layer, *at, channel)], raw, mask=keep)
            keep_raw() if is_kept is None else pl.when(is_kept)(keep_raw)
            return x

        # Each of a head's programs writes all that it reads again; done with one, it needs
        # registers.
        q = unit(convolve(key_head * K, key, keeps_key), digits) * (K**-0.5)
        if not is_only:
            pltriton.store(q_ref.at[(*at, head, key[None, :])], q, mask=keep)
        k = unit(convolve((key_heads + key_head) * K, key, keeps_key), digits)
        if not advances:
            pltriton.store(fields[0].at[(layer, *at, head, key[None, :])], k, mask=keep)
        first_value = 2 * key_heads * K + head * V + part * columns
        v = convolve(first_value, own)
        b, a = (pltriton.load(projected_ref.at[row, C + H * V + each + head]) for each in (0, H))
        heads = (of_layer(ref, 1, layer, head) for ref in (a_log_ref, dt_bias_ref))
        log_decay, beta = gates(b, a, *heads)
        if not advances:
            pltriton.store(fields[1].at[(layer, *at, head, column[None, :])], v, mask=keep)
            for ref, x in zip(fields[2:], (log_decay, beta), strict=True):
                pltriton.store(ref.at[layer, request, node, head], x, mask=is_node)

        state_at = state_ref.at[layer, slot, head, :, pl.ds(part * columns, columns)]
        if is_only:
            state = _advanced(state_at[...], *(_first(x, node) for x in (k, v, log_decay, beta)))
            read = sum_by_halves(state * _first(q, node)[:, None])
            read_ref[request, 0, head, pl.ds(part * columns, columns)] = read
            if advances:
                state_at[...] = state
        else:
            _barrier(interpret)  # other threads read them than wrote them
            given = (q_ref, *fields, read_ref)
            visit = partial(_visit, given, (layer, request, head, part * columns, columns))
            if is_chain:
                lax.fori_loop(0, count, visit, state_at[...])
            else:
                _walk(visit, state_at, parents_ref, request, node, count)
        _barrier(interpret)

        def finish():
            column = lax.iota(jnp.int32, V)[None, :]
            out = pltriton.load(read_ref.at[(*at, head, column)], mask=keep, other=0.0)
            z = pltriton.load(projected_ref.at[row[:, None], C + head * V + column])
            out = gated_norm(out, z, of_layer(norm_ref, 1, layer, column), eps, digits)
            # A node that is not written gets a row outside, for the interpreter.
            to = jnp.where(is_node, row, out_ref.shape[0])[:, None]
            pltriton.store(out_ref.at[to, head * V + column], out.astype(out_ref.dtype), mask=keep)

        if parts == 1:
            finish()
        else:
            arrived = pltriton.atomic_add(arrivals_ref, (request, head), jnp.int32(1))

            @pl.when(arrived == parts - 1)
            def _():
                arrivals_ref[request, head] = 0
                finish()


def _first(x, node):
    """What the first node has of all nodes'."""
    is_first = node == 0
    return jnp.sum(jnp.where(is_first[:, None] if x.ndim == 2 else is_first, x, 0.0), axis=0)


def _barrier(interpret):
    if not interpret:
        pltriton.debug_barrier()


def _walk(visit, state_at, parents_ref, request, node, count):
    """Runs from the old state down to each node that has leaves for children, and visits those."""
    is_child = (node > 0) & (node < count)
    parent = pltriton.load(parents_ref.at[request, node], mask=is_child, other=-1)
    is_leaf = jnp.max((parent[:, None] == node[None, :]).astype(jnp.int32), axis=0) == 0

    def descend(end, leaves):
        path = _path_to(end, parents_ref, request)

        def visit_if(nodes, i, state):
            return lax.cond(is_in(*nodes, i, len(node)), visit, lambda _, x: x, i, state)

        def visit_leaf(i, state):
            visit_if(leaves, i, state)
            return state

        state = lax.fori_loop(0, end + 1, partial(visit_if, path), state_at[...])
        lax.fori_loop(end + 1, count, visit_leaf, state)

    def look(end, carry):
        leaves = _bits_of(is_leaf & (parent == end), node)
        is_end = ((leaves[0] | leaves[1]) != 0) | (count == 1)
        pl.when(is_end)(lambda: descend(end, leaves))
        return carry

    lax.fori_loop(0, count, look, 0)


def _bits_of(is_one, node):
    """Nodes as the bits of two numbers."""
    bit = jnp.where(is_one, lax.shift_left(jnp.int32(1), node & 31), 0)
    return tuple(jnp.sum(jnp.where(node >> 5 == high, bit, 0)) for high in (0, 1))


def _path_to(leaf, parents_ref, request):
    """The nodes from the root to a leaf, as the bits of two numbers."""

    def climb(carry):
        above, low, high = carry
        bit, is_high = lax.shift_left(jnp.int32(1), above & 31), above >> 5
        return parents_ref[request, above], low | bit * (1 - is_high), high | bit * is_high

    above_root = lambda carry: carry[0] > 0  # noqa: E731
    return lax.while_loop(above_root, climb, (leaf, jnp.int32(1), jnp.int32(0)))[1:]


def _places(node, count, parents_ref, request):
    """Where the four inputs of each node's convolution stand, the oldest first.

    In window and inputs in a row: node i is `WINDOW + i`.
    """

    def above(place):
        if parents_ref is None:
            return place - 1
        child = place - WINDOW
        is_child = (child > 0) & (child < count)
        parent = pltriton.load(
            parents_ref.at[request, jnp.where(is_child, child, 0)], mask=is_child, other=0
        )
        return jnp.where(is_child, parent + WINDOW, place - 1)

    new = node + WINDOW
    old = above(new)
    older = above(old)
    return above(older), older, old, new


def _visit(given, where, i, state):
    """The state after a node; writes what its query reads from it."""
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, read_ref = given
    layer, request, head, first, columns = where
    column = pl.ds(first, columns)
    q, key = q_ref[request, i, head, :], k_ref[layer, request, i, head, :]
    v = v_ref[layer, request, i, head, column]
    gates = (ref[layer, request, i, head] for ref in (log_decay_ref, beta_ref))
    state = _advanced(state, key, v, *gates)
    read_ref[request, i, head, column] = sum_by_halves(state * q[:, None])
    return state


def _advanced(state, key, v, log_decay, beta):
    """The state after a token."""
    state = state * power(log_decay)
    new = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * new[None, :]


def _commit_kernel(*refs, columns, interpret):
    """One program per columns of a value head, request and layer."""
    slots_ref, path_ref, counts_ref, save_after_ref, save_ref, *kept_refs = refs[4:-4]
    state_ref, window_ref, saved_state_ref, saved_window_ref = refs[-4:]
    *fields, inputs_ref = kept_refs
    (H, _, V), C = state_ref.shape[2:], window_ref.shape[3]
    parts = V // columns
    program, request, layer = (pl.program_id(axis) for axis in range(3))
    head, part = lax.div(program, parts), lax.rem(program, parts)
    slot, save, save_after = slots_ref[request], save_ref[request], save_after_ref[request]
    count = counts_ref[request]
    is_saved = (save_after >= 1) & (save_after <= count) & (save != 0)
    column = pl.ds(part * columns, columns)
    state_at = state_ref.at[layer, slot, head, :, column]
    saved_at = saved_state_ref.at[layer, save, head, :, column]

    def follow():
        """The recurrent state along the path."""

        def advance(i, state):
            at = (layer, request, path_ref[request, i], head)
            k_ref, v_ref, *gates = fields
            gates = (ref[at] for ref in gates)
            state = _advanced(state, k_ref[(*at, slice(None))], v_ref[(*at, column)], *gates)

            @pl.when(is_saved & (save_after == i + 1))
            def _():
                saved_at[...] = state

            return state

        state_at[...] = lax.fori_loop(0, count, advance, state_at[...])

    def save_state():
        saved_at[...] = state_at[...]

    def move_window():
        """Each program writes the windows of some channels, which none other reads."""
        own = pl.cdiv(C, H * parts)
        lane = lax.iota(jnp.int32, 4)[:, None]
        channel = lax.iota(jnp.int32, pl.next_power_of_2(own))[None, :]
        is_one = (lane < WINDOW) & (channel < own)
        channel = channel + program * own
        is_one = is_one & (channel < C)
        given = ((window_ref, inputs_ref, path_ref), (layer, slot, request))
        new = _window_after(*given, count, lane, channel, is_one)

        @pl.when(is_saved)
        def _():
            saved = _window_after(*given, save_after, lane, channel, is_one)
            pltriton.store(saved_window_ref.at[layer, save, lane, channel], saved, mask=is_one)

        _barrier(interpret)  # other threads may have read where this one writes
        pltriton.store(window_ref.at[layer, slot, lane, channel], new, mask=is_one)

    @pl.when(count > 0)
    def _():
        if fields:
            follow()
        else:
            pl.when(is_saved)(save_state)
        move_window()


def _window_after(refs, where, taken, lane, channel, is_one):
    """Rows `taken` to `taken + 3` of the old window and a path's inputs in a row."""
    (window_ref, inputs_ref, path_ref), (layer, slot, request) = refs, where
    place = taken + lane
    is_new, is_old = is_one & (place >= WINDOW), is_one & (place < WINDOW)
    is_node = (lane < WINDOW) & (place >= WINDOW)
    node = pltriton.load(path_ref.at[request, place - WINDOW], mask=is_node, other=0)
    at = inputs_ref.at[layer, request, node, channel]
    new = pltriton.load(at, mask=is_new, other=0.0)
    at = window_ref.at[layer, slot, place, channel]
    old = pltriton.load(at, mask=is_old, other=0.0)
    return jnp.where(is_new, new, old)
