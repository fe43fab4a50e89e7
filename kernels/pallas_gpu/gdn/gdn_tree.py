"""Tree traversal in the verification of GDN and Mamba2 layers (Pallas, Triton backend).

Convolution inputs of each node, and the recurrence along the trunk and the branches of a tree.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.row_bounds import bits_of, is_in
from kernels.pallas_gpu.gdn.gdn_rows import WINDOW, power, sum_by_halves


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


def walk(visit, state_at, parents_ref, request, count):
    """Visits the nodes of a tree, each after its ancestors.

    The trunk is the path to a deepest node. Its state stays in registers while the paths that leave
    it are visited, so these start at the trunk and not at the root. Leaves with the same parent
    share its state.
    """
    node = lax.iota(jnp.int32, pl.next_power_of_2(parents_ref.shape[1]))
    is_below = (node > 0) & (node < count)
    parent = pltriton.load(parents_ref.at[request, node], mask=is_below, other=-1)
    parent_of = partial(_parent_of, parents_ref, request)
    end_of_trunk = _deepest(parent, parent_of, node)
    low, high = _path(end_of_trunk, 0, parents_ref, request)
    trunk = (low | 1, high)
    is_leaf = (node != end_of_trunk) & ~_is_any(parent, node)
    has_leaves = _is_any(jnp.where(is_leaf, parent, -1), node)
    start = _last_on(trunk, parent, parent_of, node)

    def visit_trunk(trunk_node, state):
        state = visit(trunk_node, state)

        def visit_branch(end, carry):
            branch = _for_each(_path(end, trunk_node, parents_ref, request), visit, state)

            def visit_leaf(i, carry):
                visit(i, branch)
                return carry

            return _for_each(bits_of(is_leaf & (parent == end), node), visit_leaf, carry)

        _for_each(bits_of(has_leaves & (start == trunk_node), node), visit_branch, 0)
        return state

    _for_each(trunk, visit_trunk, state_at[...])


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


def _path(end, first, parents_ref, request):
    """Returns the nodes below `first` on the path to `end`, as two 32-bit masks."""

    def climb(carry):
        above, low, high = carry
        bit, is_high = lax.shift_left(jnp.int32(1), above & 31), above >> 5
        return parents_ref[request, above], low | bit * (1 - is_high), high | bit * is_high

    is_below = lambda carry: carry[0] > first  # noqa: E731
    return lax.while_loop(is_below, climb, (end, jnp.int32(0), jnp.int32(0)))[1:]


def _has(bits, i, node):
    """Returns whether the bit of a node is set."""
    return is_in(*bits, i, len(node))


def _parent_of(parents_ref, request, node):
    """Returns the parent of each node, and the root for the root."""
    return pltriton.load(parents_ref.at[request, node], mask=node > 0, other=0)


def _deepest(parent, parent_of, node):
    """Returns the last of the deepest nodes."""

    def climb(carry):
        above, depth = carry
        return parent_of(above), depth + (above > 0).astype(jnp.int32)

    is_below = lambda carry: jnp.max(carry[0]) > 0  # noqa: E731
    first = (jnp.maximum(parent, 0), (parent >= 0).astype(jnp.int32))
    depth = lax.while_loop(is_below, climb, first)[1]
    return lax.rem(jnp.max(jnp.where(parent >= 0, depth * len(node) + node, 0)), len(node))


def _last_on(trunk, parent, parent_of, node):
    """Returns the last node of the trunk on the path to each node."""
    is_off = lambda last: ~_has(trunk, last, node)  # noqa: E731

    def climb(last):
        return jnp.where(is_off(last), parent_of(last), last)

    is_any_off = lambda last: jnp.max(is_off(last).astype(jnp.int32)) > 0  # noqa: E731
    return lax.while_loop(is_any_off, climb, jnp.where(parent < 0, 0, node))


def visit(scratch, kept, place, store, i, state):
    """Returns the state after a node, and stores the node's output.

    Args:
      scratch, kept: Inputs of the recurrence; only Mamba2 has skip terms of the outputs.
      place: Indices of the program's values.
      store: Stores the output of a node in the program's columns.
      i: Node.
      state: State before the node.
    """
    at = (place.request, i, place.head)
    q, key = scratch.q[(*at, slice(None))], kept.k[(place.layer, *at, slice(None))]
    v = kept.v[(place.layer, *at, place.columns)]
    log_decay = kept.log_decay[(place.layer, *at)]
    beta = None if kept.beta is None else kept.beta[(place.layer, *at)]
    state = advanced(state, key, v, log_decay, beta)
    output = sum_by_halves(state * q[:, None])
    if scratch.skipped is not None:
        output += scratch.skipped[(*at, place.columns)]
    store(i, output)
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
