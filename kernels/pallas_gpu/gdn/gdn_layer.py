"""Decoding and tree verification of GDN and Mamba2 layers between the two GEMMs (Pallas, Triton
backend).

A program processes some state columns of one request and value head. Causal convolution, norms and
gates of all nodes are computed at once and stored, in a separate launch if the tiles select it. The
recurrence then runs from node to node, in a tree along a list of visits per group of leaves, so a
node is bitwise equal to plain decoding. In GDN the last program of a head and group to arrive
applies the gated norm to their outputs. In Mamba2 the norm spans heads, and each program writes its
outputs. Sums over keys use `sum_by_halves`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.gdn_tiles import GDNLayerTiles
from kernels.pallas_gpu.attention.attention import clear_padding
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gdn.gdn_rows import (
    GDNLayerWeights,
    Inputs,
    States,
    convolved,
    gated_norm,
    gates,
    of_layer,
    rounded,
    sum_by_halves,
    time_steps,
    unit,
)
from kernels.pallas_gpu.gdn.gdn_tree import (
    NODE,
    HeadState,
    NodeReplay,
    advanced,
    barrier,
    kept_of,
    list_visits,
    places_of,
    values_of,
    visit,
    walk,
)
from kernels.recurrent_sizes import columns_of, size_of_list, sizes_of

ROWS = 8
"""Rows normalised at once; more would take registers from the recurrence."""

Record = TypeVar("Record", bound=NamedTuple)


class GDNRequests(NamedTuple):
    """State slots, rows and draft trees of a step's requests.

    Attributes:
      slots: State slot of each request.
      starts: First flat row of each request, and the end.
      parents: Parent of each tree node; None for chains.
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


def verify(
    projected: Float[jax.Array, "R outputs"],
    conv: Float[jax.Array, "*L C 4"],
    conv_bias: Float[jax.Array, "*L C"] | None,
    a_log: Float[jax.Array, "*L H"],
    dt_bias: Float[jax.Array, "*L H"],
    skip: Float[jax.Array, "*L H"] | None,
    norm: Float[jax.Array, "*L V"] | None,
    recurrent: Float[jax.Array, "L states H K V"],
    window: Float[jax.Array, "L states 3 C"],
    layer: Int[jax.Array, " 1"],
    slots: Int[jax.Array, " B"],
    row_starts: Int[jax.Array, " B1"],
    parents: Int[jax.Array, "B N"] | None,
    kept: Sequence[Float[jax.Array, "L B N ..."]],
    arrivals: Int[jax.Array, "B H groups"],
    *,
    eps: float,
    digits: int,
    tiles: GDNLayerTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R values"],
    Float[jax.Array, "L states H K V"],
    tuple[Float[jax.Array, "L B N ..."], ...],
    Int[jax.Array, "B H groups"],
]:
    """Same as `shared.spec.recurrent_layer.verify` or `decode`, for flat rows grouped by request.

    Args:
      projected: See `shared.spec.recurrent_state.split_inputs`.
      conv, conv_bias, a_log, dt_bias, skip, norm: Weights of the layer, or of all layers. GDN has a
        norm, and Mamba2 a skip weight instead.
      eps: Epsilon of the norm.
      recurrent, window, layer: States of all layers, and the index of the layer to read. It is an
        operand, because XLA compiles kernels of equal text once.
      slots: State slot of each request; distinct in plain decoding, except for padding.
      row_starts: First flat row of each request, and the end; later rows are padding.
      parents: Parent of each tree node; None for chains.
      kept: Replay inputs of all layers, which are written: the fields of `NodeReplay`, for Mamba2
        without `beta`. With `inputs` alone, each request has one node (plain decoding) and its
        recurrent state is advanced.
      arrivals: Arrival counters of programs, all zero.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The concatenated head outputs; the recurrent states, `kept` and `arrivals` (zero again) after
      the writes.
    """
    (R, (B, N)), (H, K, V) = (len(projected), kept[-1].shape[1:3]), recurrent.shape[2:]
    advances, of = len(kept) == 1, jax.ShapeDtypeStruct
    single = partial(of, dtype=jnp.float32)
    has = {"has_delta": skip is None, "has_bias": conv_bias is not None}
    sizes = sizes_of(recurrent.shape, window.shape, **has)
    is_chain, lanes = parents is None, pl.next_power_of_2(N)
    groups, warps = (1, tiles.warps) if is_chain else (tiles.groups, tiles.tree_warps)
    settings = {"sizes": sizes, "groups": groups, "advances": advances, "eps": eps}
    settings["digits"] = digits
    settings["interpret"] = interpret

    def launch(columns, prepared, programs, warps, reads, makes, writes):
        """Launches a kernel; returns its outputs and the arrays that it updates, by name."""
        made, written = pl.pallas_call(
            partial(_verify_kernel, columns=columns, prepared=prepared, **settings),
            grid=(H * (V // columns), B, programs),
            out_shape=(makes, {name: of(x.shape, x.dtype) for name, x in writes.items()}),
            input_output_aliases={len(reads) + i: len(makes) + i for i in range(len(writes))},
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="gdn_decode" if "out" in makes else "gdn_verify",
        )(reads, writes)
        return made | written

    reads = {"projected": projected, "window": window, "layer": layer}
    weights = GDNLayerWeights(
        conv=conv, conv_bias=conv_bias, a_log=a_log, dt_bias=dt_bias, skip=skip, norm=norm
    )
    requests = GDNRequests(slots=slots, starts=row_starts, parents=parents)
    given = weights._asdict() | requests._asdict()
    reads |= {name: x for name, x in given.items() if x is not None}
    rows, results = {"q": single((B, N, H, K))}, {"out": of((R, H * V), projected.dtype)}
    if sizes.has_delta:
        results["read"] = single((B, N, H, V))
    else:
        rows["skipped"] = single((B, N, H, V))
    *fields, inputs = kept
    written = {name: x for name, x in kept_of(fields, inputs)._asdict().items() if x is not None}
    updated = {"arrivals": arrivals}
    (updated if advances else reads)["recurrent"] = recurrent
    if not is_chain:
        rows["visits"] = of((B, groups, size_of_list(N)), jnp.int32)
    main = (columns_of(tiles.columns, sizes), lanes, groups, warps)
    if tiles.prepare_warps:
        prepared = min(lanes, tiles.prepare_nodes)
        programs = pl.cdiv(N, prepared) + (0 if is_chain else groups)
        if advances:
            rows |= {"k": single((1, B, N, H, K)), "v": single((1, B, N, H, V))}
            gates_of = ("log_decay", "beta")[: 1 + sizes.has_delta]
            rows |= dict.fromkeys(gates_of, single((1, B, N, H)))
        done = launch(V, prepared, programs, tiles.prepare_warps, reads, rows, written)
        done |= launch(*main, reads | done, results, updated)
    else:
        done = launch(*main, reads, rows | results, written | updated)
    kept = tuple(done[name] for name in written)
    return done["out"], done.get("recurrent", recurrent), kept, done["arrivals"]


def _record_of(record: type[Record], refs: dict[str, Any]) -> Record:
    """Builds a record from references by field name; unused fields are None."""
    return record._make(refs.get(name) for name in record._fields)


def _verify_kernel(
    reads,
    _,
    makes,
    writes,
    *,
    sizes,
    columns,
    prepared,
    groups,
    advances,
    eps,
    digits,
    interpret,
):
    """One program per block of state columns of a value head, request, and group of leaves.

    It prepares the nodes, runs the recurrence, or both. It reloads only values that it, or an
    earlier launch, has stored.
    """
    refs, prepares, recurs = reads | makes | writes, "inputs" in writes, "out" in makes
    weights, states, requests = (
        _record_of(GDNLayerWeights, refs),
        _record_of(States, refs),
        _record_of(GDNRequests, refs),
    )
    kept, scratch = _record_of(NodeReplay, refs), _record_of(Scratch, refs)
    projected_ref = refs["projected"]
    N, H, K, V, key_heads = scratch.q.shape[1], sizes.H, sizes.K, sizes.V, sizes.key_heads
    parts, rows = V // columns, min(pl.next_power_of_2(N), ROWS)
    head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    request, layer = pl.program_id(1), refs["layer"][0]
    group, lists = pl.program_id(2), prepares and requests.parents is not None
    # The programs of lists are the first, because they take longest.
    first = 0 if recurs else (group - (groups if lists else 0)) * prepared
    start, slot = requests.starts[request], requests.slots[request]
    count = jnp.minimum(requests.starts[request + 1] - start, N)
    is_only = prepares and recurs and (advances or N == 1)
    keeps = not (advances and recurs)
    span, column = pl.ds(part * columns, columns), part * columns + lax.iota(jnp.int32, columns)
    # In plain decoding the replay fields have one layer.
    head_state = HeadState(layer=0 if advances else layer, request=request, head=head, columns=span)

    def prepare():
        """Computes q, k, v and gates of all nodes, and stores the inputs of the convolution."""
        node = early(first + lax.iota(jnp.int32, prepared), interpret)
        key, is_node = lax.iota(jnp.int32, K), node < count
        keep, row = is_node[:, None], start + jnp.where(is_node, node, 0)
        inputs = Inputs(
            projected=projected_ref,
            first=sizes.channels,
            window=states.window,
            layer=layer,
            slot=slot,
            start=start,
            count=count,
        )
        places = places_of(node, count, requests.parents, request)
        shared_by = H // key_heads
        key_head = lax.div(head, shared_by)
        at, keeps_key = (request, node[:, None]), (lax.rem(head, shared_by) == 0) & (part == 0)

        def convolve(first, lanes, is_kept=None):
            channel = (first + lanes)[None, :]
            raw, x = convolved(inputs, weights, places, channel)
            to = kept.inputs.at[(layer, *at, channel)]
            keep_raw = partial(pltriton.store, to, raw, mask=keep)
            keep_raw() if is_kept is None else pl.when(is_kept)(keep_raw)
            return x

        # Each program stores all that it reloads, which frees registers for the next tensor.
        q = convolve(sizes.q + key_head * K, key, keeps_key)
        q = unit(q, digits) * (K**-0.5) if sizes.has_delta else rounded(q, projected_ref)
        if not is_only:
            pltriton.store(scratch.q.at[(*at, head, key[None, :])], q, mask=keep)
        k = convolve(sizes.k + key_head * K, key, keeps_key)
        k = unit(k, digits) if sizes.has_delta else rounded(k, projected_ref)
        if keeps:
            pltriton.store(kept.k.at[(head_state.layer, *at, head, key[None, :])], k, mask=keep)
        v = convolve(sizes.v + head * V, column)
        gate, beta, skipped = sizes.gates + head, None, None
        a_log, dt_bias = (of_layer(x, 1, layer, head) for x in (weights.a_log, weights.dt_bias))
        if sizes.has_delta:
            b, a = (pltriton.load(projected_ref.at[row, gate + each]) for each in (0, H))
            log_decay, beta = gates(b, a, a_log, dt_bias)
        else:
            dt = pltriton.load(projected_ref.at[row, gate])
            dt, log_decay = time_steps(dt, a_log, dt_bias)
            x = rounded(v, projected_ref)
            v, skipped = dt[:, None] * x, of_layer(weights.skip, 1, layer, head) * x
            if not is_only:
                to = scratch.skipped.at[(*at, head, column[None, :])]
                pltriton.store(to, skipped, mask=keep)
        if keeps:
            pltriton.store(kept.v.at[(head_state.layer, *at, head, column[None, :])], v, mask=keep)
            for ref, x in ((kept.log_decay, log_decay), (kept.beta, beta)):
                if x is not None:
                    to = ref.at[head_state.layer, request, node, head]
                    pltriton.store(to, x, mask=is_node)
        if not is_only:
            return None
        return [None if x is None else _first(x, node) for x in (q, skipped, k, v, log_decay, beta)]

    def store(i, output):
        """Stores the output of a node in the program's columns."""
        if sizes.has_delta:
            scratch.read[request, i, head, span] = output
        else:
            span_of_row = pl.ds(head * V + part * columns, columns)
            refs["out"][start + i, span_of_row] = output.astype(refs["out"].dtype)

    def recur(first_node):
        """Advances the state from node to node, and stores the output of each node.

        Returns the number of visited nodes, which repeat in trees.
        """
        state_at, number = states.recurrent.at[layer, slot, head, :, span], count
        if is_only:
            q, skipped, *given = first_node
            state = advanced(state_at[...], *given)
            output = sum_by_halves(state * q[:, None])
            store(0, output if skipped is None else output + skipped)
        else:
            if prepares:
                barrier(interpret)  # read by other threads than the writers
            values_at = partial(values_of, scratch, kept, head_state)
            visit_node = partial(visit, store)
            if requests.parents is None:
                step = lambda i, state: visit_node(i, values_at(i), state)  # noqa: E731
                state = lax.fori_loop(0, count, step, state_at[...])
            else:
                number = scratch.visits[request, group, 0]
                visit_at = lambda i: scratch.visits[request, group, 1 + i]  # noqa: E731
                walk(visit_node, values_at, visit_at, number, state_at[...])
        if advances:
            state_at[...] = state
        return number

    def finish(some, number):
        """Applies the gated norm to the outputs of some nodes of a head."""
        node, column = some * rows + lax.iota(jnp.int32, rows), lax.iota(jnp.int32, V)[None, :]
        is_node = node < number
        if requests.parents is not None:
            visits_at = scratch.visits.at[request, group, 1 + node]
            node = pltriton.load(visits_at, mask=is_node, other=0) & NODE
        keep, row = is_node[:, None], start + jnp.where(is_node, node, 0)
        read_at = scratch.read.at[request, node[:, None], head, column]
        out = pltriton.load(read_at, mask=keep, other=0.0)
        z = pltriton.load(projected_ref.at[row[:, None], sizes.z + head * V + column])
        out = gated_norm(out, z, of_layer(weights.norm, 1, layer, column), eps, digits)
        # A node that is not written gets a row out of bounds, for the interpreter.
        to = refs["out"].at[jnp.where(keep, row[:, None], len(refs["out"])), head * V + column]
        pltriton.store(to, out.astype(refs["out"].dtype), mask=keep)
        return number

    if recurs:
        given = (requests.starts, refs["out"], head, request, 1, V)
        pl.when((part == 0) & (group == 0))(partial(clear_padding, *given, programs=1))
    if lists:

        @pl.when(group < groups if recurs else (group < groups) & (pl.program_id(0) == 0))
        def _():
            list_visits(scratch.visits, requests.parents, request, count, group, groups)

    @pl.when((first >= 0) & (count > first))
    def _():
        first_node = prepare() if prepares else None
        if not recurs:
            return
        number = recur(first_node)
        if not sizes.has_delta:
            return
        barrier(interpret)

        @pl.when(number > 0)
        def _():
            at = (request, head, group)
            arrived = pltriton.atomic_add(scratch.arrivals, at, jnp.int32(1))

            @pl.when(arrived == parts - 1)
            def _():
                scratch.arrivals[at] = 0
                lax.fori_loop(0, lax.div(number + rows - 1, rows), finish, number)


def _first(x, node):
    """Selects the value of the first node."""
    is_first = node == 0
    return jnp.sum(jnp.where(is_first[:, None] if x.ndim == 2 else is_first, x, 0.0), axis=0)
