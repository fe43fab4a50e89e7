"""Draft trees: masks, expansion and flat verify rows; same as `shared.spec.draft_tree`.

On a GPU `ancestors`, `next_level`, `keep_best` and `chains` are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops import Kernels, kernel_or_reference


def depths(parents: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Returns the depth of each node; a padding node counts as a child of the root."""
    return ancestors(parents).sum(dim=2, dtype=torch.int32) - 1


def plain_ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    B, N = parents.shape
    rows = torch.arange(B, device=parents.device)[:, None]
    is_ancestor = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    up = parents.to(torch.int64, copy=True)
    up[:, 0] = 0
    for _ in range((N - 1).bit_length()):  # each round doubles the distance covered
        is_ancestor, up = is_ancestor | is_ancestor[rows, up], up.gather(1, up)
    return is_ancestor


def kernel_ancestors(kernels: Kernels, parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    return kernels.draft_tree.ancestors(parents)


ancestors = kernel_or_reference(kernel_ancestors, plain_ancestors)


def best(weights: Float[Tensor, "B C"], count: int) -> Int[Tensor, "B count"]:
    """Returns the indices of the `count` largest weights; stable, unlike `torch.topk`."""
    return weights.sort(dim=1, descending=True, stable=True).indices[:, :count].int()


def children(
    frontier_numbers: Int[Tensor, "B k"],
    frontier_weights: Float[Tensor, "B k"],
    edge_weights: Float[Tensor, "B k k"],
) -> tuple[Int[Tensor, "B kk"], Float[Tensor, "B kk"]]:
    k = frontier_numbers.shape[1]
    weights = frontier_weights[:, :, None] + edge_weights
    return frontier_numbers.repeat_interleave(k, dim=1), weights.flatten(1)


def next_frontier(
    tokens: Int[Tensor, "B kk"], weights: Float[Tensor, "B kk"], first_number: int, width: int
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"], Int[Tensor, "B k"], Int[Tensor, "B k"]]:
    chosen = best(weights, width)
    at = chosen.long()
    parents = torch.div(chosen, width, rounding_mode="floor")
    return tokens.gather(1, at), weights.gather(1, at), first_number + chosen, parents


@dataclass(frozen=True)
class Level:
    """Frontier: the nodes of the next expansion."""

    tokens: Int[Tensor, "B k"]
    weights: Float[Tensor, "B k"]
    parents: Int[Tensor, "B k"]
    numbers: Int[Tensor, "B k"]
    paths: Int[Tensor, "B k path"]
    sees: Bool[Tensor, "B k window"]


def plain_next_level(
    level: Level,
    tokens: Int[Tensor, "B k k"],
    edges: Float[Tensor, "B k k"],
    s: int,
    root_rows: int,
) -> tuple[Int[Tensor, "B kk"], Float[Tensor, "B kk"], Level]:
    B, k = level.tokens.shape
    parents, weights = children(level.numbers, level.weights, edges)
    chosen, best_weights, numbers, parent = next_frontier(
        tokens.flatten(1), weights, 1 + k + (s - 1) * k * k, k
    )
    rows = torch.arange(B, device=tokens.device)[:, None]
    node = torch.arange(k, device=tokens.device)[:, None]
    column = torch.arange(level.sees.shape[2], device=tokens.device)
    following = Level(
        tokens=chosen,
        weights=best_weights,
        parents=rows * k + parent,
        numbers=numbers,
        paths=torch.cat([level.paths[rows, parent][:, :, :s], chosen[:, :, None]], dim=2),
        sees=level.sees[rows, parent] | (column == root_rows + s * k + node),
    )
    return parents, weights, following


def kernel_next_level(
    kernels: Kernels,
    level: Level,
    tokens: Int[Tensor, "B k k"],
    edges: Float[Tensor, "B k k"],
    s: int,
    root_rows: int,
) -> tuple[Int[Tensor, "B kk"], Float[Tensor, "B kk"], Level]:
    given = (tokens, edges, level.numbers, level.weights, level.paths, level.sees)
    parents, weights, *level_arrays = kernels.draft_tree.next_level(*given, s, root_rows)
    return parents, weights, Level(*level_arrays)


next_level = kernel_or_reference(kernel_next_level, plain_next_level)


Kept = tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"], Float[Tensor, "B N"]]
"""Tokens, parents, node counts and path weights of the kept trees."""


def plain_keep_best(
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B C"],
    weights: Float[Tensor, "B C"],
    parents: Int[Tensor, "B C"],
    max_drafts: Int[Tensor, " B"],
    has_relay: Bool[Tensor, " B"],
    nodes: int,
) -> Kept:
    B, C = tokens.shape
    rank = torch.arange(C, device=tokens.device)
    num_drafts = torch.where(has_relay, max_drafts.clamp(0, min(nodes - 1, C)), 0)
    is_best = (rank < num_drafts[:, None]).expand(B, C)
    kept = torch.zeros_like(is_best).scatter(1, best(weights, C).long(), is_best)
    root = torch.zeros_like(newest)[:, None]
    node_of = torch.cat([root, kept.cumsum(1, dtype=torch.int32)], dim=1)  # by number
    order = kept.int().sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    is_real = rank[: nodes - 1] < num_drafts[:, None]
    kept_tokens = torch.where(is_real, tokens.gather(1, order), 0)
    kept_parents = node_of.gather(1, parents.gather(1, order).long())
    kept_parents = torch.where(is_real, kept_parents, 0)
    kept_weights = torch.where(is_real, weights.gather(1, order), 0)
    return (
        torch.cat([newest[:, None], kept_tokens], dim=1).int(),
        torch.cat([root, kept_parents], dim=1).int(),
        (1 + num_drafts).int(),
        torch.nn.functional.pad(kept_weights, (1, 0)),
    )


def kernel_keep_best(
    kernels: Kernels,
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B C"],
    weights: Float[Tensor, "B C"],
    parents: Int[Tensor, "B C"],
    max_drafts: Int[Tensor, " B"],
    has_relay: Bool[Tensor, " B"],
    nodes: int,
) -> Kept:
    return kernels.draft_tree.keep_best(
        newest, tokens, weights, parents, max_drafts, has_relay, nodes
    )


keep_best = kernel_or_reference(kernel_keep_best, plain_keep_best)


def plain_chains(
    drafts: Int[Tensor, "B S"],
    newest: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    S = drafts.shape[1]
    num_drafts = torch.where(can_draft, max_drafts.clamp(0, S), 0)
    slot = torch.arange(S, dtype=torch.int32, device=drafts.device)
    is_real = slot < num_drafts[:, None]
    tokens = torch.cat([newest[:, None], torch.where(is_real, drafts, 0)], dim=1)
    parents = torch.cat([torch.zeros_like(newest)[:, None], torch.where(is_real, slot, 0)], dim=1)
    return tokens, parents, 1 + num_drafts


def kernel_chains(
    kernels: Kernels,
    drafts: Int[Tensor, "B S"],
    newest: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    return kernels.draft_tree.chains(drafts, newest, max_drafts, can_draft)


chains = kernel_or_reference(kernel_chains, plain_chains)


def flatten(
    num_nodes: Int[Tensor, " B"], rows: int
) -> tuple[Int[Tensor, " B1"], Int[Tensor, " R"], Int[Tensor, " R"], Bool[Tensor, " R"]]:
    ends = num_nodes.cumsum(0, dtype=torch.int32)
    row_starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    request, is_real = request_of(row_starts, rows)
    row = torch.arange(rows, dtype=torch.int32, device=num_nodes.device)
    node = torch.where(is_real, row - row_starts[request], 0).long()
    return row_starts, request, node, is_real


def request_of(
    row_starts: Int[Tensor, " B1"], rows: int
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"]]:
    """Returns the request of each flat row (0 for padding), and the valid rows."""
    # Indices are int64 throughout: torch would convert others at each use.
    row = torch.arange(rows, dtype=torch.int32, device=row_starts.device)
    is_real = row < row_starts[-1]
    request = torch.searchsorted(row_starts[1:].contiguous(), row, right=True)
    return torch.where(is_real, request, 0), is_real


def flat_rows(
    row_starts: Int[Tensor, " B1"], num_nodes: Int[Tensor, " B"], nodes: int
) -> Int[Tensor, "B N"]:
    if nodes == 1:
        return row_starts[:-1, None]
    node = torch.arange(nodes, dtype=torch.int32, device=num_nodes.device)
    return row_starts[:-1, None] + torch.where(node < num_nodes[:, None], node, 0)


def is_last(row_starts: Int[Tensor, " B1"], request: Int[Tensor, " R"]) -> Bool[Tensor, " R"]:
    """Returns True for the last flat row of each request."""
    row = torch.arange(len(request), dtype=torch.int32, device=request.device)
    return row == row_starts[1:][request] - 1
