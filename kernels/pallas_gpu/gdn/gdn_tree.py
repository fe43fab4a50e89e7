"""Tree traversal of gated delta net verification (Pallas, Triton backend).

Convolution inputs of each node, and the recurrence along the paths of a tree.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.row_bounds import ancestor_bits, bits_of, is_in
from kernels.pallas_gpu.gdn.gdn_rows import WINDOW, power, sum_by_halves


class NodeReplay(NamedTuple):
    """Replay inputs of each node, of the recurrence and of the convolution."""

    k: Any
    v: Any
    log_decay: Any
    beta: Any
    inputs: Any


def kept_of(fields: Sequence[jax.Array], inputs: jax.Array) -> NodeReplay:
    """Returns the replay inputs; without the other fields, these are None."""
    k, v, log_decay, beta = fields or [None] * 4
    return NodeReplay(k=k, v=v, log_decay=log_decay, beta=beta, inputs=inputs)


class HeadState(NamedTuple):
    """Indices of a program's values: layer of the replay inputs, request, head, state columns."""

    layer: Any
    request: Any
    head: Any
    columns: Any


def places_of(node, count, parents_ref, request):
    """Returns the indices of the four convolution inputs of each node, oldest first.

    The indices refer to the conv state followed by the inputs: node i is `WINDOW + i`.
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


def walk(visit, state_at, parents_ref, request, count):
    """Visits the path from the old state to each node with leaf children, then these leaves."""
    node = lax.iota(jnp.int32, pl.next_power_of_2(parents_ref.shape[1]))
    is_child = (node > 0) & (node < count)
    parent = pltriton.load(parents_ref.at[request, node], mask=is_child, other=-1)
    is_leaf = jnp.max((parent[:, None] == node[None, :]).astype(jnp.int32), axis=0) == 0

    def descend(end, leaves):
        path = ancestor_bits(end, parents_ref, request)

        def visit_if(nodes, i, state):
            return lax.cond(is_in(*nodes, i, len(node)), visit, lambda _, x: x, i, state)

        def visit_leaf(i, state):
            visit_if(leaves, i, state)
            return state

        state = lax.fori_loop(0, end + 1, partial(visit_if, path), state_at[...])
        lax.fori_loop(end + 1, count, visit_leaf, state)

    def look(end, carry):
        low, high = bits_of(is_leaf & (parent == end), node)
        is_end = ((low | high) != 0) | (count == 1)
        pl.when(is_end)(lambda: descend(end, (low, high)))
        return carry

    lax.fori_loop(0, count, look, 0)


def visit(scratch, kept, place, i, state):
    """Returns the state after a node, and stores the node's output."""
    at = (place.request, i, place.head)
    q, key = scratch.q[(*at, slice(None))], kept.k[(place.layer, *at, slice(None))]
    v = kept.v[(place.layer, *at, place.columns)]
    log_decay, beta = kept.log_decay[(place.layer, *at)], kept.beta[(place.layer, *at)]
    state = advanced(state, key, v, log_decay, beta)
    scratch.read[(*at, place.columns)] = sum_by_halves(state * q[:, None])
    return state


def advanced(state, key, v, log_decay, beta):
    """Returns the state after a token."""
    state = state * power(log_decay)
    new = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * new[None, :]


def barrier(interpret):
    """Synchronises the threads of the program."""
    if not interpret:
        pltriton.debug_barrier()
