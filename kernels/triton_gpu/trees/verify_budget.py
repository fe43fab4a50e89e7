"""Verify budget: allocates the verify rows of a batch to draft tokens (Triton).

Draft tokens are ranked by counting the better ones, so no lane waits for another, as in a sort.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_AT_ONCE = 64  # draft tokens compared per step


def log_acceptance(
    parents: Int[Tensor, "B N"],
    weights: Float[Tensor, "B N"],
    calibration: Float[Tensor, "B S_max"],
) -> Float[Tensor, "B N"]:
    """Implements `shared.spec.verify_budget.log_acceptance`."""
    (B, N), least = parents.shape, torch.empty_like(weights)
    _rank_weights_kernel[(B,)](
        *(x.contiguous() for x in (parents, weights, calibration)),
        least,
        nodes=N,
        depths=calibration.shape[1],
        lanes=triton.next_power_of_2(N),
        num_warps=1,
    )
    return least


@triton.jit
def _rank_weights_kernel(
    parents_at,
    weights_at,
    calibration_at,
    min_at,
    nodes: tl.constexpr,
    depths: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program per request; nodes are its lanes, and each climbs to the root twice."""
    request, node = tl.program_id(0), tl.arange(0, lanes)
    start_node = tl.where(node < nodes, node, 0)
    above, depth, steps = start_node, start_node * 0, 0
    while (tl.max(above) > 0) & (steps < nodes):
        depth += (above > 0).to(tl.int32)
        above = tl.load(parents_at + request * nodes + above, mask=above > 0, other=0)
        steps += 1
    above, least = start_node, start_node * 0.0
    while tl.max(depth) > 0:
        is_on = depth > 0
        weight = tl.load(weights_at + request * nodes + above, mask=is_on, other=0.0)
        weight += tl.load(calibration_at + request * depths + depth - 1, mask=is_on, other=0.0)
        weight = tl.where(weight > float("-inf"), weight, float("-inf"))
        least = tl.where(is_on & (weight < least), weight, least)
        above = tl.load(parents_at + request * nodes + above, mask=is_on, other=0)
        depth -= 1
    tl.store(min_at + request * nodes + node, least, mask=node < nodes)


def prune_to_budget(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    rank_weights: Float[Tensor, "B N"],
    rows: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """Implements `shared.spec.verify_budget.prune_to_budget`."""
    B, N = tokens.shape
    kept_tokens, kept_parents = tokens.new_empty((2, B, N), dtype=torch.int32)
    kept_nodes = tokens.new_empty(B, dtype=torch.int32)
    _prune_to_budget_kernel[(B,)](
        *(x.contiguous() for x in (tokens, parents, num_nodes, rank_weights)),
        *(kept_tokens, kept_parents, kept_nodes),
        rows - B,
        requests=B,
        nodes=N,
        lanes=triton.next_power_of_2(N),
        at_once=_AT_ONCE,
        num_warps=4,
    )
    return kept_tokens, kept_parents, kept_nodes


@triton.jit
def _prune_to_budget_kernel(
    tokens_at,
    parents_at,
    num_nodes_at,
    weights_at,
    kept_tokens_at,
    kept_parents_at,
    kept_nodes_at,
    budget,
    requests: tl.constexpr,
    nodes: tl.constexpr,
    lanes: tl.constexpr,
    at_once: tl.constexpr,
):
    """One program per request; nodes are its lanes."""
    count: tl.constexpr = requests * nodes
    request, node = tl.program_id(0), tl.arange(0, lanes)
    is_node = node < nodes
    at, before = request * nodes + node, node * 0
    weight = tl.load(weights_at + at, mask=is_node, other=0.0)
    for start in range(0, count, at_once):
        other = start + tl.arange(0, at_once)
        is_in = other < count
        other_weights = tl.load(weights_at + other, mask=is_in, other=0.0)
        of = tl.load(num_nodes_at + other // nodes, mask=is_in, other=0)
        is_draft = (other % nodes > 0) & (other % nodes < of)
        is_equal = (other_weights[None, :] == weight[:, None]) & (other[None, :] < at[:, None])
        is_before = (other_weights[None, :] > weight[:, None]) | is_equal
        before += tl.sum((is_before & is_draft[None, :]).to(tl.int32), axis=1)
    is_draft = (node > 0) & (node < tl.load(num_nodes_at + request))
    keep = (is_draft & (before < budget)) | (node == 0)
    place = _kept_before(keep, node, node)
    token = tl.load(tokens_at + at, mask=keep, other=0)
    parent = tl.load(parents_at + at, mask=keep, other=0)
    tl.store(kept_tokens_at + request * nodes + place, token, mask=keep)
    tl.store(kept_parents_at + request * nodes + place, _kept_before(keep, node, parent), mask=keep)
    kept = tl.sum(keep.to(tl.int32))
    is_rest = is_node & (node >= kept)
    tl.store(kept_tokens_at + at, node * 0, mask=is_rest)
    tl.store(kept_parents_at + at, node * 0, mask=is_rest)
    tl.store(kept_nodes_at + request, kept)


@triton.jit
def _kept_before(keep, node, bound):
    """Counts the kept nodes before each bound."""
    return tl.sum((keep[None, :] & (node[None, :] < bound[:, None])).to(tl.int32), axis=1)
