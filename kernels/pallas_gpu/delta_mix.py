"""A gated-delta layer between its two products, and the replay of accepted paths, in Pallas.

A program has the whole state of a request and value head. Convolution, norms and gates of all nodes
are found at once; then the recurrence runs from node to node, down each path of a tree anew, so
that a node has the bits of plain decoding. Sums over keys are by halves, as `_sum_by_halves`.
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
from kernels.pallas_gpu.heads import early
from kernels.pallas_gpu.noise import log1p
from kernels.pallas_gpu.reach import is_in
from kernels.pallas_gpu.squares import add_up
from kernels.tiles import DeltaTiles

LEAST = 16
"""Of the sizes of keys and values, which are powers of two."""
MOST_NODES = 64
"""Of a tree."""

_LOG2_E = 1.4426950408889634
_WINDOW = 3
_UNIT_EPS = 1e-6


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
    *,
    eps: float,
    digits: int,
    tiles: DeltaTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R values"],
    Float[jax.Array, "L states H K V"],
    tuple[Float[jax.Array, "L B N ..."], ...],
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
      digits: Of a unit of the squares: the order of their sums.
      tiles: How the work is cut.
      interpret: Run on a CPU.

    Returns:
      The heads' outputs side by side, and the recurrent states and `kept` after the writes.

    Raises:
      ValueError: The tiles bound the registers.
    """
    _check_unbounded(tiles)
    H, _, V = recurrent.shape[2:]
    advances = len(kept) == 1
    written = [*kept, recurrent] if advances else list(kept)
    how = {"eps": eps, "digits": digits, "interpret": interpret}
    out, *found = pl.pallas_call(
        partial(_verify_kernel, advances=advances, is_chain=parents is None, **how),
        grid=(H, len(slots)),
        out_shape=[
            jax.ShapeDtypeStruct((len(projected), H * V), projected.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written),
        ],
        input_output_aliases={11 + number: 1 + number for number in range(len(written))},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="delta_mix",
    )(
        *(projected, conv, a_log, dt_bias, norm, slots if advances else recurrent, window, layer),
        *(slots, row_starts, slots if parents is None else parents, *written),
    )
    return out, found.pop() if advances else recurrent, tuple(found)


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

    Raises:
      ValueError: The tiles bound the registers.
    """
    _check_unbounded(tiles)
    states = (recurrent, window, saved_recurrent, saved_window)
    return tuple(
        pl.pallas_call(
            partial(_commit_kernel, interpret=interpret),
            grid=(recurrent.shape[2], len(slots), len(recurrent)),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in states],
            input_output_aliases={number: number for number in range(len(states))},
            compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=1),
            interpret=interpret,
            name="commit_states",
        )(*states, slots, path, counts, save_after, save, *kept)
    )


def _check_unbounded(tiles: DeltaTiles) -> None:
    if tiles.registers:
        raise ValueError("Pallas cannot bound the registers of a kernel")


def _verify_kernel(
    projected_ref, conv_ref, a_log_ref, dt_bias_ref, norm_ref, state_ref, window_ref, layer_ref,
    slots_ref, starts_ref, parents_ref, *refs, advances, is_chain, eps, digits, interpret,
):  # fmt: skip
    """One program per value head and request."""
    out_ref, *kept_refs = refs[len(refs) // 2 :]
    if advances:
        state_ref = kept_refs.pop()
    head, request, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    N, C, (H, K, V) = kept_refs[-1].shape[2], window_ref.shape[3], state_ref.shape[2:]
    nodes, key_heads = pl.next_power_of_2(N), (C - H * V) // (2 * K)
    group = H // key_heads
    key_head = lax.div(head, group)
    slot, start, stop = slots_ref[request], starts_ref[request], starts_ref[request + 1]
    count = jnp.minimum(stop - start, N)
    clear_padding(starts_ref, out_ref, head, request, 1, V, programs=1)

    @pl.when(count > 0)
    def _():
        node = early(lax.iota(jnp.int32, nodes), interpret)
        key, column = lax.iota(jnp.int32, K)[None, :], lax.iota(jnp.int32, V)[None, :]
        is_node = node < count
        keep = is_node[:, None]
        row = start + jnp.where(is_node, node, 0)
        sources = (projected_ref, window_ref, conv_ref, layer, slot, start, count)
        places = _places(node, count, None if is_chain else parents_ref, request)
        raw_q, q = _convolved(sources, places, key_head * K + key)
        raw_k, k = _convolved(sources, places, (key_heads + key_head) * K + key)
        raw_v, v = _convolved(sources, places, 2 * key_heads * K + head * V + column)
        q = q * lax.rsqrt(add_up(q * q, digits) + _UNIT_EPS)[:, None] * (K**-0.5)
        k = k * lax.rsqrt(add_up(k * k, digits) + _UNIT_EPS)[:, None]
        z = pltriton.load(projected_ref.at[row[:, None], C + head * V + column])
        z = z.astype(jnp.float32)
        b, a = (
            pltriton.load(projected_ref.at[row, C + H * V + each + head]).astype(jnp.float32)
            for each in (0, H)
        )
        a = a + _of_layer(dt_bias_ref, 1, layer, head)
        decay = jnp.exp2(_of_layer(a_log_ref, 1, layer, head) * _LOG2_E)
        log_decay, beta = -decay * _softplus(a), 1.0 / (1.0 + jnp.exp2(-b * _LOG2_E))

        *fields, inputs_ref = kept_refs
        at = (layer, request, node[:, None])
        if not advances:
            for ref, x, lane in zip(fields[:2], (k, v), (key, column), strict=True):
                pltriton.store(ref.at[(*at, head, lane)], x, mask=keep)
            for ref, x in zip(fields[2:], (log_decay, beta), strict=True):
                pltriton.store(ref.at[layer, request, node, head], x, mask=is_node)
        channel = 2 * key_heads * K + head * V + column
        pltriton.store(inputs_ref.at[(*at, channel)], raw_v, mask=keep)

        @pl.when(lax.rem(head, group) == 0)
        def _():
            for x, which in ((raw_q, key_head), (raw_k, key_heads + key_head)):
                pltriton.store(inputs_ref.at[(*at, which * K + key)], x, mask=keep)

        step = partial(_step, (q, k, v, log_decay, beta), node)
        outs, state_at = jnp.zeros((nodes, V), jnp.float32), state_ref.at[layer, slot, head]
        if is_chain:
            state, outs = lax.fori_loop(0, count, step, (state_at[...], outs))
            if advances:
                state_at[...] = state
        else:
            outs = _walk(step, state_at, parents_ref, request, node, count, outs)
        scale = lax.rsqrt(add_up(outs * outs, digits) * (1.0 / V) + eps)
        outs = outs * scale[:, None] * _of_layer(norm_ref, 1, layer, column)
        outs = outs * (z / (1.0 + jnp.exp2(-z * _LOG2_E)))
        # A node that is not written gets a row outside, for the interpreter.
        at = jnp.where(is_node, row, out_ref.shape[0])[:, None]
        pltriton.store(out_ref.at[at, head * V + column], outs.astype(out_ref.dtype), mask=keep)


def _walk(step, state_at, parents_ref, request, node, count, outs):
    """Runs down the path to each leaf from the old state; gives what the nodes' queries read."""
    is_child = (node > 0) & (node < count)
    parent = pltriton.load(parents_ref.at[request, node], mask=is_child, other=-1)

    def descend(leaf, outs):
        path = _path_to(leaf, parents_ref, request)

        def visit(i, carry):
            is_on_path = is_in(*path, i, len(node))
            return lax.cond(is_on_path, step, lambda _, carry: carry, i, carry)

        return lax.fori_loop(0, leaf + 1, visit, (state_at[...], outs))[1]

    def visit(leaf, outs):
        is_leaf = jnp.max((parent == leaf).astype(jnp.int32)) == 0
        return lax.cond(is_leaf, descend, lambda _, outs: outs, leaf, outs)

    return lax.fori_loop(0, count, visit, outs)


def _path_to(leaf, parents_ref, request):
    """The nodes from the root to a leaf, as the bits of two numbers."""

    def climb(carry):
        above, low, high = carry
        bit, is_high = lax.shift_left(jnp.int32(1), above & 31), above >> 5
        return parents_ref[request, above], low | bit * (1 - is_high), high | bit * is_high

    above_root = lambda carry: carry[0] > 0  # noqa: E731
    return lax.while_loop(above_root, climb, (leaf, jnp.int32(1), jnp.int32(0)))[1:]


def _of_layer(ref, rank, layer, *at):
    """Of a layer's parameter, or of a stack of all layers' ones."""
    lead = (layer,) if len(ref.shape) > rank else ()
    return pltriton.load(ref.at[(*lead, *at)])


def _places(node, count, parents_ref, request):
    """Where the four inputs of each node's convolution stand, the oldest first.

    In window and inputs in a row: node i is `_WINDOW + i`.
    """

    def above(place):
        if parents_ref is None:
            return place - 1
        child = place - _WINDOW
        is_child = (child > 0) & (child < count)
        parent = pltriton.load(
            parents_ref.at[request, jnp.where(is_child, child, 0)], mask=is_child, other=0
        )
        return jnp.where(is_child, parent + _WINDOW, place - 1)

    new = node + _WINDOW
    old = above(new)
    older = above(old)
    return above(older), older, old, new


def _convolved(sources, places, channel):
    """The inputs of some channels at each node, and what the convolution makes of them."""
    projected_ref, window_ref, conv_ref, layer, slot, start, count = sources
    total = None
    for tap, place in enumerate(places):
        is_old, place = (place < _WINDOW)[:, None], place[:, None]
        # A spare node reads no row.
        is_row = (place >= _WINDOW) & (place < _WINDOW + count)
        at = projected_ref.at[start + place - _WINDOW, channel]
        new = pltriton.load(at, mask=is_row, other=0.0)
        at = window_ref.at[layer, slot, place, channel]
        x = jnp.where(is_old, pltriton.load(at, mask=is_old, other=0.0), new)
        tap_of = _of_layer(conv_ref, 2, layer, channel[0], tap).astype(jnp.float32)
        term = x.astype(jnp.float32) * tap_of[None, :]
        total = term if total is None else total + term
    return x, total / (1.0 + jnp.exp2(-total * _LOG2_E))


def _softplus(x):
    """log(1 + exp(x)); where that is x to the last digit, no power is so large as to be none."""
    return jnp.where(x <= 20.0, log1p(_power(jnp.minimum(x, 20.0))), x)


def _power(x):
    """exp(x), but no less than 2^-126: Triton counts what is less as 0, XLA does not."""
    power = x * _LOG2_E
    return jnp.exp2(jnp.where(power < -126.0, -126.0, power))


def _step(given, node, i, carry):
    """The state after a node, and what its query reads from it, beside what others have read."""
    state, outs = carry
    q, *token = (_of_node(x, node, i) for x in given)
    state = _advanced(state, *token)
    out = _sum_by_halves(state * q[:, None])
    return state, jnp.where(node[:, None] == i, out[None, :], outs)


def _advanced(state, key, v, log_decay, beta):
    """The state after a token."""
    state = state * _power(log_decay)
    new = (v - _sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * new[None, :]


def _of_node(x, node, i):
    """One row of what all nodes have; a NaN in the others does not matter."""
    is_one = node == i
    return jnp.sum(jnp.where(is_one[:, None] if x.ndim == 2 else is_one, x, 0.0), axis=0)


def _sum_by_halves(x):
    """Sums columns: one half of the rows is added to the other, until one row is left.

    A sum of two has one order, whichever threads have the terms.
    """
    rows, columns = x.shape
    while rows > 1:
        rows //= 2
        x = jnp.sum(x.reshape(2, rows, columns), axis=0)
    return x.reshape(columns)


def _commit_kernel(*refs, interpret):
    """One program per value head, request and layer."""
    slots_ref, path_ref, counts_ref, save_after_ref, save_ref, *kept_refs = refs[4:-4]
    state_ref, window_ref, saved_state_ref, saved_window_ref = refs[-4:]
    *fields, inputs_ref = kept_refs
    head, request, layer = (pl.program_id(axis) for axis in range(3))
    slot, save, save_after = slots_ref[request], save_ref[request], save_after_ref[request]
    (H, K, V), C, W = state_ref.shape[2:], window_ref.shape[3], path_ref.shape[1]
    key_heads = (C - H * V) // (2 * K)
    count = counts_ref[request]
    is_saved = (save_after >= 1) & (save_after <= count) & (save != 0)
    refs = (window_ref, inputs_ref, path_ref)

    def follow():
        """The recurrent state along the path."""
        step = lax.iota(jnp.int32, pl.next_power_of_2(W))
        is_step = step < count
        node = pltriton.load(path_ref.at[request, step], mask=is_step, other=0)

        def rows_of(ref):
            if len(ref.shape) == 4:
                at = ref.at[layer, request, node, head]
                return pltriton.load(at, mask=is_step, other=0.0)
            column = lax.iota(jnp.int32, ref.shape[4])[None, :]
            at = ref.at[layer, request, node[:, None], head, column]
            return pltriton.load(at, mask=is_step[:, None], other=0.0)

        tokens = [rows_of(ref) for ref in fields]

        def advance(i, state):
            state = _advanced(state, *(_of_node(x, step, i) for x in tokens))

            @pl.when(is_saved & (save_after == i + 1))
            def _():
                saved_state_ref[layer, save, head] = state

            return state

        state = lax.fori_loop(0, count, advance, state_ref[layer, slot, head])
        state_ref[layer, slot, head] = state

    def save_state():
        saved_state_ref[layer, save, head] = state_ref[layer, slot, head]

    def move_window(first, D):
        """Writes the windows of some channels after the path, and after what is saved."""
        lane, channel = lax.iota(jnp.int32, 4), first + lax.iota(jnp.int32, D)[None, :]
        is_one = (lane < _WINDOW)[:, None]
        after = partial(_window_after, refs, (layer, slot, request), lane=lane, channel=channel)
        new = after(count)

        @pl.when(is_saved)
        def _():
            at = saved_window_ref.at[layer, save, lane[:, None], channel]
            pltriton.store(at, after(save_after), mask=is_one)

        if not interpret:
            pltriton.debug_barrier()  # other threads may have read where this one writes
        # The last lane is outside, for the interpreter.
        pltriton.store(window_ref.at[layer, slot, lane[:, None], channel], new, mask=is_one)

    @pl.when(count > 0)
    def _():
        if fields:
            follow()
        else:
            pl.when(is_saved)(save_state)
        move_window(2 * key_heads * K + head * V, V)
        key_head = lax.div(head, H // key_heads)

        @pl.when(lax.rem(head, H // key_heads) == 0)  # one program writes a window, none reads it
        def _():
            move_window(key_head * K, K)
            move_window((key_heads + key_head) * K, K)


def _window_after(refs, where, taken, lane, channel):
    """Rows `taken` to `taken + 3` of the old window and a path's inputs in a row."""
    (window_ref, inputs_ref, path_ref), (layer, slot, request) = refs, where
    place, is_one = taken + lane, lane < _WINDOW
    is_new, is_old = is_one & (place >= _WINDOW), is_one & (place < _WINDOW)
    node = pltriton.load(path_ref.at[request, place - _WINDOW], mask=is_new, other=0)
    at = inputs_ref.at[layer, request, node[:, None], channel]
    new = pltriton.load(at, mask=is_new[:, None], other=0.0)
    at = window_ref.at[layer, slot, place[:, None], channel]
    old = pltriton.load(at, mask=is_old[:, None], other=0.0)
    return jnp.where(is_new[:, None], new, old)
