"""Decoding and tree verification of GDN and Mamba2 layers between the two GEMMs (Triton).

A program processes some state columns of one request and value head. Causal convolution, norms and
gates of all nodes are computed at once and stored, in a separate launch if the tiles select it. The
recurrence then runs from node to node, in a tree along a list of visits per group of leaves, so a
node is bitwise equal to plain decoding. In GDN the last program of a head and group to arrive
applies the gated norm to their outputs. In Mamba2 the norm spans heads, and each program writes its
outputs. Sums over keys use `sum_by_halves`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gdn_tiles import MOST_TREE_GROUPS as _MOST_TREE_GROUPS
from kernels.gdn_tiles import GDNLayerTiles
from kernels.recurrent_sizes import columns_of, size_of_list, sizes_of
from kernels.triton_gpu.attention.attention import (
    clear_padding,
)
from kernels.triton_gpu.gdn.gdn_rows import (
    WINDOW,
    GDNLayerWeights,
    Inputs,
    States,
    check_contiguous,
    convolved,
    gated_norm,
    gates,
    rounded,
    sum_by_halves,
    time_steps,
    unit,
)
from kernels.triton_gpu.gdn.gdn_tree import (
    NODE,
    FirstNode,
    advanced,
    kept_of,
    list_visits,
    places_of,
    visit,
    walk,
)
from kernels.triton_gpu.gemm.linear import launching

MOST_TREE_GROUPS = tl.constexpr(_MOST_TREE_GROUPS)
ROWS = 8
"""Rows normalised at once; more would take registers from the recurrence."""


class GDNRequests(NamedTuple):
    """State slots, rows and draft trees of a step's requests.

    Attributes:
      slots: State slot of each request.
      starts: First flat row of each request, and the end.
      parents: Parent of each tree node; any array for chains.
    """

    slots: Any
    starts: Any
    parents: Any


class Scratch(NamedTuple):
    """Scratch buffers of programs: node queries, their outputs, visits of trees, arrival counters.

    Mamba2 has the skip terms of the outputs in `skipped` and writes outputs to their rows.
    """

    q: Any
    read: Any
    skipped: Any
    visits: Any
    arrivals: Any


class GDNWork(NamedTuple):
    """Compile-time settings of a launch.

    Attributes:
      nodes, lanes: Maximum nodes of a request, and the next power of two.
      prepared: Nodes that a program prepares, a power of two.
      rows: Rows normalised at once.
      columns: State columns of a program.
      groups, visits: Programs that share the leaves of a tree, and size of their lists of visits.
      advances: Whether this is plain decoding, which writes the new state.
      prepares, recurs: Whether the launch computes the inputs of the recurrence, and whether it
        runs the recurrence.
    """

    nodes: int
    lanes: int
    prepared: int
    rows: int
    columns: int
    groups: int
    visits: int
    is_chain: bool
    advances: bool
    prepares: bool
    recurs: bool


def verify(
    projected: Float[Tensor, "R outputs"],
    conv: Float[Tensor, "C 4"],
    conv_bias: Float[Tensor, " C"] | None,
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
    skip: Float[Tensor, " H"] | None,
    norm: Float[Tensor, " V"] | None,
    recurrent: Float[Tensor, "L states H K V"],
    window: Float[Tensor, "L states 3 C"],
    layer: int,
    slots: Int[Tensor, " B"],
    row_starts: Int[Tensor, " B1"],
    parents: Int[Tensor, "B N"] | None,
    kept: Sequence[Float[Tensor, "L B N ..."]],
    arrivals: Int[Tensor, "B H groups"],
    *,
    eps: float,
    digits: int,
    tiles: GDNLayerTiles,
) -> Float[Tensor, "R values"]:
    """Same as `shared.spec.recurrent_layer.verify` or `decode`, for flat rows grouped by request.

    Args:
      projected: See `shared.spec.recurrent_state.split_inputs`.
      conv, conv_bias, a_log, dt_bias, skip, norm, eps: Weights of the layer, and the epsilon of
        its norm. GDN has a norm, and Mamba2 a skip weight instead.
      recurrent, window, layer: States of all layers, and the index of the layer to read.
      slots: State slot of each request; distinct in plain decoding, except for padding.
      row_starts: First flat row of each request, and the end; later rows are padding.
      parents: Parent of each tree node; None for chains.
      kept: Replay inputs of all layers, which are written: the fields of `NodeReplay`, for Mamba2
        without `beta`. With `inputs` alone, each request has one node (plain decoding) and its
        recurrent state is advanced.
      arrivals: Arrival counters of programs, all zero, and zero again afterwards.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.
      tiles: Tile config.

    Raises:
      ValueError: States are not contiguous.
    """
    check_contiguous(recurrent, window, *kept)
    *fields, inputs = (x[layer] for x in kept)
    (B, N, _), new = inputs.shape, recurrent.new_empty
    has = {"has_delta": skip is None, "has_bias": conv_bias is not None}
    sizes = sizes_of(recurrent.shape, window.shape, **has)
    H, K, V = sizes.H, sizes.K, sizes.V
    projected, slots, row_starts = (x.contiguous() for x in (projected, slots, row_starts))
    trees = slots if parents is None else parents.contiguous()
    out = projected.new_empty((len(projected), H * V))
    q, values = new((B, N, H, K)), new((B, N, H, V))
    read, skipped = (values, None) if skip is None else (None, values)
    groups, lanes = 1 if parents is None else tiles.groups, triton.next_power_of_2(N)
    visits = arrivals if parents is None else arrivals.new_empty((B, groups, size_of_list(N)))
    scratch = Scratch(q=q, read=read, skipped=skipped, visits=visits, arrivals=arrivals)
    main = GDNWork(
        nodes=N,
        lanes=lanes,
        prepared=lanes,
        rows=min(lanes, ROWS),
        columns=columns_of(tiles.columns, sizes),
        groups=groups,
        visits=size_of_list(N),
        is_chain=parents is None,
        advances=not fields,
        prepares=not tiles.prepare_warps,
        recurs=True,
    )
    launches = [(main, groups, tiles.warps if parents is None else tiles.tree_warps)]
    if tiles.prepare_warps:
        prepared = min(lanes, tiles.prepare_nodes)
        prepare = main._replace(prepared=prepared, columns=V, prepares=True, recurs=False)
        programs = triton.cdiv(N, prepared) + (0 if parents is None else groups)
        launches.insert(0, (prepare, programs, tiles.prepare_warps))
        if main.advances:
            fields = [new(B * H * size) for size in (K, V, 1, 1)]
    weights = GDNLayerWeights(
        conv=conv,
        conv_bias=conv_bias,
        a_log=a_log,
        dt_bias=dt_bias,
        skip=skip,
        norm=norm,
        eps=eps,
    )
    for work, programs, warps in launches:
        _verify_kernel[(H * (V // work.columns), B, programs)](
            projected,
            out,
            weights,
            States(recurrent=recurrent[layer], window=window[layer]),
            GDNRequests(slots=slots, starts=row_starts, parents=trees),
            kept_of(fields, inputs),
            scratch,
            num_rows=len(projected),
            num_requests=B,
            sizes=sizes,
            work=work,
            digits=digits,
            num_warps=warps,
            **launching(projected),
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _verify_kernel(
    projected_at,
    out_at,
    weights,
    states,
    requests,
    kept,
    scratch,
    num_rows,
    num_requests,
    sizes: tl.constexpr,
    work: tl.constexpr,
    digits: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of state columns of a value head, request, and group of leaves.

    It prepares the nodes, runs the recurrence, or both. It reloads only values that it, or an
    earlier launch, has stored.
    """
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    columns: tl.constexpr = work.columns
    parts: tl.constexpr = V // columns
    shared_by: tl.constexpr = H // sizes.key_heads
    head, part, request = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    key_head = head // shared_by
    slot = tl.load(requests.slots + request).to(tl.int64)
    start, stop = tl.load(requests.starts + request), tl.load(requests.starts + request + 1)
    key, column = tl.arange(0, K), part * columns + tl.arange(0, columns)
    in_states = (slot * H + head) * (K * V) + key[:, None] * V + column[None, :]
    state_at = states.recurrent + in_states
    count = tl.minimum(stop - start, work.nodes)
    is_only: tl.constexpr = work.prepares and work.recurs and (work.advances or work.lanes == 1)
    is_early: tl.constexpr = is_only or (work.recurs and not work.prepares)
    keeps: tl.constexpr = not (work.advances and work.recurs)
    lists: tl.constexpr = work.prepares and not work.is_chain
    group, first = tl.program_id(2), 0
    if not work.recurs:  # the programs of lists are the first, because they take longest
        first = (group - (work.groups if lists else 0)) * work.prepared
    parents_at = requests.parents + request * work.nodes
    visits_at = scratch.visits + (request * work.groups + group) * work.visits
    if is_early:
        state = tl.load(state_at)  # no kernel that may still be running writes it
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if work.recurs and part == 0 and group == 0:
        padding = tl.load(requests.starts + num_requests) + request
        clear_padding(padding, out_at, num_rows, num_requests, head, 1, H, V)
    if lists and group < work.groups and (work.recurs or tl.program_id(0) == 0):
        every_node = tl.arange(0, work.lanes)
        list_visits(visits_at, parents_at, every_node, count, group, work.groups)
    if (first < 0) | (count <= first):
        return
    node = first + tl.arange(0, work.prepared)
    is_node = node < count
    row = start + tl.where(is_node, node, 0)
    rows_at = projected_at + row.to(tl.int64) * sizes.width
    number, is_one = (request * work.nodes + node).to(tl.int64), is_node[:, None]
    at = number * H + head
    if work.prepares:
        inputs = Inputs(
            rows=projected_at + start.to(tl.int64) * sizes.width + sizes.channels,
            window=states.window + slot * (WINDOW * sizes.C),
            count=count,
        )
        places = places_of(node, count, parents_at, work.is_chain)
        inputs_at = kept.inputs + number[:, None] * sizes.C
        keeps_key = (head % shared_by == 0) & (part == 0)
        # Each program stores all that it reloads, which frees registers for the next tensor.
        channel = sizes.q + key_head * K
        raw, q = convolved(inputs, weights, places, channel, K, sizes)
        if keeps_key:
            tl.store(inputs_at + channel + key[None, :], raw, mask=is_one)
        q = unit(q, digits) * (K**-0.5) if sizes.has_delta else rounded(q, projected_at)
        if not is_only:
            tl.store(scratch.q + at[:, None] * K + key[None, :], q, mask=is_one)
        channel = sizes.k + key_head * K
        raw, k = convolved(inputs, weights, places, channel, K, sizes)
        if keeps_key:
            tl.store(inputs_at + channel + key[None, :], raw, mask=is_one)
        k = unit(k, digits) if sizes.has_delta else rounded(k, projected_at)
        if keeps:
            tl.store(kept.k + at[:, None] * K + key[None, :], k, mask=is_one)
        channel = sizes.v + head * V + part * columns
        raw, v = convolved(inputs, weights, places, channel, columns, sizes)
        tl.store(inputs_at + channel + tl.arange(0, columns)[None, :], raw, mask=is_one)
        gate = sizes.gates + head
        if sizes.has_delta:
            b, a = tl.load(rows_at + gate), tl.load(rows_at + (gate + H))
            a_log, dt_bias = tl.load(weights.a_log + head), tl.load(weights.dt_bias + head)
            log_decay, beta = gates(b, a, a_log, dt_bias)
        else:
            a_log, dt_bias = tl.load(weights.a_log + head), tl.load(weights.dt_bias + head)
            dt, log_decay = time_steps(tl.load(rows_at + gate), a_log, dt_bias)
            x = rounded(v, projected_at)
            v, skipped = dt[:, None] * x, tl.load(weights.skip + head) * x
            if not is_only:
                to = scratch.skipped + at[:, None] * V + column[None, :]
                tl.store(to, skipped, mask=is_one)
        if keeps:
            tl.store(kept.v + at[:, None] * V + column[None, :], v, mask=is_one)
            tl.store(kept.log_decay + at, log_decay, mask=is_node)
            if sizes.has_delta:
                tl.store(kept.beta + at, beta, mask=is_node)
    if not work.recurs:
        return

    root = (request * work.nodes).to(tl.int64) * H + head
    if sizes.has_delta:
        read_at = scratch.read + root * V
    else:
        read_at = out_at + (start.to(tl.int64) * H + head) * V
    if is_only:
        is_first = node == 0
        key_of, v_of = _first(k, is_first[:, None]), _first(v, is_first[:, None])
        decay_of = _first(log_decay, is_first)
        beta_of = _first(beta, is_first) if sizes.has_delta else None
        state = advanced(state, key_of, v_of, decay_of, beta_of, sizes)
        column_at = read_at + column
        output = sum_by_halves(state * _first(q, is_first[:, None])[:, None])
        if not sizes.has_delta:
            output += _first(skipped, is_first[:, None])
        tl.store(column_at, output.to(read_at.dtype.element_ty))
    else:
        if work.prepares:
            tl.debug_barrier()  # read by other threads than the writers
        first_node = FirstNode(
            q=scratch.q + (root * K + key),
            k=kept.k + (root * K + key),
            v=kept.v + (root * V + column),
            log_decay=kept.log_decay + root,
            beta=kept.beta + root,
            skipped=None if sizes.has_delta else scratch.skipped + (root * V + column),
            read=read_at + column,
        )
        if not is_early:
            state = tl.load(state_at)
        if work.is_chain:
            for i in range(0, count):
                state = visit(state, first_node, i, sizes)
        else:
            count = tl.load(visits_at)
            if count == 0:
                return
            walk(state, visits_at, count, first_node, sizes)
    if work.advances:
        tl.store(state_at, state)
    if sizes.has_delta:
        tl.debug_barrier()
        counter = scratch.arrivals + (request * H + head) * MOST_TREE_GROUPS + group
        if parts > 1:
            if tl.atomic_add(counter, 1, sem="acq_rel") < parts - 1:
                return
            tl.store(counter, 0)
        rows_of = _Rows(projected=projected_at, read=read_at, out=out_at, start=start)
        for some in range(0, count, work.rows):
            done = some + tl.arange(0, work.rows)
            is_done = done < count
            if not work.is_chain:
                done = tl.load(visits_at + 1 + done, mask=is_done, other=0) & NODE
            _finish(done, is_done, rows_of, weights, head, sizes, digits)


class _Rows(NamedTuple):
    """Addresses of projected rows, of a head's outputs by node and of output rows; first row."""

    projected: Any
    read: Any
    out: Any
    start: Any


@triton.jit
def _finish(node, is_node, rows, weights, head, sizes: tl.constexpr, digits: tl.constexpr):
    """Applies the gated norm to a head's outputs of some nodes."""
    V: tl.constexpr = sizes.V
    column, weight = tl.arange(0, V)[None, :], tl.load(weights.norm + tl.arange(0, V))[None, :]
    node, is_node = tl.where(is_node, node, 0).to(tl.int64)[:, None], is_node[:, None]
    out = tl.load(rows.read + node * (sizes.H * V) + column, mask=is_node, other=0.0)
    row = rows.start + node
    gate_at = rows.projected + row * sizes.width + (sizes.z + head * V) + column
    z = tl.load(gate_at, mask=is_node, other=0.0)
    out = gated_norm(out, z, weight, weights.eps, digits)
    at = rows.out + row * (sizes.H * V) + (head * V + column)
    tl.store(at, out.to(rows.out.dtype.element_ty), mask=is_node)


@triton.jit
def _first(x, is_first):
    """Selects the value of the first node."""
    return tl.sum(tl.where(is_first, x, 0.0), 0)
