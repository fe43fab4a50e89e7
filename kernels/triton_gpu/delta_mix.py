"""A gated-delta layer between its two products, and the replay of accepted paths, in Triton.

A program has the whole state of a request and value head. Convolution, norms and gates of all nodes
are found at once; then the recurrence runs from node to node, down each path of a tree anew, so
that a node has the bits of plain decoding. Sums over keys are by halves, as `_sum_by_halves`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import DeltaTiles
from kernels.triton_gpu.attention import clear_padding
from kernels.triton_gpu.linear import launching
from kernels.triton_gpu.noise import log1p
from kernels.triton_gpu.squares import add_up

LEAST = 16
"""Of the sizes of keys and values, which are powers of two."""
MOST_NODES = 64
"""Of a tree."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_WINDOW = tl.constexpr(3)
_UNIT_EPS = tl.constexpr(1e-6)
_HALVINGS = tl.constexpr(10)  # at most


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
    advances = not fields
    _verify_kernel[(H, B)](
        *(projected, conv, a_log, dt_bias, norm, recurrent[layer], window[layer]),
        *(slots, row_starts, trees, *(fields or [inputs] * 4), inputs, out),
        *(R, B, eps),
        N=N,
        H=H,
        K=K,
        V=V,
        C=C,
        nodes=triton.next_power_of_2(N),
        is_chain=parents is None,
        advances=advances,
        digits=digits,
        num_warps=tiles.warps,
        maxnreg=tiles.registers or None,
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
    _commit_kernel[(H, B, L)](
        *(recurrent, window, saved_recurrent, saved_window),
        *(*(fields or [inputs] * 4), inputs, *rows),
        *(B, num_states, saved_recurrent.shape[1]),
        W=W,
        N=N,
        H=H,
        K=K,
        V=V,
        C=C,
        steps=triton.next_power_of_2(W),
        advances=bool(fields),
        num_warps=tiles.warps,
        maxnreg=tiles.registers or None,
        **launching(recurrent),
    )


def _check_contiguous(*arrays: Tensor) -> None:
    if not all(x.is_contiguous() for x in arrays):
        raise ValueError("states must be contiguous")


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _verify_kernel(
    projected_at, conv_at, a_log_at, dt_bias_at, norm_at, state_at, window_at, slots_at, starts_at,
    parents_at, k_at, v_at, log_decay_at, beta_at, inputs_at, out_at, num_rows, num_requests, eps,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    nodes: tl.constexpr, is_chain: tl.constexpr, advances: tl.constexpr, digits: tl.constexpr,
    is_launched: tl.constexpr,
):  # fmt: skip
    """One program per value head and request."""
    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    width: tl.constexpr = C + H * V + 2 * H
    head, request = tl.program_id(0), tl.program_id(1)
    key_head = head // (H // key_heads)
    slot = tl.load(slots_at + request).to(tl.int64)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    state_at += (slot * H + head) * (K * V) + _square(K, V)
    window_at += slot * (_WINDOW * C)
    count = tl.minimum(stop - start, N)
    if is_chain:
        state = tl.load(state_at)  # no kernel that may still run writes it
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    clear_padding(
        tl.load(starts_at + num_requests) + request, out_at, num_rows, num_requests, head, 1, H, V
    )
    if count == 0:
        return
    node, column = tl.arange(0, nodes), tl.arange(0, V)[None, :]
    is_node = node < count
    row = start + tl.where(is_node, node, 0)
    rows_at = projected_at + row.to(tl.int64) * width
    parents_at += request * N
    sources = (projected_at + start.to(tl.int64) * width, window_at, conv_at, count)
    places = _places(node, count, parents_at, is_chain)
    raw_q, q = _convolved(sources, places, key_head * K, K, C, width)
    raw_k, k = _convolved(sources, places, (key_heads + key_head) * K, K, C, width)
    raw_v, v = _convolved(sources, places, 2 * key_heads * K + head * V, V, C, width)
    q = q * tl.rsqrt(add_up(q * q, digits) + _UNIT_EPS)[:, None] * (K**-0.5)
    k = k * tl.rsqrt(add_up(k * k, digits) + _UNIT_EPS)[:, None]
    z = tl.load(rows_at[:, None] + (C + head * V) + column).to(tl.float32)
    b = tl.load(rows_at + (C + H * V + head)).to(tl.float32)
    a = tl.load(rows_at + (C + H * V + H + head)).to(tl.float32) + tl.load(dt_bias_at + head)
    log_decay = -tl.exp2(tl.load(a_log_at + head) * _LOG2_E) * _softplus(a)
    beta = 1.0 / (1.0 + tl.exp2(-b * _LOG2_E))

    kept = (request * N + node).to(tl.int64)
    if not advances:
        at = kept * H + head
        tl.store(k_at + at[:, None] * K + tl.arange(0, K)[None, :], k, mask=is_node[:, None])
        tl.store(v_at + at[:, None] * V + column, v, mask=is_node[:, None])
        tl.store(log_decay_at + at, log_decay, mask=is_node)
        tl.store(beta_at + at, beta, mask=is_node)
    inputs_at += kept[:, None] * C
    tl.store(inputs_at + 2 * key_heads * K + head * V + column, raw_v, mask=is_node[:, None])
    if head % (H // key_heads) == 0:
        key_at = inputs_at + key_head * K + tl.arange(0, K)[None, :]
        tl.store(key_at, raw_q, mask=is_node[:, None])
        tl.store(key_at + key_heads * K, raw_k, mask=is_node[:, None])

    given = (q, k, v, log_decay, beta, node)
    outs = tl.zeros((nodes, V), tl.float32)
    if is_chain:
        for i in range(0, count):
            state, out = _step(state, given, i)
            outs = tl.where(node[:, None] == i, out[None, :], outs)
    else:
        parent = tl.load(parents_at + node, mask=is_node & (node > 0), other=-1)
        for leaf in range(0, count):
            if tl.max((parent == leaf).to(tl.int32)) == 0:
                outs = _descend(state_at, parents_at, given, leaf, outs)
    if advances:
        tl.store(state_at, state)
    scale = tl.rsqrt(add_up(outs * outs, digits) * (1.0 / V) + eps)
    outs = outs * scale[:, None] * tl.load(norm_at + column)
    outs = outs * (z / (1.0 + tl.exp2(-z * _LOG2_E)))
    at = out_at + (row.to(tl.int64) * H + head)[:, None] * V + column
    tl.store(at, outs.to(out_at.dtype.element_ty), mask=is_node[:, None])


@triton.jit
def _descend(state_at, parents_at, given, leaf, outs):
    """Runs down the path to a leaf from the old state; adds what its nodes' queries read."""
    node = given[5]
    path, above = tl.full((), 1, tl.int64), leaf
    while above > 0:
        path |= tl.full((), 1, tl.int64) << above
        above = tl.load(parents_at + above)
    state = tl.load(state_at)
    for i in range(0, leaf + 1):
        if (path >> i) & 1 != 0:
            state, out = _step(state, given, i)
            outs = tl.where(node[:, None] == i, out[None, :], outs)
    return outs


@triton.jit
def _square(K: tl.constexpr, V: tl.constexpr):
    """Where the numbers of a state lie in it."""
    return tl.arange(0, K)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def _places(node, count, parents_at, is_chain: tl.constexpr):
    """Where the four inputs of each node's convolution stand, the oldest first.

    In window and inputs in a row: node i is `_WINDOW + i`.
    """
    new = node + _WINDOW
    old = _above(new, count, parents_at, is_chain)
    older = _above(old, count, parents_at, is_chain)
    return _above(older, count, parents_at, is_chain), older, old, new


@triton.jit
def _above(place, count, parents_at, is_chain: tl.constexpr):
    above = place - 1
    if not is_chain:
        child = place - _WINDOW
        is_child = (child > 0) & (child < count)
        parent = tl.load(parents_at + child, mask=is_child, other=0)
        above = tl.where(is_child, parent + _WINDOW, above)
    return above


@triton.jit
def _convolved(sources, places, first, D: tl.constexpr, C: tl.constexpr, width: tl.constexpr):
    """The inputs of some channels at each node, and what the convolution makes of them."""
    rows_at, window_at, conv_at, count = sources
    channel = first + tl.arange(0, D)
    for tap in tl.static_range(4):
        place = places[tap]
        # A spare node reads no row.
        is_row = (place >= _WINDOW) & (place < _WINDOW + count)
        at = rows_at + ((place - _WINDOW) * width)[:, None] + channel[None, :]
        new = tl.load(at, mask=is_row[:, None], other=0.0)
        at = window_at + (place * C)[:, None] + channel[None, :]
        is_old = (place < _WINDOW)[:, None]
        x = tl.where(is_old, tl.load(at, mask=is_old, other=0.0), new)
        term = x.to(tl.float32) * tl.load(conv_at + channel * 4 + tap).to(tl.float32)[None, :]
        if tap == 0:
            total = term
        else:
            total += term
    return x, total / (1.0 + tl.exp2(-total * _LOG2_E))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); where that is x to the last digit, no power is so large as to be none."""
    return tl.where(x <= 20.0, log1p(_power(tl.minimum(x, 20.0))), x)


@triton.jit
def _power(x):
    """exp(x), but no less than 2^-126: Triton counts what is less as 0, XLA does not."""
    power = x * _LOG2_E
    return tl.exp2(tl.where(power < -126.0, -126.0, power))


@triton.jit
def _step(state, given, i):
    """The state after a node, and what its query reads from it."""
    q, k, v, log_decay, beta, node = given
    key = _of_node(k, node, i)[:, None]
    state = _advanced(
        state,
        key,
        _of_node(v, node, i),
        _scalar_of_node(log_decay, node, i),
        _scalar_of_node(beta, node, i),
    )
    return state, _sum_by_halves(state * _of_node(q, node, i)[:, None])


@triton.jit
def _advanced(state, key, v, log_decay, beta):
    """The state after a token."""
    state = state * _power(log_decay)
    new = (v - _sum_by_halves(state * key)) * beta
    return state + key * new[None, :]


@triton.jit
def _of_node(x, node, i):
    """One row of what all nodes have; a NaN in the others does not matter."""
    return tl.sum(tl.where(node[:, None] == i, x, 0.0), 0)


@triton.jit
def _scalar_of_node(x, node, i):
    return tl.sum(tl.where(node == i, x, 0.0), 0)


@triton.jit
def _sum_by_halves(x):
    """Sums columns: one half of the rows is added to the other, until one row is left.

    A sum of two has one order, whichever threads have the terms.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for halving in tl.static_range(1, 1 + _HALVINGS):
        if rows >> halving > 0:
            x = tl.sum(tl.reshape(x, (2, rows >> halving, columns)), 0)
    return tl.reshape(x, (columns,))


@triton.jit(do_not_specialize=["num_requests", "num_states", "num_snapshots"])
def _commit_kernel(
    state_at, window_at, saved_state_at, saved_window_at, k_at, v_at, log_decay_at, beta_at,
    inputs_at, slots_at, path_at, counts_at, save_after_at, save_at, num_requests, num_states,
    num_snapshots, W: tl.constexpr, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, steps: tl.constexpr, advances: tl.constexpr,
    is_launched: tl.constexpr,
):  # fmt: skip
    """One program per value head, request and layer."""
    head, request, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
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
    state_at += (slot * H + head) * (K * V) + _square(K, V)
    saved_state_at += (save * H + head) * (K * V) + _square(K, V)
    if advances:
        step = tl.arange(0, steps)
        is_step = step < count
        node = kept + tl.load(path_at + request * W + step, mask=is_step, other=0)
        at, is_one = (node * H + head)[:, None], is_step[:, None]
        k = tl.load(k_at + at * K + tl.arange(0, K)[None, :], mask=is_one, other=0.0)
        v = tl.load(v_at + at * V + tl.arange(0, V)[None, :], mask=is_one, other=0.0)
        log_decay = tl.load(log_decay_at + node * H + head, mask=is_step, other=0.0)
        beta = tl.load(beta_at + node * H + head, mask=is_step, other=0.0)
        state = tl.load(state_at)
        for i in range(0, count):
            state = _advanced(
                state,
                _of_node(k, step, i)[:, None],
                _of_node(v, step, i),
                _scalar_of_node(log_decay, step, i),
                _scalar_of_node(beta, step, i),
            )
            if is_saved & (save_after == i + 1):
                tl.store(saved_state_at, state)
        tl.store(state_at, state)
    elif is_saved:
        tl.store(saved_state_at, tl.load(state_at))

    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    window_at += slot * (_WINDOW * C)
    saved_window_at += save * (_WINDOW * C)
    inputs_at += kept * C
    path_at += request * W
    given = (window_at, saved_window_at, inputs_at, path_at, count, save_after, is_saved)
    _move_window(given, 2 * key_heads * K + head * V, V, C)
    if head % (H // key_heads) == 0:  # one program writes a window, none other reads it
        key_head = head // (H // key_heads)
        _move_window(given, key_head * K, K, C)
        _move_window(given, (key_heads + key_head) * K, K, C)


@triton.jit
def _move_window(given, first, D: tl.constexpr, C: tl.constexpr):
    """Writes the windows of some channels after the path, and after what is saved."""
    window_at, saved_at, inputs_at, path_at, count, save_after, is_saved = given
    lane, channel = tl.arange(0, 4), first + tl.arange(0, D)[None, :]
    is_one, at = (lane < _WINDOW)[:, None], lane[:, None] * C + channel
    new = _window_after(window_at, inputs_at, path_at, count, lane, channel, C)
    if is_saved:
        saved = _window_after(window_at, inputs_at, path_at, save_after, lane, channel, C)
        tl.store(saved_at + at, saved, mask=is_one)
    tl.debug_barrier()  # other threads may have read where this one writes
    tl.store(window_at + at, new, mask=is_one)


@triton.jit
def _window_after(window_at, inputs_at, path_at, taken, lane, channel, C: tl.constexpr):
    """Rows `taken` to `taken + 3` of the old window and a path's inputs in a row."""
    place = taken + lane
    is_one = lane < _WINDOW
    is_new = is_one & (place >= _WINDOW)
    node = tl.load(path_at + place - _WINDOW, mask=is_new, other=0)
    new = tl.load(inputs_at + (node * C)[:, None] + channel, mask=is_new[:, None], other=0.0)
    is_old = is_one & (place < _WINDOW)
    old = tl.load(window_at + (place * C)[:, None] + channel, mask=is_old[:, None], other=0.0)
    return tl.where(is_new[:, None], new, old)
