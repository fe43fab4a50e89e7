"""A gated-delta layer between its two products, and the replay of accepted paths, in Pallas.

A program has some columns of the state of a request and value head. Convolution, norms and gates of
all nodes are found at once and written, in a launch of their own if tiles say so; then the
recurrence runs from node to node, down the paths of a tree anew, so that a node has the bits of
plain decoding. The last of a head's programs to arrive norms what all have read. Sums over keys are
by halves, as `sum_by_halves`.
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
from kernels.pallas_gpu.reach import bits_of, is_in, path_to
from kernels.tiles import DeltaTiles

ROWS = 4
"""That are normed at once: more would take registers from the recurrence."""
FIELDS = ("k", "v", "log_decay", "beta")
"""Of `Kept`, but for the inputs."""


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
    advances, of = len(kept) == 1, jax.ShapeDtypeStruct
    single = partial(of, dtype=jnp.float32)
    how = {"advances": advances, "eps": eps, "digits": digits, "interpret": interpret}

    def launch(columns, warps, reads, makes, writes):
        """What a kernel makes and has written, by name."""
        names = (*reads, *writes, *makes, *writes)  # a name's last place counts
        does = {"prepares": "inputs" in writes, "recurs": "arrivals" in writes}
        kernel = partial(_verify_kernel, columns=columns, **does, **how)
        found = pl.pallas_call(
            lambda *refs: kernel(dict(zip(names, refs, strict=True))),
            grid=(H * (V // columns), B),
            out_shape=[*makes.values(), *(of(x.shape, x.dtype) for x in writes.values())],
            input_output_aliases={len(reads) + i: len(makes) + i for i in range(len(writes))},
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="delta_mix" if "out" in makes else "delta_nodes",
        )(*reads.values(), *writes.values())
        return dict(zip((*makes, *writes), found, strict=True))

    reads = {"projected": projected, "conv": conv, "a_log": a_log, "dt_bias": dt_bias, "norm": norm}
    reads |= {"window": window, "layer": layer, "slots": slots, "starts": row_starts}
    reads |= {} if parents is None else {"parents": parents}
    rows, results = {"q": single((B, N, H, K))}, {"read": single((B, N, H, V))}
    results["out"] = of((R, H * V), projected.dtype)
    fields = dict(zip(FIELDS, kept[:-1], strict=not advances))
    written, counted = fields | {"inputs": kept[-1]}, {"arrivals": arrivals}
    (counted if advances else reads)["state"] = recurrent
    main = (min(tiles.columns, V), tiles.warps)
    if tiles.prepare_warps:
        if advances:
            rows |= {"k": single((1, B, N, H, K)), "v": single((1, B, N, H, V))}
            rows |= dict.fromkeys(FIELDS[2:], single((1, B, N, H)))
        done = launch(V, tiles.prepare_warps, reads, rows, written)
        done |= launch(*main, reads | done, results, counted)
    else:
        done = launch(*main, reads, rows | results, written | counted)
    kept = tuple(done[name] for name in (*fields, "inputs"))
    return done["out"], done.get("state", recurrent), kept, done["arrivals"]


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


def _verify_kernel(refs, *, columns, prepares, recurs, advances, eps, digits, interpret):
    """One program per columns of a value head, and request: what it prepares, what recurs, or both.

    Whatever a program reads again it has written itself, or a launch before has.
    """
    (_, N, H, K), V = refs["q"].shape, refs["norm"].shape[-1]
    parts, rows = V // columns, min(pl.next_power_of_2(N), ROWS)
    head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    request, layer, starts_ref = pl.program_id(1), refs["layer"][0], refs["starts"]
    start, slot = starts_ref[request], refs["slots"][request]
    count = jnp.minimum(starts_ref[request + 1] - start, N)
    is_only = prepares and recurs and (advances or N == 1)
    keeps = not (advances and recurs)
    first_gate = refs["window"].shape[3]
    # Of plain decoding the fields are of one layer.
    own, column = 0 if advances else layer, part * columns + lax.iota(jnp.int32, columns)
    fields = [refs.get(name) for name in FIELDS]

    def prepare():
        """Every node's q, k, v and gates; what was before the convolution is kept."""
        node = early(lax.iota(jnp.int32, pl.next_power_of_2(N)), interpret)
        key, is_node = lax.iota(jnp.int32, K), node < count
        keep, row = is_node[:, None], start + jnp.where(is_node, node, 0)
        sources = (*(refs[x] for x in ("projected", "window", "conv")), layer, slot, start, count)
        places = _places(node, count, refs.get("parents"), request)
        key_heads = (first_gate - H * V) // (2 * K)
        group = H // key_heads
        key_head = lax.div(head, group)
        at, keeps_key = (request, node[:, None]), (lax.rem(head, group) == 0) & (part == 0)

        def convolve(first, lanes, is_kept=None):
            channel = (first + lanes)[None, :]
            raw, x = convolved(sources, places, channel)
            to = refs["inputs"].at[(layer, *at, channel)]
            keep_raw = partial(pltriton.store, to, raw, mask=keep)
            keep_raw() if is_kept is None else pl.when(is_kept)(keep_raw)
            return x

        # Each of a head's programs writes all that it reads again; done with one, it needs
        # registers.
        q = unit(convolve(key_head * K, key, keeps_key), digits) * (K**-0.5)
        if not is_only:
            pltriton.store(refs["q"].at[(*at, head, key[None, :])], q, mask=keep)
        k = unit(convolve((key_heads + key_head) * K, key, keeps_key), digits)
        if keeps:
            pltriton.store(fields[0].at[(own, *at, head, key[None, :])], k, mask=keep)
        v = convolve(2 * key_heads * K + head * V, column)
        gate = first_gate + H * V + head
        b, a = (pltriton.load(refs["projected"].at[row, gate + each]) for each in (0, H))
        heads = (of_layer(refs[name], 1, layer, head) for name in ("a_log", "dt_bias"))
        log_decay, beta = gates(b, a, *heads)
        if keeps:
            pltriton.store(fields[1].at[(own, *at, head, column[None, :])], v, mask=keep)
            for ref, x in zip(fields[2:], (log_decay, beta), strict=True):
                pltriton.store(ref.at[own, request, node, head], x, mask=is_node)
        return [_first(x, node) for x in (q, k, v, log_decay, beta)] if is_only else None

    def recur(prepared):
        """The state from node to node, and what each node reads from it."""
        span = pl.ds(part * columns, columns)
        state_at = refs["state"].at[layer, slot, head, :, span]
        if is_only:
            q, *given = prepared
            state = _advanced(state_at[...], *given)
            refs["read"][request, 0, head, span] = sum_by_halves(state * q[:, None])
        else:
            if prepares:
                _barrier(interpret)  # other threads read them than wrote them
            given = (refs["q"], *fields, refs["read"])
            visit = partial(_visit, given, (own, request, head, part * columns, columns))
            if "parents" in refs:
                _walk(visit, state_at, refs["parents"], request, count)
            else:
                state = lax.fori_loop(0, count, visit, state_at[...])
        if advances:
            state_at[...] = state
        _barrier(interpret)

    def finish(some, carry):
        """Norms and gates what some of a head's nodes have read."""
        node, column = some * rows + lax.iota(jnp.int32, rows), lax.iota(jnp.int32, V)[None, :]
        keep, row = (node < count)[:, None], start + jnp.where(node < count, node, 0)
        read_at = refs["read"].at[request, node[:, None], head, column]
        out = pltriton.load(read_at, mask=keep, other=0.0)
        z = pltriton.load(refs["projected"].at[row[:, None], first_gate + head * V + column])
        out = gated_norm(out, z, of_layer(refs["norm"], 1, layer, column), eps, digits)
        # A node that is not written gets a row outside, for the interpreter.
        to = refs["out"].at[jnp.where(keep, row[:, None], len(refs["out"])), head * V + column]
        pltriton.store(to, out.astype(refs["out"].dtype), mask=keep)
        return carry

    if recurs:
        clear = partial(clear_padding, starts_ref, refs["out"], head, request, 1, V, programs=1)
        pl.when(part == 0)(clear)

    @pl.when(count > 0)
    def _():
        prepared = prepare() if prepares else None
        if not recurs:
            return
        recur(prepared)
        arrived = pltriton.atomic_add(refs["arrivals"], (request, head), jnp.int32(1))

        @pl.when(arrived == parts - 1)
        def _():
            refs["arrivals"][request, head] = 0
            lax.fori_loop(0, lax.div(count + rows - 1, rows), finish, 0)


def _first(x, node):
    """What the first node has of all nodes'."""
    is_first = node == 0
    return jnp.sum(jnp.where(is_first[:, None] if x.ndim == 2 else is_first, x, 0.0), axis=0)


def _barrier(interpret):
    if not interpret:
        pltriton.debug_barrier()


def _walk(visit, state_at, parents_ref, request, count):
    """Runs from the old state down to each node that has leaves for children, and visits those."""
    node = lax.iota(jnp.int32, pl.next_power_of_2(parents_ref.shape[1]))
    is_child = (node > 0) & (node < count)
    parent = pltriton.load(parents_ref.at[request, node], mask=is_child, other=-1)
    is_leaf = jnp.max((parent[:, None] == node[None, :]).astype(jnp.int32), axis=0) == 0

    def descend(end, leaves):
        path = path_to(end, parents_ref, request)

        def visit_if(nodes, i, state):
            return lax.cond(is_in(*nodes, i, len(node)), visit, lambda _, x: x, i, state)

        def visit_leaf(i, state):
            visit_if(leaves, i, state)
            return state

        state = lax.fori_loop(0, end + 1, partial(visit_if, path), state_at[...])
        lax.fori_loop(end + 1, count, visit_leaf, state)

    def look(end, carry):
        leaves = bits_of(is_leaf & (parent == end), node)
        is_end = ((leaves[0] | leaves[1]) != 0) | (count == 1)
        pl.when(is_end)(lambda: descend(end, leaves))
        return carry

    lax.fori_loop(0, count, look, 0)


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
