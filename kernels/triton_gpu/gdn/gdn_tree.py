"""Tree traversal in the verification of GDN and Mamba2 layers (Triton).

Convolution inputs of each node, and the recurrence along the trunk and the branches of a tree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_gpu.gdn.gdn_rows import WINDOW, power, sum_by_halves


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
def walk(state_at, parents_at, first_node, node, count, sizes: tl.constexpr):
    """Visits the nodes of a tree, each after its ancestors.

    The trunk is the path to a deepest node. Its state stays in registers while the paths that leave
    it are visited, so these start at the trunk and not at the root. Leaves with the same parent
    share its state.
    """
    parent = tl.load(parents_at + node, mask=(node > 0) & (node < count), other=-1)
    bit = tl.full((), 1, tl.int64) << node.to(tl.int64)
    trunk, end_of_trunk = _trunk(parent, parents_at, node)
    is_leaf = (node != end_of_trunk) & ~_is_any(parent, node)
    has_leaves = _is_any(tl.where(is_leaf, parent, -1), node)
    start = _last_on(trunk, parent, parents_at, node)
    state = tl.load(state_at)
    while trunk != 0:
        trunk_node, trunk = _next(trunk)
        state = visit(state, first_node, trunk_node, sizes)
        ends = tl.sum(tl.where(has_leaves & (start == trunk_node), bit, 0))
        while ends != 0:
            end, ends = _next(ends)
            path, branch = _path(end, trunk_node, parents_at), state
            while path != 0:
                i, path = _next(path)
                branch = visit(branch, first_node, i, sizes)
            leaves = tl.sum(tl.where(is_leaf & (parent == end), bit, 0))
            while leaves != 0:
                i, leaves = _next(leaves)
                visit(branch, first_node, i, sizes)


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


@triton.jit
def _trunk(parent, parents_at, node):
    """Returns the nodes from the root to a deepest node as bits, and this node."""
    above, depth = tl.maximum(parent, 0), (parent >= 0).to(tl.int32)
    while tl.max(above) > 0:
        depth += (above > 0).to(tl.int32)
        above = tl.load(parents_at + above, mask=above > 0, other=0)
    lanes: tl.constexpr = node.shape[0]
    deepest = tl.max(tl.where(parent >= 0, depth * lanes + node, 0)) % lanes
    return _path(deepest, 0, parents_at) | 1, deepest


@triton.jit
def _path(end, first, parents_at):
    """Returns the nodes below `first` on the path to `end` as bits."""
    path, above = tl.full((), 0, tl.int64), end
    while above > first:
        path |= tl.full((), 1, tl.int64) << above
        above = tl.load(parents_at + above)
    return path


@triton.jit
def _last_on(trunk, parent, parents_at, node):
    """Returns the last node of the trunk on the path to each node."""
    last = tl.where(parent < 0, 0, node)
    while tl.min((trunk >> last.to(tl.int64)) & 1) == 0:
        above = tl.load(parents_at + last, mask=last > 0, other=0)
        last = tl.where((trunk >> last.to(tl.int64)) & 1 != 0, last, above)
    return last


@triton.jit
def visit(state, first_node, i, sizes: tl.constexpr):
    """Returns the state after a node, and stores the node's output."""
    of_keys, of_values = i * (sizes.H * sizes.K), i * (sizes.H * sizes.V)
    q, key = tl.load(first_node.q + of_keys), tl.load(first_node.k + of_keys)
    v, log_decay = tl.load(first_node.v + of_values), tl.load(first_node.log_decay + i * sizes.H)
    beta = tl.load(first_node.beta + i * sizes.H) if sizes.has_delta else None
    state = advanced(state, key, v, log_decay, beta, sizes)
    read_at, output = first_node.read + of_values, sum_by_halves(state * q[:, None])
    if not sizes.has_delta:
        output += tl.load(first_node.skipped + of_values)
    tl.store(read_at, output.to(read_at.dtype.element_ty))
    return state


@triton.jit
def advanced(state, key, v, log_decay, beta, sizes: tl.constexpr):
    """Returns the state after a token; without the delta rule, `beta` is not read."""
    state = state * power(log_decay)
    if sizes.has_delta:
        v = (v - sum_by_halves(state * key[:, None])) * beta
    return state + key[:, None] * v[None, :]
