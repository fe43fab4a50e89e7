"""Draft trees: masks, expansion and flat verify rows; same as `shared.spec.draft_tree`.

On a GPU `ancestors`, `next_level`, `keep_best` and `chains` are kernels; see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.ops import Kernels, kernel_or_reference


def depths(parents: Int[jax.Array, "B N"]) -> Int[jax.Array, "B N"]:
    """Returns the depth of each node; a padding node counts as a child of the root."""
    return ancestors(parents).sum(axis=2, dtype=jnp.int32) - 1


def plain_ancestors(parents: Int[jax.Array, "B N"]) -> Bool[jax.Array, "B N N"]:
    """Returns the tree mask: entry [b, i, j] is True if node j is node i or its ancestor."""
    N = parents.shape[1]
    itself = jnp.eye(N, dtype=jnp.float32)
    reached = jnp.maximum(jax.nn.one_hot(parents, N).at[:, 0].set(0), itself)
    for _ in range((N - 1).bit_length()):  # each product doubles the distance covered
        reached = jnp.minimum(jnp.einsum("bij,bjk->bik", reached, reached), 1)
    return reached > 0


def kernel_ancestors(kernels: Kernels, parents: Int[jax.Array, "B N"]) -> Bool[jax.Array, "B N N"]:
    return kernels.draft_tree.ancestors(parents)


ancestors = kernel_or_reference(kernel_ancestors, plain_ancestors)


def best(weights: Float[jax.Array, "B C"], count: int) -> Int[jax.Array, "B count"]:
    """Returns the indices of the `count` largest weights, best first; ties by lower index."""
    weights = jnp.where(weights == 0, 0.0, weights)  # `top_k` orders -0 after 0
    return lax.top_k(weights, count)[1].astype(jnp.int32)


def children(
    frontier_numbers: Int[jax.Array, "B k"],
    frontier_weights: Float[jax.Array, "B k"],
    edge_weights: Float[jax.Array, "B k k"],
) -> tuple[Int[jax.Array, "B kk"], Float[jax.Array, "B kk"]]:
    """Returns the parent numbers and the path weights of one level's candidates."""
    B, k = frontier_numbers.shape
    weights = frontier_weights[:, :, None] + edge_weights
    return jnp.repeat(frontier_numbers, k, axis=1), weights.reshape(B, k * k)


def next_frontier(
    tokens: Int[jax.Array, "B kk"],
    weights: Float[jax.Array, "B kk"],
    first_number: Int[jax.Array, ""] | int,
    width: int,
) -> tuple[
    Int[jax.Array, "B k"],
    Float[jax.Array, "B k"],
    Int[jax.Array, "B k"],
    Int[jax.Array, "B k"],
]:
    """Picks the `width` best of a level's k * k candidates: tokens, weights, numbers, parents."""
    chosen = best(weights, width)
    return (
        jnp.take_along_axis(tokens, chosen, axis=1),
        jnp.take_along_axis(weights, chosen, axis=1),
        first_number + chosen,
        chosen // width,
    )


class Level(NamedTuple):
    """Frontier: the nodes of the next expansion.

    Attributes:
      tokens, weights: Token and path weight of each node.
      parents: Row of each node's parent in the previous expansion; the request, for level 1.
      numbers: Candidate numbers.
      paths: Draft tokens from below the root to the node itself, then padding.
      sees: Rows of the drafting window that are visible to each node, including its own.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    parents: Int[jax.Array, "B k"]
    numbers: Int[jax.Array, "B k"]
    paths: Int[jax.Array, "B k path"]
    sees: Bool[jax.Array, "B k window"]


def plain_next_level(
    level: Level,
    tokens: Int[jax.Array, "B k k"],
    edges: Float[jax.Array, "B k k"],
    s: Int[jax.Array, ""] | int,
    root_rows: int,
) -> tuple[Int[jax.Array, "B kk"], Float[jax.Array, "B kk"], Level]:
    """Returns the candidates of expansion `s` and the frontier of their best k; sizes are fixed."""
    B, k, window = level.sees.shape
    parents, weights = children(level.numbers, level.weights, edges)
    chosen, best_weights, numbers, parent = next_frontier(
        tokens.reshape(B, k * k), weights, 1 + k + (s - 1) * k * k, k
    )
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    is_self = jnp.arange(window) == root_rows + s * k + jnp.arange(k)[:, None]
    is_own = jnp.arange(level.paths.shape[2]) == s
    following = Level(
        tokens=chosen,
        weights=best_weights,
        parents=rows * k + parent,
        numbers=numbers,
        paths=jnp.where(is_own, chosen[:, :, None], level.paths[rows, parent]),
        sees=level.sees[rows, parent] | is_self,
    )
    return parents, weights, following


def kernel_next_level(
    kernels: Kernels,
    level: Level,
    tokens: Int[jax.Array, "B k k"],
    edges: Float[jax.Array, "B k k"],
    s: Int[jax.Array, ""] | int,
    root_rows: int,
) -> tuple[Int[jax.Array, "B kk"], Float[jax.Array, "B kk"], Level]:
    given = (tokens, edges, level.numbers, level.weights, level.paths, level.sees)
    parents, weights, *level_arrays = kernels.draft_tree.next_level(
        *given, jnp.asarray(s, jnp.int32), root_rows
    )
    return parents, weights, Level(*level_arrays)


next_level = kernel_or_reference(kernel_next_level, plain_next_level)


Kept = tuple[
    Int[jax.Array, "B N"],
    Int[jax.Array, "B N"],
    Int[jax.Array, " B"],
    Float[jax.Array, "B N"],
]
"""Tokens, parents, node counts and path weights of the kept trees."""


def plain_keep_best(
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B C"],
    weights: Float[jax.Array, "B C"],
    parents: Int[jax.Array, "B C"],
    max_drafts: Int[jax.Array, " B"],
    has_relay: Bool[jax.Array, " B"],
    nodes: int,
) -> Kept:
    """Builds each request's tree from its best candidates."""
    B, C = tokens.shape
    num_drafts = jnp.where(has_relay, jnp.clip(max_drafts, 0, min(nodes - 1, C)), 0)
    ranked, rows = best(weights, C), jnp.arange(B)[:, None]
    kept = jnp.zeros((B, C), bool).at[rows, ranked].set(jnp.arange(C) < num_drafts[:, None])
    node_of = jnp.pad(jnp.cumsum(kept, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))  # by number
    # Kept candidates in ascending order, then all others: C - i is positive for all.
    ascending = jnp.where(kept, 2 * C, C) - jnp.arange(C)
    order = lax.top_k(ascending, nodes - 1)[1]
    is_real = jnp.arange(nodes - 1) < num_drafts[:, None]
    kept_tokens = jnp.where(is_real, jnp.take_along_axis(tokens, order, axis=1), 0)
    kept_parents = jnp.take_along_axis(parents, order, axis=1)
    kept_parents = jnp.where(is_real, jnp.take_along_axis(node_of, kept_parents, axis=1), 0)
    kept_weights = jnp.where(is_real, jnp.take_along_axis(weights, order, axis=1), 0)
    return (
        jnp.concatenate([newest[:, None], kept_tokens], axis=1),
        jnp.pad(kept_parents, ((0, 0), (1, 0))),
        1 + num_drafts,
        jnp.pad(kept_weights, ((0, 0), (1, 0))),
    )


def kernel_keep_best(
    kernels: Kernels,
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B C"],
    weights: Float[jax.Array, "B C"],
    parents: Int[jax.Array, "B C"],
    max_drafts: Int[jax.Array, " B"],
    has_relay: Bool[jax.Array, " B"],
    nodes: int,
) -> Kept:
    return kernels.draft_tree.keep_best(
        newest, tokens, weights, parents, max_drafts, has_relay, nodes
    )


keep_best = kernel_or_reference(kernel_keep_best, plain_keep_best)


def plain_chains(
    drafts: Int[jax.Array, "B S"],
    newest: Int[jax.Array, " B"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Builds chains of the first `max_drafts` drafts of each request; empty without `can_draft`."""
    S = drafts.shape[1]
    num_drafts = jnp.where(can_draft, jnp.clip(max_drafts, 0, S), 0)
    slot = jnp.arange(S, dtype=jnp.int32)
    is_real = slot < num_drafts[:, None]
    tokens = jnp.concatenate([newest[:, None], jnp.where(is_real, drafts, 0)], axis=1)
    parents = jnp.pad(jnp.where(is_real, slot, 0), ((0, 0), (1, 0)))
    return tokens, parents, (1 + num_drafts).astype(jnp.int32)


def kernel_chains(
    kernels: Kernels,
    drafts: Int[jax.Array, "B S"],
    newest: Int[jax.Array, " B"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    return kernels.draft_tree.chains(drafts, newest, max_drafts, can_draft)


chains = kernel_or_reference(kernel_chains, plain_chains)


def flatten(
    num_nodes: Int[jax.Array, " B"], rows: int
) -> tuple[
    Int[jax.Array, " B1"], Int[jax.Array, " R"], Int[jax.Array, " R"], Bool[jax.Array, " R"]
]:
    """Assigns the valid nodes of all requests to R consecutive verify rows.

    Returns `row_starts`, the request and node of each row (0, 0 for padding), and the valid rows.
    """
    row_starts = jnp.pad(jnp.cumsum(num_nodes, dtype=jnp.int32), (1, 0))
    row = jnp.arange(rows, dtype=jnp.int32)
    is_real = row < row_starts[-1]
    before = (row[:, None] >= row_starts[None, 1:]).sum(axis=1, dtype=jnp.int32)
    request = jnp.where(is_real, before, 0)
    node = jnp.where(is_real, row - row_starts[request], 0)
    return row_starts, request, node, is_real


def flat_rows(
    row_starts: Int[jax.Array, " B1"], num_nodes: Int[jax.Array, " B"], nodes: int
) -> Int[jax.Array, "B N"]:
    """Returns the flat row of each node; a padding node has its request's root."""
    node = jnp.arange(nodes, dtype=jnp.int32)
    return row_starts[:-1, None] + jnp.where(node < num_nodes[:, None], node, 0)
