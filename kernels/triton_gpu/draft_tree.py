"""Draft trees in Triton: the ancestors of nodes, the next level, and what is kept; see `ops`.

Candidates are ranked by counting those before them: no lane waits for another one, as in a sort.
Of many candidates the border of the best is found by halving instead.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.triton_gpu.scores import HIGHEST, LOWEST, key_of

_AT_ONCE = 16  # candidates that others are compared with
_PAIRS = 4096  # of a row and a request that a program compares
_MOST_RANKED = tl.constexpr(512)  # candidates that are compared with each other


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """As `shared.spec.draft_tree.ancestors`."""
    B, N = parents.shape
    found = parents.new_empty((B, N, N), dtype=torch.bool)
    lanes = triton.next_power_of_2(N)
    _ancestors_kernel[(B,)](parents.contiguous(), found, nodes=N, lanes=lanes, num_warps=1)
    return found


@triton.jit
def _ancestors_kernel(parents_at, found_at, nodes: tl.constexpr, lanes: tl.constexpr):
    """One program per request, whose nodes are its lanes."""
    request, node = tl.program_id(0), tl.arange(0, lanes)
    above, steps = tl.where(node < nodes, node, 0), 0
    found = above[:, None] == node[None, :]
    while (tl.max(above) > 0) & (steps < nodes):  # what is no tree has an end too
        above = tl.load(parents_at + request * nodes + above, mask=above > 0, other=0)
        found = found | (above[:, None] == node[None, :])
        steps += 1
    at = found_at + (request * nodes + node[:, None]) * nodes + node[None, :]
    tl.store(at, found, mask=(node < nodes)[:, None] & (node < nodes)[None, :])


def flat_nodes(
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    rows: int,
    is_chain: bool,
) -> tuple[
    Int[Tensor, " B1"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Bool[Tensor, " R"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Bool[Tensor, "R seen"],
]:
    """As `shared.spec.attention.tree_rows`: where each row's request begins, its request and node,
    whether it is real, its position, its place, and what it sees."""
    (B, N), lanes = parents.shape, triton.next_power_of_2(len(parents))
    block = max(1, min(32, _PAIRS // lanes))
    row_starts = lengths.new_empty(B + 1)
    request, node = lengths.new_empty((2, rows), dtype=torch.int64)
    positions, places, until = lengths.new_empty((3, rows))
    is_real = lengths.new_empty(rows, dtype=torch.bool)
    window = is_real.new_empty((rows, 0 if is_chain else N))
    _flat_nodes_kernel[(triton.cdiv(rows, block),)](
        *(x.contiguous() for x in (parents, num_nodes, lengths)),
        *(row_starts, request, node, is_real, positions, places, until, window),
        rows=rows,
        requests=B,
        nodes=N,
        is_chain=is_chain,
        block=block,
        lanes=lanes,
        columns=triton.next_power_of_2(N),
        num_warps=4,
    )
    return row_starts, request, node, is_real, positions, places, until, window


@triton.jit
def _flat_nodes_kernel(
    parents_at,
    num_nodes_at,
    lengths_at,
    row_starts_at,
    request_at,
    node_at,
    is_real_at,
    positions_at,
    places_at,
    until_at,
    window_at,
    rows: tl.constexpr,
    requests: tl.constexpr,
    nodes: tl.constexpr,
    is_chain: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
):
    """One program per block of rows, which looks at all requests."""
    lane, row = tl.arange(0, lanes), tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < rows
    count = tl.load(num_nodes_at + lane, mask=lane < requests, other=0)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(row_starts_at, 0)
        tl.store(row_starts_at + 1 + lane, ends, mask=lane < requests)
    is_before = (row[:, None] >= ends[None, :]) & (lane < requests)[None, :]
    is_real = row < tl.sum(count)
    request = tl.where(is_real, tl.sum(is_before.to(tl.int32), axis=1), 0)
    start = tl.sum(tl.where(is_before, count[None, :], 0), axis=1)
    node = tl.where(is_real, row - start, 0)
    place = tl.load(lengths_at + request) + node
    tl.store(request_at + row, request.to(tl.int64), mask=is_row)
    tl.store(node_at + row, node.to(tl.int64), mask=is_row)
    tl.store(is_real_at + row, is_real, mask=is_row)
    tl.store(places_at + row, place, mask=is_row)
    depth, until = node, place + 1
    if not is_chain:
        depth, until, column, steps = node * 0, place - node, tl.arange(0, columns), 0
        above = node
        seen = above[:, None] == column[None, :]
        while (tl.max(above) > 0) & (steps < nodes):
            depth += (above > 0).to(tl.int32)
            above = tl.load(parents_at + request * nodes + above, mask=above > 0, other=0)
            seen = seen | (above[:, None] == column[None, :])
            steps += 1
        at = window_at + row[:, None] * nodes + column[None, :]
        tl.store(at, seen & is_real[:, None], mask=is_row[:, None] & (column < nodes)[None, :])
    tl.store(positions_at + row, place - node + depth, mask=is_row)
    tl.store(until_at + row, tl.where(is_real, until, 0), mask=is_row)


class Expanded(NamedTuple):
    """A level, and of each of its nodes the candidates below it and what their edges weigh."""

    tokens: Any
    edges: Any
    numbers: Any
    weights: Any
    paths: Any
    sees: Any


class Level(NamedTuple):
    """As of `shared.spec.draft_tree`."""

    tokens: Any
    weights: Any
    parents: Any
    numbers: Any
    paths: Any
    sees: Any


class LevelSizes(NamedTuple):
    """Sizes of the arrays: of a path before and after, and of the window."""

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
    """As `shared.spec.draft_tree.next_level`, a level as its fields."""
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
    expanded, found_parents_at, found_weights_at, level, s, sizes: tl.constexpr,
    lanes: tl.constexpr, places: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """One program per request, whose candidates are its lanes."""
    width: tl.constexpr = sizes.width
    count: tl.constexpr = width * width
    request, lane = tl.program_id(0), tl.arange(0, lanes)
    is_in = lane < count
    node = request * width + lane // width  # the candidate's parent
    weight = _sum(expanded, request, lane, width)
    of = tl.load(expanded.numbers + node, mask=is_in, other=0)
    tl.store(found_weights_at + request * count + lane, weight, mask=is_in)
    tl.store(found_parents_at + request * count + lane, of, mask=is_in)
    key, rank = key_of(weight), tl.zeros((lanes,), tl.int32)
    for start in range(0, count, at_once):
        other = start + tl.arange(0, at_once)
        theirs = tl.where(other < count, key_of(_sum(expanded, request, other, width)), LOWEST)
        rank += _before(key, lane, theirs, other)
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
    own = column == sizes.root_rows + s * width + rank[:, None]
    tl.store(level.sees + at[:, None] * sizes.window + column, seen | own, mask=both)


@triton.jit
def _sum(expanded, request, lane, width: tl.constexpr):
    """The path weights of some candidates of a level."""
    count: tl.constexpr = width * width
    weight = tl.load(
        expanded.weights + request * width + lane // width, mask=lane < count, other=0.0
    )
    return weight + tl.load(expanded.edges + request * count + lane, mask=lane < count, other=0.0)


@triton.jit
def _before(key, lane, theirs, other):
    """How many of some others go before each candidate; equal ones by the lower index."""
    is_equal = (theirs[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
    return tl.sum(((theirs[None, :] > key[:, None]) | is_equal).to(tl.int32), axis=1)


@triton.jit
def _is_best(key, count):
    """Whether each key is among so many largest; of equal ones the first are."""
    low, high = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        is_below = tl.sum((key > middle).to(tl.int32)) >= count
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_below, high, middle)
    is_tie = (key == low).to(tl.int32)
    room = count - tl.sum((key > low).to(tl.int32))
    return (key > low) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= room))


def keep_best(
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B C"],
    weights: Float[Tensor, "B C"],
    parents: Int[Tensor, "B C"],
    max_drafts: Int[Tensor, " B"],
    has_relay: Bool[Tensor, " B"],
    nodes: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"], Float[Tensor, "B N"]]:
    """As `shared.spec.draft_tree.keep_best`."""
    B, C = tokens.shape
    kept_tokens, kept_parents = newest.new_empty((2, B, nodes), dtype=torch.int32)
    num_nodes, node_of = (newest.new_empty(s, dtype=torch.int32) for s in (B, (B, C)))
    kept_weights = weights.new_empty((B, nodes))
    given = (newest, tokens, weights, parents, max_drafts, has_relay)
    _keep_best_kernel[(B,)](
        *(x.contiguous() for x in given),
        *(kept_tokens, kept_parents, kept_weights, num_nodes, node_of),
        nodes=nodes,
        count=C,
        lanes=triton.next_power_of_2(C),
        ways=triton.next_power_of_2(nodes),
        at_once=_AT_ONCE,
        num_warps=4,
    )
    return kept_tokens, kept_parents, num_nodes, kept_weights


@triton.jit
def _keep_best_kernel(
    newest_at,
    tokens_at,
    weights_at,
    parents_at,
    max_drafts_at,
    has_relay_at,
    kept_tokens_at,
    kept_parents_at,
    kept_weights_at,
    num_nodes_at,
    node_of_at,
    nodes: tl.constexpr,
    count: tl.constexpr,
    lanes: tl.constexpr,
    ways: tl.constexpr,
    at_once: tl.constexpr,
):
    """One program per request, whose candidates are its lanes."""
    request, lane = tl.program_id(0), tl.arange(0, lanes)
    at, is_in = request * count + lane, lane < count
    weight = tl.load(weights_at + at, mask=is_in, other=0.0)
    most = tl.minimum(tl.maximum(tl.load(max_drafts_at + request), 0), min(nodes - 1, count))
    has_relay = tl.load(has_relay_at + request).to(tl.int32) != 0
    num_drafts = tl.where(has_relay, most, 0)
    key = tl.where(is_in, key_of(weight), LOWEST)
    if lanes <= _MOST_RANKED:
        rank = lane * 0
        for start in range(0, count, at_once):
            other = start + tl.arange(0, at_once)
            theirs = tl.load(weights_at + request * count + other, mask=other < count, other=0.0)
            rank += _before(key, lane, tl.where(other < count, key_of(theirs), LOWEST), other)
        keep = is_in & (rank < num_drafts)
    else:
        keep = is_in & _is_best(key, num_drafts)
    node = tl.cumsum(keep.to(tl.int32), 0)
    tl.store(node_of_at + at, node, mask=is_in)
    tl.debug_barrier()  # they are read by other threads than wrote them
    parent = tl.load(parents_at + at, mask=keep, other=0)
    of_parent = node_of_at + request * count + parent - 1
    parent = tl.load(of_parent, mask=keep & (parent > 0), other=0, volatile=True)
    token = tl.load(tokens_at + at, mask=keep, other=0)
    tl.store(kept_tokens_at + request * nodes + node, token, mask=keep)
    tl.store(kept_parents_at + request * nodes + node, parent, mask=keep)
    tl.store(kept_weights_at + request * nodes + node, weight, mask=keep)
    way = tl.arange(0, ways)
    is_rest = (way < nodes) & ((way == 0) | (way > num_drafts))
    root = tl.where(way == 0, tl.load(newest_at + request), 0)
    tl.store(kept_tokens_at + request * nodes + way, root, mask=is_rest)
    tl.store(kept_parents_at + request * nodes + way, way * 0, mask=is_rest)
    tl.store(kept_weights_at + request * nodes + way, way * 0.0, mask=is_rest)
    tl.store(num_nodes_at + request, 1 + num_drafts)


def chains(
    drafts: Int[Tensor, "B S"],
    newest: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """As `shared.spec.draft_tree.chains`."""
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
    """One program per request, whose nodes are its lanes."""
    request, node = tl.program_id(0), tl.arange(0, lanes)
    most = tl.minimum(tl.maximum(tl.load(max_drafts_at + request), 0), depth)
    num_drafts = tl.where(tl.load(can_draft_at + request).to(tl.int32) != 0, most, 0)
    is_draft = (node > 0) & (node <= num_drafts)
    draft = tl.load(drafts_at + request * depth + node - 1, mask=is_draft, other=0)
    at, is_node = request * (depth + 1) + node, node <= depth
    tl.store(tokens_at + at, tl.where(node == 0, tl.load(newest_at + request), draft), mask=is_node)
    tl.store(parents_at + at, tl.where(is_draft, node - 1, 0), mask=is_node)
    tl.store(num_nodes_at + request, 1 + num_drafts)
