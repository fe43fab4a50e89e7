"""Draft tree building: ancestor masks, the next level, and the best nodes (Triton).

Candidates are ranked by counting the better ones, so no lane waits for another, as in a sort. Among
many candidates the threshold of the best is found by bisection.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.triton_gpu.sampling.logits_processing import HIGHEST, LOWEST, key_of

_AT_ONCE = 16  # candidates compared per step
_MOST_RANKED = tl.constexpr(512)  # largest number of candidates ranked by comparing all pairs


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """Implements `shared.spec.draft_tree.ancestors`."""
    B, N = parents.shape
    reached = parents.new_empty((B, N, N), dtype=torch.bool)
    lanes = triton.next_power_of_2(N)
    _ancestors_kernel[(B,)](parents.contiguous(), reached, nodes=N, lanes=lanes, num_warps=1)
    return reached


@triton.jit
def _ancestors_kernel(parents_at, reached_at, nodes: tl.constexpr, lanes: tl.constexpr):
    """One program per request; nodes are its lanes."""
    request, node = tl.program_id(0), tl.arange(0, lanes)
    above, steps = tl.where(node < nodes, node, 0), 0
    reached = above[:, None] == node[None, :]
    while (tl.max(above) > 0) & (steps < nodes):  # terminates also if the parents are no tree
        above = tl.load(parents_at + request * nodes + above, mask=above > 0, other=0)
        reached = reached | (above[:, None] == node[None, :])
        steps += 1
    at = reached_at + (request * nodes + node[:, None]) * nodes + node[None, :]
    tl.store(at, reached, mask=(node < nodes)[:, None] & (node < nodes)[None, :])


class Expanded(NamedTuple):
    """Level of a tree, with the candidates below each node and the weights of their edges."""

    tokens: Any
    edges: Any
    numbers: Any
    weights: Any
    paths: Any
    sees: Any


class Level(NamedTuple):
    """Same as `shared.spec.draft_tree.Level`."""

    tokens: Any
    weights: Any
    parents: Any
    numbers: Any
    paths: Any
    sees: Any


class LevelSizes(NamedTuple):
    """Sizes of the arrays: of a path before and after the level, and of the tree mask."""

    width: int
    path: int
    longer: int
    window: int
    root_rows: int


def next_level(
    tokens: Int[Tensor, "B k k"],
    edges: Float[Tensor, "B k k"],
    numbers: Int[Tensor, "B k"],
    weights: Float[Tensor, "B k"],
    paths: Int[Tensor, "B k path"],
    sees: Bool[Tensor, "B k window"],
    s: int,
    root_rows: int,
) -> tuple[
    Int[Tensor, "B kk"],
    Float[Tensor, "B kk"],
    Int[Tensor, "B k"],
    Float[Tensor, "B k"],
    Int[Tensor, "B k"],
    Int[Tensor, "B k"],
    Int[Tensor, "B k longer"],
    Bool[Tensor, "B k window"],
]:
    """Implements `shared.spec.draft_tree.next_level`; returns the fields of the level."""
    (B, k, path), window = paths.shape, sees.shape[2]
    longer = max(path, s + 1)
    found_parents, found_weights = numbers.new_empty((B, k * k)), weights.new_empty((B, k * k))
    level = Level(
        tokens=numbers.new_empty((B, k)),
        weights=weights.new_empty((B, k)),
        parents=numbers.new_empty((B, k), dtype=torch.int64),
        numbers=numbers.new_empty((B, k)),
        paths=numbers.new_empty((B, k, longer)),
        sees=torch.empty_like(sees),
    )
    _next_level_kernel[(B,)](
        Expanded(
            tokens=tokens.contiguous(),
            edges=edges.contiguous(),
            numbers=numbers.contiguous(),
            weights=weights.contiguous(),
            paths=paths.contiguous(),
            sees=sees.contiguous(),
        ),
        *(found_parents, found_weights, level, s),
        sizes=LevelSizes(width=k, path=path, longer=longer, window=window, root_rows=root_rows),
        lanes=triton.next_power_of_2(k * k),
        places=triton.next_power_of_2(longer),
        columns=triton.next_power_of_2(window),
        at_once=_AT_ONCE,
        num_warps=1 if k * k <= 64 else 4,
    )
    return found_parents, found_weights, *level


@triton.jit(do_not_specialize=["s"])
def _next_level_kernel(
    expanded,
    found_parents_at,
    found_weights_at,
    level,
    s,
    sizes: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
):
    """One program per request; candidates are its lanes."""
    width: tl.constexpr = sizes.width
    count: tl.constexpr = width * width
    request, lane = tl.program_id(0), tl.arange(0, lanes)
    is_in = lane < count
    node = request * width + lane // width  # parent of the candidate
    weight = _sum(expanded, request, lane, width)
    of = tl.load(expanded.numbers + node, mask=is_in, other=0)
    tl.store(found_weights_at + request * count + lane, weight, mask=is_in)
    tl.store(found_parents_at + request * count + lane, of, mask=is_in)
    key, rank = key_of(weight), tl.zeros((lanes,), tl.int32)
    for start in range(0, count, at_once):
        other = start + tl.arange(0, at_once)
        other_keys = tl.where(other < count, key_of(_sum(expanded, request, other, width)), LOWEST)
        rank += _before(key, lane, other_keys, other)
    keep = is_in & (rank < width)
    at = request * width + rank
    token = tl.load(expanded.tokens + request * count + lane, mask=keep, other=0)
    tl.store(level.tokens + at, token, mask=keep)
    tl.store(level.weights + at, weight, mask=keep)
    tl.store(level.parents + at, node.to(tl.int64), mask=keep)
    tl.store(level.numbers + at, 1 + width + (s - 1) * count + lane, mask=keep)
    place, both = tl.arange(0, places)[None, :], keep[:, None]
    old_at = expanded.paths + node[:, None] * sizes.path + place
    old = tl.load(old_at, mask=both & (place < sizes.path), other=0)
    new = tl.where(place == s, token[:, None], old)
    new_at = level.paths + at[:, None] * sizes.longer + place
    tl.store(new_at, new, mask=both & (place < sizes.longer))
    column = tl.arange(0, columns)[None, :]
    both = both & (column < sizes.window)
    seen_at = expanded.sees + node[:, None] * sizes.window + column
    seen = tl.load(seen_at, mask=both, other=0).to(tl.int32) != 0
    is_self = column == sizes.root_rows + s * width + rank[:, None]
    tl.store(level.sees + at[:, None] * sizes.window + column, seen | is_self, mask=both)


@triton.jit
def _sum(expanded, request, lane, width: tl.constexpr):
    """Computes the path weights of some candidates of a level."""
    count: tl.constexpr = width * width
    weight = tl.load(
        expanded.weights + request * width + lane // width, mask=lane < count, other=0.0
    )
    return weight + tl.load(expanded.edges + request * count + lane, mask=lane < count, other=0.0)


@triton.jit
def _before(key, lane, other_keys, other):
    """Counts the candidates among some others before each one; equal ones by the lower index."""
    is_equal = (other_keys[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
    return tl.sum(((other_keys[None, :] > key[:, None]) | is_equal).to(tl.int32), axis=1)


@triton.jit
def _is_best(key, count):
    """Returns whether each key is among the `count` largest; the first ones among equal keys."""
    low, high = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        is_below = tl.sum((key > middle).to(tl.int32)) >= count
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_below, high, middle)
    is_tie = (key == low).to(tl.int32)
    room = count - tl.sum((key > low).to(tl.int32))
    return (key > low) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= room))


class Candidates(NamedTuple):
    """Candidates of each request, and the number of nodes that it may keep."""

    newest: Any
    tokens: Any
    weights: Any
    parents: Any
    max_drafts: Any
    has_relay: Any


class BestNodes(NamedTuple):
    """Trees of the best candidates, and the candidate of each node."""

    tokens: Any
    parents: Any
    num_nodes: Any
    weights: Any
    node_of: Any


def keep_best(
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B C"],
    weights: Float[Tensor, "B C"],
    parents: Int[Tensor, "B C"],
    max_drafts: Int[Tensor, " B"],
    has_relay: Bool[Tensor, " B"],
    nodes: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"], Float[Tensor, "B N"]]:
    """Implements `shared.spec.draft_tree.keep_best`."""
    B, C = tokens.shape
    kept = BestNodes(
        tokens=newest.new_empty((B, nodes), dtype=torch.int32),
        parents=newest.new_empty((B, nodes), dtype=torch.int32),
        num_nodes=newest.new_empty(B, dtype=torch.int32),
        weights=weights.new_empty((B, nodes)),
        node_of=newest.new_empty((B, C), dtype=torch.int32),
    )
    _keep_best_kernel[(B,)](
        Candidates(
            newest=newest.contiguous(),
            tokens=tokens.contiguous(),
            weights=weights.contiguous(),
            parents=parents.contiguous(),
            max_drafts=max_drafts.contiguous(),
            has_relay=has_relay.contiguous(),
        ),
        kept,
        nodes=nodes,
        count=C,
        lanes=triton.next_power_of_2(C),
        ways=triton.next_power_of_2(nodes),
        at_once=_AT_ONCE,
        num_warps=4,
    )
    return kept.tokens, kept.parents, kept.num_nodes, kept.weights


@triton.jit
def _keep_best_kernel(
    candidates,
    kept,
    nodes: tl.constexpr,
    count: tl.constexpr,
    lanes: tl.constexpr,
    ways: tl.constexpr,
    at_once: tl.constexpr,
):
    """One program per request; candidates are its lanes."""
    request, lane = tl.program_id(0), tl.arange(0, lanes)
    at, is_in = request * count + lane, lane < count
    weight = tl.load(candidates.weights + at, mask=is_in, other=0.0)
    most = tl.minimum(
        tl.maximum(tl.load(candidates.max_drafts + request), 0), min(nodes - 1, count)
    )
    has_relay = tl.load(candidates.has_relay + request).to(tl.int32) != 0
    num_drafts = tl.where(has_relay, most, 0)
    key = tl.where(is_in, key_of(weight), LOWEST)
    if lanes <= _MOST_RANKED:
        rank = lane * 0
        for start in range(0, count, at_once):
            other = start + tl.arange(0, at_once)
            other_keys = tl.load(
                candidates.weights + request * count + other, mask=other < count, other=0.0
            )
            rank += _before(key, lane, tl.where(other < count, key_of(other_keys), LOWEST), other)
        keep = is_in & (rank < num_drafts)
    else:
        keep = is_in & _is_best(key, num_drafts)
    node = tl.cumsum(keep.to(tl.int32), 0)
    tl.store(kept.node_of + at, node, mask=is_in)
    tl.debug_barrier()  # other threads than the writers read them
    parent = tl.load(candidates.parents + at, mask=keep, other=0)
    of_parent = kept.node_of + request * count + parent - 1
    parent = tl.load(of_parent, mask=keep & (parent > 0), other=0, volatile=True)
    token = tl.load(candidates.tokens + at, mask=keep, other=0)
    tl.store(kept.tokens + request * nodes + node, token, mask=keep)
    tl.store(kept.parents + request * nodes + node, parent, mask=keep)
    tl.store(kept.weights + request * nodes + node, weight, mask=keep)
    target = tl.arange(0, ways)
    is_rest = (target < nodes) & ((target == 0) | (target > num_drafts))
    root = tl.where(target == 0, tl.load(candidates.newest + request), 0)
    tl.store(kept.tokens + request * nodes + target, root, mask=is_rest)
    tl.store(kept.parents + request * nodes + target, target * 0, mask=is_rest)
    tl.store(kept.weights + request * nodes + target, target * 0.0, mask=is_rest)
    tl.store(kept.num_nodes + request, 1 + num_drafts)


def chains(
    drafts: Int[Tensor, "B S"],
    newest: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """Implements `shared.spec.draft_tree.chains`."""
    B, S = drafts.shape
    tokens, parents = newest.new_empty((2, B, S + 1), dtype=torch.int32)
    num_nodes = newest.new_empty(B, dtype=torch.int32)
    given = (drafts, newest, max_drafts, can_draft)
    _chains_kernel[(B,)](
        *(x.contiguous() for x in given),
        *(tokens, parents, num_nodes),
        depth=S,
        lanes=triton.next_power_of_2(S + 1),
        num_warps=1,
    )
    return tokens, parents, num_nodes


@triton.jit
def _chains_kernel(
    drafts_at,
    newest_at,
    max_drafts_at,
    can_draft_at,
    tokens_at,
    parents_at,
    num_nodes_at,
    depth: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program per request; nodes are its lanes."""
    request, node = tl.program_id(0), tl.arange(0, lanes)
    most = tl.minimum(tl.maximum(tl.load(max_drafts_at + request), 0), depth)
    num_drafts = tl.where(tl.load(can_draft_at + request).to(tl.int32) != 0, most, 0)
    is_draft = (node > 0) & (node <= num_drafts)
    draft = tl.load(drafts_at + request * depth + node - 1, mask=is_draft, other=0)
    at, is_node = request * (depth + 1) + node, node <= depth
    tl.store(tokens_at + at, tl.where(node == 0, tl.load(newest_at + request), draft), mask=is_node)
    tl.store(parents_at + at, tl.where(is_draft, node - 1, 0), mask=is_node)
    tl.store(num_nodes_at + request, 1 + num_drafts)
