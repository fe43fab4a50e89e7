"""Tree traversal in the verification of GDN and Mamba2 layers (Pallas, Triton backend).

Convolution inputs of each node, the visits of a tree, and the recurrence along them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.kernel_limits import MOST_NODES
from kernels.pallas_gpu.attention.row_bounds import bits_of
from kernels.pallas_gpu.gdn.gdn_rows import WINDOW, power, sum_by_halves

NODE, FROM_TRUNK, TO_TRUNK = MOST_NODES - 1, MOST_NODES, 2 * MOST_NODES
"""Parts of a visit: its node; whether the state before it is the one of the trunk, not of the last
visit; whether the state after it becomes the one of the trunk."""


class NodeReplay(NamedTuple):
    """Replay inputs of each node, of the recurrence and of the convolution."""

    k: Any
    v: Any
    log_decay: Any
    beta: Any
    inputs: Any


def kept_of(fields: Sequence[jax.Array], inputs: jax.Array) -> NodeReplay:
    """Returns the replay inputs; absent fields are None.

    Mamba2 has no `beta`, and plain decoding keeps no field.
    """
    k, v, log_decay, beta = [*fields, *[None] * (4 - len(fields))]
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


def list_visits(visits_ref, parents_ref, request, count, group, groups):
    """Stores the visits of a tree that reach the leaves number `group`, `group + groups` and so on.

    The trunk is the path to a deepest of these leaves. Its state is held while the paths that leave
    it are visited, so these start at the trunk and not at the root. The list is the number of
    visits, the visits and two of padding. Sets of nodes are two 32-bit masks.
    """
    node = lax.iota(jnp.int32, pl.next_power_of_2(parents_ref.shape[1]))
    is_node = node < count
    parent = pltriton.load(parents_ref.at[request, node], mask=(node > 0) & is_node, other=-1)
    path, depth = _paths(parent, parents_ref, request, node)
    is_leaf = is_node & ~_is_any(parent, node)
    if groups > 1:
        number = lax.cumsum(is_leaf.astype(jnp.int32), axis=0) - 1
        is_leaf &= lax.rem(number, groups) == group
    number = jnp.where(is_leaf, depth * len(node) + node, -1)
    ends_trunk = is_leaf & (number == jnp.max(number))
    trunk = _sum_of(path, ends_trunk)
    is_leaf &= ~ends_trunk
    on, off = zip(*((x & y, x & ~y) for x, y in zip(path, trunk, strict=True)), strict=True)

    def append(visit, count):
        visits_ref[request, group, 1 + count] = visit
        return count + 1

    def list_trunk_node(trunk_node, count):
        count = append(trunk_node | FROM_TRUNK | TO_TRUNK, count)

        def list_path(leaf, count):
            def list_node(i, carry):
                source, count = carry
                return 0 * source, append(i | source, count)

            return _for_each(_sum_of(off, node == leaf), list_node, (jnp.int32(FROM_TRUNK), count))[
                1
            ]

        return _for_each(bits_of(is_leaf & _ends_at(on, trunk_node), node), list_path, count)

    count = _for_each(trunk, list_trunk_node, jnp.int32(0))
    append(0, append(0, count))
    visits_ref[request, group, 0] = count


def walk(visit, values_of, visit_at, number, state):
    """Makes the visits of a list; the values of the next node are read during a visit.

    Args:
      visit: Returns the state after a node; takes the node, its values and the state before it.
      values_of: Reads the values of a node.
      visit_at: Reads a visit.
      number: Number of visits.
      state: State of the request.
    """

    def step(index, carry):
        state, trunk, this, following, values = carry
        later, next_values = visit_at(index + 2), values_of(following & NODE)
        state = jnp.where((this & FROM_TRUNK) != 0, trunk, state)
        state = visit(this & NODE, values, state)
        trunk = jnp.where((this & TO_TRUNK) != 0, state, trunk)
        return state, trunk, following, later, next_values

    this = visit_at(0)
    first = (state, state, this, visit_at(1), values_of(this & NODE))
    lax.fori_loop(0, number, step, first)


def _paths(parent, parents_ref, request, node):
    """Returns the nodes from the root to each node as two masks, and the depth of each node."""

    def with_node(path, i):
        bit, is_high = lax.shift_left(jnp.int32(1), i & 31), i >> 5
        return path[0] | bit * (1 - is_high), path[1] | bit * is_high

    def climb(carry):
        above, path, depth = carry
        next_above = pltriton.load(parents_ref.at[request, above], mask=above > 0, other=0)
        return next_above, with_node(path, above), depth + (above > 0).astype(jnp.int32)

    is_below = lambda carry: jnp.max(carry[0]) > 0  # noqa: E731
    path = with_node((0 * node + 1, 0 * node), node)
    first = (jnp.maximum(parent, 0), path, (parent >= 0).astype(jnp.int32))
    return lax.while_loop(is_below, climb, first)[1:]


def _sum_of(masks, is_one):
    """Returns the masks of the selected node."""
    return tuple(jnp.sum(jnp.where(is_one, x, 0)) for x in masks)


def _ends_at(masks, node):
    """Returns whether `node` is the last of the nodes of each pair of masks."""
    low, high = masks
    is_high = node >= 32
    word, above = jnp.where(is_high, high, low), jnp.where(is_high, 0, high)
    return (lax.shift_right_logical(word, 0 * word + (node & 31)) == 1) & (above == 0)


def _is_any(values, node):
    """Returns whether each node is among some values."""
    return jnp.max((values[:, None] == node[None, :]).astype(jnp.int32), axis=0) != 0


def _for_each(nodes, body, carry):
    """Calls `body` with each of some nodes, which are two 32-bit masks, and the carry.

    The exponent of a power of two is its index, and so no bit is tested in vain.
    """

    def step(carry):
        low, high, carry = carry
        is_low = low != 0
        mask = jnp.where(is_low, low, high)
        first = lax.bitcast_convert_type((mask & -mask).astype(jnp.float32), jnp.int32)
        exponent = (lax.shift_right_arithmetic(first, 23) & 0xFF) - 127
        node = exponent + 32 * (1 - is_low.astype(jnp.int32))
        high = jnp.where(is_low, high, high & (high - 1))
        return low & (low - 1), high, body(node, carry)

    is_any = lambda carry: (carry[0] | carry[1]) != 0  # noqa: E731
    return lax.while_loop(is_any, step, (*nodes, carry))[2]


class NodeValues(NamedTuple):
    """Values of a node in a program's columns; GDN has no `skipped`, and Mamba2 no `beta`."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    skipped: Any


def values_of(scratch, kept, place, i):
    """Reads the values of a node.

    Args:
      scratch, kept: Inputs of the recurrence; only Mamba2 has skip terms of the outputs.
      place: Indices of the program's values.
      i: Node.
    """
    at = (place.request, i, place.head)
    return NodeValues(
        q=scratch.q[(*at, slice(None))],
        k=kept.k[(place.layer, *at, slice(None))],
        v=kept.v[(place.layer, *at, place.columns)],
        log_decay=kept.log_decay[(place.layer, *at)],
        beta=None if kept.beta is None else kept.beta[(place.layer, *at)],
        skipped=None if scratch.skipped is None else scratch.skipped[(*at, place.columns)],
    )


def visit(store, i, node, state):
    """Returns the state after a node, and stores the node's output.

    Args:
      store: Stores the output of a node in the program's columns.
      i, node: Node and its values.
      state: State before the node.
    """
    state = advanced(state, node.k, node.v, node.log_decay, node.beta)
    output = sum_by_halves(state * node.q[:, None])
    store(i, output if node.skipped is None else output + node.skipped)
    return state


def advanced(state, key, v, log_decay, beta):
    """Returns the state after a token; without the delta rule, `beta` is None."""
    state = state * power(log_decay)
    if beta is not None:
        v = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * v[None, :]


def barrier(interpret):
    """Synchronises the threads of the program."""
    if not interpret:
        pltriton.debug_barrier()
