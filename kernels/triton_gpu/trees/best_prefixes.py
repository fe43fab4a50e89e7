"""Best prefixes: grows the draft tree of a block head (Triton).

Open prefixes are lanes of one warp, so a step is a few reductions over registers.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Drafted(NamedTuple):
    """Candidates of the block, and the limits of each request."""

    newest: Any
    tokens: Any
    edges: Any
    lists: Any
    branch_calibration: Any
    max_drafts: Any
    can_draft: Any


class Grown(NamedTuple):
    """Trees."""

    tokens: Any
    parents: Any
    num_nodes: Any
    weights: Any


class PrefixSizes(NamedTuple):
    """N; S, P and K of the candidates; S_max of the calibration."""

    nodes: int
    depth: int
    lists: int
    width: int
    calibrated: int


def grow(
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B S P K"],
    edges: Float[Tensor, "B S P K"],
    lists: Int[Tensor, "B S P K"] | None,
    branch_calibration: Float[Tensor, "B S_max"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
    nodes: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"], Float[Tensor, "B N"]]:
    """Implements `shared.spec.best_prefixes.grow`."""
    B, S, P, K = edges.shape
    grown = Grown(
        tokens=newest.new_empty((B, nodes), dtype=torch.int32),
        parents=newest.new_empty((B, nodes), dtype=torch.int32),
        num_nodes=newest.new_empty(B, dtype=torch.int32),
        weights=edges.new_empty((B, nodes)),
    )
    tokens = tokens.contiguous()
    _grow_kernel[(B,)](
        Drafted(
            newest=newest.contiguous(),
            tokens=tokens,
            edges=edges.contiguous(),
            lists=tokens if lists is None else lists.contiguous(),
            branch_calibration=branch_calibration.contiguous(),
            max_drafts=max_drafts.contiguous(),
            can_draft=can_draft.contiguous(),
        ),
        grown,
        sizes=PrefixSizes(
            nodes=nodes, depth=S, lists=P, width=K, calibrated=branch_calibration.shape[1]
        ),
        has_lists=lists is not None,
        lanes=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return grown.tokens, grown.parents, grown.num_nodes, grown.weights


@triton.jit
def _grow_kernel(drafted, grown, sizes: tl.constexpr, has_lists: tl.constexpr, lanes: tl.constexpr):
    """One program per request; open prefixes are its lanes, and so are the nodes of the tree."""
    level: tl.constexpr = sizes.lists * sizes.width
    count: tl.constexpr = sizes.depth * level
    request, lane = tl.program_id(0), tl.arange(0, lanes)
    edges_at = drafted.edges + request * count
    known_at = drafted.branch_calibration + request * sizes.calibrated
    first = _weight_at(edges_at, known_at, 0, 0.0, 0, True, level)
    key = tl.where(lane == 0, first, float("-inf"))
    above, weights = lane * 0.0, lane * 0.0
    parent, slot, off, number = lane * 0, lane * 0, lane * 0, lane * 0
    slots, parents = lane * 0, lane * 0
    for node in range(1, sizes.nodes):
        weight = tl.max(key, axis=0)
        is_open = weight > float("-inf")
        is_best = (key == weight) & (key > float("-inf"))
        is_at = is_best & (number == tl.min(tl.where(is_best, number, 2 * lanes), axis=0))
        own = tl.sum(tl.where(is_at, slot, 0), axis=0)
        of = tl.sum(tl.where(is_at, parent, 0), axis=0)
        base = tl.sum(tl.where(is_at, above, 0.0), axis=0)
        own_off = tl.sum(tl.where(is_at, off, 0), axis=0)
        is_node = lane == node
        slots, parents = tl.where(is_node, own, slots), tl.where(is_node, of, parents)
        weights = tl.where(is_node, weight, weights)
        beside, begin = own + 1, (own // level + 1) * level
        if has_lists:
            begin += sizes.width * tl.load(drafted.lists + request * count + own)
        child_off = own_off | (own % sizes.width > 0).to(tl.int32)
        is_any = is_open & (beside % sizes.width > 0)
        sibling = _weight_at(edges_at, known_at, beside, base, own_off, is_any, level)
        is_any = is_open & (begin < count)
        child = _weight_at(edges_at, known_at, begin, weight, child_off, is_any, level)
        key = tl.where(is_node, child, tl.where(is_at, sibling, key))
        slot = tl.where(is_node, begin, tl.where(is_at, beside, slot))
        off = tl.where(is_node, child_off, off)
        number = tl.where(is_node, 2 * node, tl.where(is_at, 2 * node - 1, number))
        parent = tl.where(is_node, node, parent)
        above = tl.where(is_node, weight, above)
    most = tl.minimum(tl.maximum(tl.load(drafted.max_drafts + request), 0), sizes.nodes - 1)
    most = tl.where(tl.load(drafted.can_draft + request).to(tl.int32) != 0, most, 0)
    is_draft = (lane > 0) & (lane <= most) & (weights > float("-inf"))
    token = tl.load(drafted.tokens + request * count + slots, mask=is_draft, other=0)
    token = tl.where(lane == 0, tl.load(drafted.newest + request), token)
    at, is_node = request * sizes.nodes + lane, lane < sizes.nodes
    tl.store(grown.tokens + at, token, mask=is_node)
    tl.store(grown.parents + at, tl.where(is_draft, parents, 0), mask=is_node)
    tl.store(grown.weights + at, tl.where(is_draft, weights, 0.0), mask=is_node)
    tl.store(grown.num_nodes + request, 1 + tl.sum(is_draft.to(tl.int32), axis=0))


@triton.jit
def _weight_at(edges_at, known_at, slot, above, off, is_any, level: tl.constexpr):
    """Computes the weight of a prefix from its parent's; minus infinity for none and for NaN."""
    known = tl.load(known_at + slot // level, mask=is_any & (off > 0), other=0.0)
    weight = above + (tl.load(edges_at + slot, mask=is_any, other=float("-inf")) + known)
    return tl.where(weight > float("-inf"), weight, float("-inf"))
