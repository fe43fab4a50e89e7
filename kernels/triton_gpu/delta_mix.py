"""A gated-delta layer between its two products, and the replay of accepted paths, in Triton.

A program has some columns of the state of a request and value head. Convolution, norms and gates of
all nodes are found at once and written, in a launch of their own if tiles say so; then the
recurrence runs from node to node, down the paths of a tree anew, so that a node has the bits of
plain decoding. The last of a head's programs to arrive norms what all have read. Sums over keys are
by halves, as `sum_by_halves`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import DeltaTiles
from kernels.triton_gpu.attention import clear_padding
from kernels.triton_gpu.delta_rows import (
    WINDOW,
    convolved,
    gated_norm,
    gates,
    power,
    sum_by_halves,
    unit,
)
from kernels.triton_gpu.linear import launching

ROWS = 4
"""That are normed at once: more would take registers from the recurrence."""


def verify(
    projected: Float[Tensor, "R outputs"],
    conv: Float[Tensor, "C 4"],
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
    norm: Float[Tensor, " V"],
    recurrent: Float[Tensor, "L states H K V"],
    window: Float[Tensor, "L states 3 C"],
    layer: int,
    slots: Int[Tensor, " B"],
    row_starts: Int[Tensor, " B1"],
    parents: Int[Tensor, "B N"] | None,
    kept: Sequence[Float[Tensor, "L B N ..."]],
    arrivals: Int[Tensor, "B H"],
    *,
    eps: float,
    digits: int,
    tiles: DeltaTiles,
) -> Float[Tensor, "R values"]:
    """As `shared.spec.delta_mix.verify` or `advance`, for rows that lie together by request.

    Args:
      projected: See `shared.spec.mamba_state.split_inputs`.
      conv, a_log, dt_bias, norm, eps: Of the layer.
      recurrent, window, layer: The states of all layers, and which are read.
      slots: The states of the requests. Those of plain decoding are different ones, but for
        padding.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      parents: The trees; None for chains.
      kept: What a replay needs is written to these, fields of `Kept`. Where there are inputs only,
        each request has one node, as in plain decoding, and its recurrent state is advanced.
      arrivals: Zeros, and zeros again afterwards: here programs count themselves.
      digits: Of a unit of the squares: the order of their sums.
      tiles: How the work is cut.

    Raises:
      ValueError: States are not contiguous.
    """
    _check_contiguous(recurrent, window, *kept)
    *fields, inputs = (x[layer] for x in kept)
    R, (H, K, V), (B, N, C) = len(projected), recurrent.shape[2:], inputs.shape
    projected, slots, row_starts = (x.contiguous() for x in (projected, slots, row_starts))
    trees = slots if parents is None else parents.contiguous()
    out = projected.new_empty((R, H * V))
    q, read = recurrent.new_empty((B, N, H, K)), recurrent.new_empty((B, N, H, V))
    advances, columns = not fields, min(tiles.columns, V)
    launches = [(columns, tiles.warps, True, True)]
    if tiles.prepare_warps:
        launches = [(V, tiles.prepare_warps, True, False), (columns, tiles.warps, False, True)]
        if advances:
            fields = [recurrent.new_empty(B * H * size) for size in (K, V, 1, 1)]
    for columns, warps, prepares, recurs in launches:
        _verify_kernel[(H * (V // columns), B)](
            *(projected, conv, a_log, dt_bias, norm, recurrent[layer], window[layer]),
            *(slots, row_starts, trees, q, *(fields or [inputs] * 4), inputs, read, arrivals, out),
            *(R, B, eps),
            N=N,
            H=H,
            K=K,
            V=V,
            C=C,
            nodes=triton.next_power_of_2(N),
            rows=min(triton.next_power_of_2(N), ROWS),
            columns=columns,
            is_chain=parents is None,
            advances=advances,
            prepares=prepares,
            recurs=recurs,
            digits=digits,
            num_warps=warps,
            **launching(projected),
        )
    return out


def commit(
    recurrent: Float[Tensor, "L states H K V"],
    window: Float[Tensor, "L states 3 C"],
    saved_recurrent: Float[Tensor, "L snapshots H K V"],
    saved_window: Float[Tensor, "L snapshots 3 C"],
    kept: Sequence[Float[Tensor, "L B N ..."]],
    slots: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
    *,
    tiles: DeltaTiles,
) -> None:
    """As `shared.spec.delta_mix.commit`, of all layers in one launch.

    Args:
      recurrent, window, kept, slots: See `verify`. Where it has advanced the states, only the
        windows follow.
      saved_recurrent, saved_window: The snapshots of all layers.
      path, counts, save_after: As in the specification.
      save: Which snapshot a request's is written to; 0: none.

    Raises:
      ValueError: States are not contiguous.
    """
    _check_contiguous(recurrent, window, saved_recurrent, saved_window, *kept)
    *fields, inputs = kept
    (L, num_states, H, K, V), C = recurrent.shape, window.shape[3]
    (B, W), N = path.shape, inputs.shape[2]
    rows = (x.contiguous() for x in (slots, path, counts, save_after, save))
    columns = min(tiles.commit_columns, V)
    _commit_kernel[(H * (V // columns), B, L)](
        *(recurrent, window, saved_recurrent, saved_window),
        *(*(fields or [inputs] * 4), inputs, *rows),
        *(B, num_states, saved_recurrent.shape[1]),
        W=W,
        N=N,
        H=H,
        K=K,
        V=V,
        C=C,
        columns=columns,
        advances=bool(fields),
        num_warps=tiles.commit_warps,
        **launching(recurrent),
    )


def _check_contiguous(*arrays: Tensor) -> None:
    if not all(x.is_contiguous() for x in arrays):
        raise ValueError("states must be contiguous")


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _verify_kernel(
    projected_at, conv_at, a_log_at, dt_bias_at, norm_at, state_at, window_at, slots_at, starts_at,
    parents_at, q_at, k_at, v_at, log_decay_at, beta_at, inputs_at, read_at, arrivals_at, out_at,
    num_rows, num_requests, eps, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, nodes: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr, is_chain: tl.constexpr, advances: tl.constexpr, prepares: tl.constexpr,
    recurs: tl.constexpr, digits: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per columns of a value head, and request: what it prepares, what recurs, or both.

    Whatever a program reads again it has written itself, or a launch before has.
    """
    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    width: tl.constexpr = C + H * V + 2 * H
    parts: tl.constexpr = V // columns
    head, part, request = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    key_head = head // (H // key_heads)
    slot = tl.load(slots_at + request).to(tl.int64)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    key, column = tl.arange(0, K), part * columns + tl.arange(0, columns)
    state_at += (slot * H + head) * (K * V) + key[:, None] * V + column[None, :]
    window_at += slot * (WINDOW * C)
    count = tl.minimum(stop - start, N)
    is_only: tl.constexpr = prepares and recurs and (advances or nodes == 1)
    is_early: tl.constexpr = is_only or (recurs and is_chain and not prepares)
    if is_early:
        state = tl.load(state_at)  # no kernel that may still run writes it
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if recurs and part == 0:
        padding = tl.load(starts_at + num_requests) + request
        clear_padding(padding, out_at, num_rows, num_requests, head, 1, H, V)
    if count == 0:
        return
    node = tl.arange(0, nodes)
    is_node = node < count
    row = start + tl.where(is_node, node, 0)
    rows_at = projected_at + row.to(tl.int64) * width
    parents_at += request * N
    kept, is_one = (request * N + node).to(tl.int64), is_node[:, None]
    at = kept * H + head
    if prepares:
        sources = (projected_at + start.to(tl.int64) * width, window_at, conv_at, count)
        places = _places(node, count, parents_at, is_chain)
        inputs_at += kept[:, None] * C
        keeps_key = (head % (H // key_heads) == 0) & (part == 0)
        # Each of a head's programs writes all that it reads again; done with one, it needs
        # registers.
        raw, q = convolved(sources, places, key_head * K, K, C, width)
        if keeps_key:
            tl.store(inputs_at + key_head * K + key[None, :], raw, mask=is_one)
        q = unit(q, digits) * (K**-0.5)
        if not is_only:
            tl.store(q_at + at[:, None] * K + key[None, :], q, mask=is_one)
        raw, k = convolved(sources, places, (key_heads + key_head) * K, K, C, width)
        if keeps_key:
            tl.store(inputs_at + (key_heads + key_head) * K + key[None, :], raw, mask=is_one)
        k = unit(k, digits)
        if not (advances and recurs):
            tl.store(k_at + at[:, None] * K + key[None, :], k, mask=is_one)
        first_value = 2 * key_heads * K + head * V + part * columns
        raw, v = convolved(sources, places, first_value, columns, C, width)
        tl.store(inputs_at + first_value + tl.arange(0, columns)[None, :], raw, mask=is_one)
        b, a = tl.load(rows_at + (C + H * V + head)), tl.load(rows_at + (C + H * V + H + head))
        log_decay, beta = gates(b, a, tl.load(a_log_at + head), tl.load(dt_bias_at + head))
        if not (advances and recurs):
            tl.store(v_at + at[:, None] * V + column[None, :], v, mask=is_one)
            tl.store(log_decay_at + at, log_decay, mask=is_node)
            tl.store(beta_at + at, beta, mask=is_node)
    if not recurs:
        return

    # What a program has of a node lies this many places after that of the one before.
    first = (request * N).to(tl.int64) * H + head
    read_to = read_at + first * V + column
    if is_only:
        is_first = node == 0
        key_of, v_of = _first(k, is_first[:, None]), _first(v, is_first[:, None])
        state = _advanced(state, key_of, v_of, _first(log_decay, is_first), _first(beta, is_first))
        tl.store(read_to, sum_by_halves(state * _first(q, is_first[:, None])[:, None]))
    else:
        if prepares:
            tl.debug_barrier()  # other threads read them than wrote them
        keys, values = first * K + key, first * V + column
        given = (q_at + keys, k_at + keys, v_at + values, log_decay_at + first, beta_at + first)
        if is_chain:
            if not is_early:
                state = tl.load(state_at)
            for i in range(0, count):
                state = _visit(state, given, read_to, i, H, K, V)
        else:
            _walk(state_at, parents_at, given, read_to, node, count, H, K, V)
    if advances:
        tl.store(state_at, state)
    tl.debug_barrier()
    counter = arrivals_at + request * H + head
    if parts > 1:
        if tl.atomic_add(counter, 1, sem="acq_rel") < parts - 1:
            return
        tl.store(counter, 0)
    given = (read_at + first * V, projected_at, norm_at, out_at + head * V, start, count)
    _finish(given, C + head * V, eps, width, H, V, rows, digits)


@triton.jit
def _finish(
    given, first_gate, eps, width: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    rows: tl.constexpr, digits: tl.constexpr,
):  # fmt: skip
    """Norms and gates what a head's nodes have read, some at once."""
    read_at, projected_at, norm_at, out_at, start, count = given
    column, weight = tl.arange(0, V)[None, :], tl.load(norm_at + tl.arange(0, V))[None, :]
    for some in range(0, count, rows):
        node = (some + tl.arange(0, rows)).to(tl.int64)[:, None]
        is_node = node < count
        out = tl.load(read_at + node * (H * V) + column, mask=is_node, other=0.0)
        row = start + node
        z = tl.load(projected_at + row * width + first_gate + column, mask=is_node, other=0.0)
        out = gated_norm(out, z, weight, eps, digits)
        tl.store(out_at + row * (H * V) + column, out.to(out_at.dtype.element_ty), mask=is_node)


@triton.jit
def _first(x, is_first):
    """What the first node has of all nodes'."""
    return tl.sum(tl.where(is_first, x, 0.0), 0)


@triton.jit
def _walk(
    state_at, parents_at, given, read_to, node, count, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Runs from the old state down to each node that has leaves for children, and visits those."""
    parent = tl.load(parents_at + node, mask=(node > 0) & (node < count), other=-1)
    bit = tl.full((), 1, tl.int64) << node.to(tl.int64)
    is_leaf = tl.max((parent[:, None] == node[None, :]).to(tl.int32), axis=0) == 0
    for end in range(0, count):
        leaves = tl.sum(tl.where(is_leaf & (parent == end), bit, 0))
        if (leaves != 0) | (count == 1):
            path, above = tl.full((), 1, tl.int64), end
            while above > 0:
                path |= tl.full((), 1, tl.int64) << above
                above = tl.load(parents_at + above)
            state = tl.load(state_at)
            for i in range(0, end + 1):
                if (path >> i) & 1 != 0:
                    state = _visit(state, given, read_to, i, H, K, V)
            for i in range(end + 1, count):
                if (leaves >> i) & 1 != 0:
                    _visit(state, given, read_to, i, H, K, V)


@triton.jit
def _visit(state, given, read_to, i, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The state after a node; writes what its query reads from it."""
    q_at, k_at, v_at, log_decay_at, beta_at = given
    q, key, v = (
        tl.load(q_at + i * (H * K)),
        tl.load(k_at + i * (H * K)),
        tl.load(v_at + i * (H * V)),
    )
    state = _advanced(state, key, v, tl.load(log_decay_at + i * H), tl.load(beta_at + i * H))
    tl.store(read_to + i * (H * V), sum_by_halves(state * q[:, None]))
    return state


@triton.jit
def _places(node, count, parents_at, is_chain: tl.constexpr):
    """Where the four inputs of each node's convolution stand, the oldest first.

    In window and inputs in a row: node i is `WINDOW + i`.
    """
    new = node + WINDOW
    old = _above(new, count, parents_at, is_chain)
    older = _above(old, count, parents_at, is_chain)
    return _above(older, count, parents_at, is_chain), older, old, new


@triton.jit
def _above(place, count, parents_at, is_chain: tl.constexpr):
    above = place - 1
    if not is_chain:
        child = place - WINDOW
        is_child = (child > 0) & (child < count)
        parent = tl.load(parents_at + child, mask=is_child, other=0)
        above = tl.where(is_child, parent + WINDOW, above)
    return above


@triton.jit
def _advanced(state, key, v, log_decay, beta):
    """The state after a token."""
    state = state * power(log_decay)
    new = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * new[None, :]


@triton.jit(do_not_specialize=["num_requests", "num_states", "num_snapshots"])
def _commit_kernel(
    state_at, window_at, saved_state_at, saved_window_at, k_at, v_at, log_decay_at, beta_at,
    inputs_at, slots_at, path_at, counts_at, save_after_at, save_at, num_requests, num_states,
    num_snapshots, W: tl.constexpr, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, columns: tl.constexpr, advances: tl.constexpr,
    is_launched: tl.constexpr,
):  # fmt: skip
    """One program per columns of a value head, request and layer."""
    parts: tl.constexpr = V // columns
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    count, save_after = tl.load(counts_at + request), tl.load(save_after_at + request)
    if count == 0:
        return
    slot = layer * num_states + tl.load(slots_at + request)
    snapshot = tl.load(save_at + request)
    save = layer * num_snapshots + snapshot
    is_saved = (save_after >= 1) & (save_after <= count) & (snapshot != 0)
    kept = (layer * num_requests + request) * N
    path_at += request * W
    key, column = tl.arange(0, K), part * columns + tl.arange(0, columns)
    square = key[:, None] * V + column[None, :]
    state_at += (slot * H + head) * (K * V) + square
    saved_state_at += (save * H + head) * (K * V) + square
    if advances:
        state = tl.load(state_at)
        for i in range(0, count):
            at = (kept + tl.load(path_at + i)) * H + head
            k, v = tl.load(k_at + at * K + key), tl.load(v_at + at * V + column)
            state = _advanced(state, k, v, tl.load(log_decay_at + at), tl.load(beta_at + at))
            if is_saved & (save_after == i + 1):
                tl.store(saved_state_at, state)
        tl.store(state_at, state)
    elif is_saved:
        tl.store(saved_state_at, tl.load(state_at))

    # Each program writes the windows of some channels, which none other reads.
    own: tl.constexpr = (C + H * parts - 1) // (H * parts)
    lane, channel = tl.arange(0, 4)[:, None], tl.arange(0, triton.next_power_of_2(own))[None, :]
    is_one = (lane < WINDOW) & (channel < own)
    channel += tl.program_id(0) * own
    is_one &= channel < C
    at = lane * C + channel
    given = (window_at + slot * (WINDOW * C), inputs_at + kept * C, path_at)
    new = _window_after(given, count, lane, channel, is_one, C)
    if is_saved:
        saved = _window_after(given, save_after, lane, channel, is_one, C)
        tl.store(saved_window_at + save * (WINDOW * C) + at, saved, mask=is_one)
    tl.debug_barrier()  # other threads may have read where this one writes
    tl.store(window_at + slot * (WINDOW * C) + at, new, mask=is_one)


@triton.jit
def _window_after(given, taken, lane, channel, is_one, C: tl.constexpr):
    """Rows `taken` to `taken + 3` of the old window and a path's inputs in a row."""
    window_at, inputs_at, path_at = given
    place = taken + lane
    is_new, is_old = is_one & (place >= WINDOW), is_one & (place < WINDOW)
    node = tl.load(path_at + place - WINDOW, mask=(lane < WINDOW) & (place >= WINDOW), other=0)
    new = tl.load(inputs_at + node * C + channel, mask=is_new, other=0.0)
    old = tl.load(window_at + place * C + channel, mask=is_old, other=0.0)
    return tl.where(is_new, new, old)
