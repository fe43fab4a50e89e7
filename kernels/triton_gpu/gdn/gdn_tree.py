"""Tree traversal in the verification of GDN and Mamba2 layers (Triton).

Convolution inputs of each node, the visits of a tree, and the recurrence along them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel_limits import MOST_NODES
from kernels.triton_gpu.gdn.gdn_rows import WINDOW, power, sum_by_halves

NODE = tl.constexpr(MOST_NODES - 1)
FROM_TRUNK, TO_TRUNK = tl.constexpr(MOST_NODES), tl.constexpr(2 * MOST_NODES)
"""Parts of a visit: its node; whether the state before it is the one of the trunk, not of the last
visit; whether the state after it becomes the one of the trunk."""


class NodeReplay(NamedTuple):
    """Replay inputs of each node, of the recurrence and of the convolution."""

    k: Any
    v: Any
    log_decay: Any
    beta: Any
    inputs: Any


def kept_of(fields: Sequence[Tensor], inputs: Tensor) -> NodeReplay:
    """Returns the replay inputs; `inputs` fills the operands of absent fields.

    Mamba2 has no `beta`, and plain decoding keeps no field.
    """
    k, v, log_decay, beta = [*fields, *[inputs] * (4 - len(fields))]
    return NodeReplay(k=k, v=v, log_decay=log_decay, beta=beta, inputs=inputs)


class FirstNode(NamedTuple):
    """Addresses of a program's values for the first node of its request; other nodes follow.

    GDN has no `skipped`, and Mamba2 no `beta`.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    skipped: Any
    read: Any


@triton.jit
def places_of(node, count, parents_at, is_chain: tl.constexpr):
    """Returns the indices of the four convolution inputs of each node, oldest first.

    The indices refer to the conv state followed by the inputs: node i is `WINDOW + i`.
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
def list_visits(visits_at, parents_at, node, count, group, groups: tl.constexpr):
    """Stores the visits of a tree that reach the leaves number `group`, `group + groups` and so on.

    The trunk is the path to a deepest of these leaves. Its state is held while the paths that leave
    it are visited, so these start at the trunk and not at the root. The list is the number of
    visits, the visits and two of padding.
    """
    is_node = node < count
    parent = tl.load(parents_at + node, mask=(node > 0) & is_node, other=-1)
    path, depth = _paths(parent, parents_at, node)
    is_leaf = is_node & ~_is_any(parent, node)
    if groups > 1:
        is_leaf &= (tl.cumsum(is_leaf.to(tl.int32), 0) - 1) % groups == group
    lanes: tl.constexpr = node.shape[0]
    number = tl.where(is_leaf, depth * lanes + node, -1)
    ends_trunk = is_leaf & (number == tl.max(number))
    trunk = tl.sum(tl.where(ends_trunk, path, 0))
    bit = tl.where(is_leaf & ~ends_trunk, tl.full((), 1, tl.int64) << node.to(tl.int64), 0)
    on, off = path & trunk, path & ~trunk
    count = 0
    while trunk != 0:
        i, trunk = _next(trunk)
        count = _append(visits_at, count, i | FROM_TRUNK | TO_TRUNK)
        leaves_trunk = (on >> i) == 1  # no later node of the path belongs to the trunk
        leaves = tl.sum(tl.where(leaves_trunk, bit, 0))
        while leaves != 0:
            leaf, leaves = _next(leaves)
            branch = tl.sum(tl.where(node == leaf, off, 0))
            source = FROM_TRUNK * 1
            while branch != 0:
                i, branch = _next(branch)
                count = _append(visits_at, count, i | source)
                source = 0
    _append(visits_at, _append(visits_at, count, 0), 0)
    tl.store(visits_at, count)


@triton.jit
def _append(visits_at, count, visit):
    tl.store(visits_at + (1 + count), visit)
    return count + 1


@triton.jit
def walk(state, visits_at, number, first_node, sizes: tl.constexpr):
    """Makes the visits of a list; the values of the next node are read during a visit."""
    trunk = state
    this, following = tl.load(visits_at + 1), tl.load(visits_at + 2)
    values = _values_of(first_node, this & NODE, sizes)
    for step in range(0, number):
        later = tl.load(visits_at + (step + 3))
        next_values = _values_of(first_node, following & NODE, sizes)
        state = trunk if this & FROM_TRUNK != 0 else state
        state = _visit(state, values, first_node.read, this & NODE, sizes)
        if this & TO_TRUNK != 0:
            trunk = state
        this, following, values = following, later, next_values


@triton.jit
def _paths(parent, parents_at, node):
    """Returns the nodes from the root to each node as bits, and the depth of each node."""
    one = tl.full((), 1, tl.int64)
    path, above = (one << node.to(tl.int64)) | 1, tl.maximum(parent, 0)
    depth = (parent >= 0).to(tl.int32)
    while tl.max(above) > 0:
        path |= one << above.to(tl.int64)
        depth += (above > 0).to(tl.int32)
        above = tl.load(parents_at + above, mask=above > 0, other=0)
    return path, depth


@triton.jit
def _is_any(values, node):
    """Returns whether each node is among some values."""
    return tl.max((values[:, None] == node[None, :]).to(tl.int32), axis=0) != 0


@triton.jit
def _next(nodes):
    """Returns the first of some nodes, which are bits, and the others.

    The exponent of a power of two is its index, and so no bit is tested in vain.
    """
    first = (nodes & -nodes).to(tl.float32).to(tl.int32, bitcast=True)
    return ((first >> 23) & 0xFF) - 127, nodes & (nodes - 1)


class NodeValues(NamedTuple):
    """Values of a node in a program's columns; `factor` is `beta`, for Mamba2 the skip term."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    factor: Any


@triton.jit
def _values_of(first_node, i, sizes: tl.constexpr):
    of_keys, of_values = i * (sizes.H * sizes.K), i * (sizes.H * sizes.V)
    q, k = tl.load(first_node.q + of_keys), tl.load(first_node.k + of_keys)
    v, log_decay = tl.load(first_node.v + of_values), tl.load(first_node.log_decay + i * sizes.H)
    if sizes.has_delta:
        factor = tl.load(first_node.beta + i * sizes.H)
    else:
        factor = tl.load(first_node.skipped + of_values)
    return NodeValues(q=q, k=k, v=v, log_decay=log_decay, factor=factor)


@triton.jit
def visit(state, first_node, i, sizes: tl.constexpr):
    """Returns the state after a node, and stores the node's output."""
    return _visit(state, _values_of(first_node, i, sizes), first_node.read, i, sizes)


@triton.jit
def _visit(state, node, read_at, i, sizes: tl.constexpr):
    beta = node.factor if sizes.has_delta else None
    state = advanced(state, node.k, node.v, node.log_decay, beta, sizes)
    output = sum_by_halves(state * node.q[:, None])
    if not sizes.has_delta:
        output += node.factor
    tl.store(read_at + i * (sizes.H * sizes.V), output.to(read_at.dtype.element_ty))
    return state


@triton.jit
def advanced(state, key, v, log_decay, beta, sizes: tl.constexpr):
    """Returns the state after a token; without the delta rule, `beta` is not read."""
    state = state * power(log_decay)
    if sizes.has_delta:
        v = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * v[None, :]
