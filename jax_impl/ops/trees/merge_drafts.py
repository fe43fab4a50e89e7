"""Merged draft trees: n-gram drafts in a drafter's tree; same as `shared.spec.merge_drafts`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.ops.trees import draft_tree, verify_budget


class NgramTrees(NamedTuple):
    """N-gram draft trees from the host; same fields as in the specification."""

    tokens: Int[jax.Array, "B M"]
    parents: Int[jax.Array, "B M"]
    num_nodes: Int[jax.Array, " B"]
    weights: Float[jax.Array, "B M"]
    at: Int[jax.Array, " B"]


class DraftedTrees(NamedTuple):
    """Draft trees of a drafter; same fields as in the specification."""

    tokens: Int[jax.Array, "B D"]
    parents: Int[jax.Array, "B D"]
    num_nodes: Int[jax.Array, " B"]
    weights: Float[jax.Array, "B D"]


class MergedTrees(NamedTuple):
    """Merged draft trees; same fields as in the specification."""

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    drafted: Bool[jax.Array, "B N"]
    copied: Int[jax.Array, "B N"]


class _Below(NamedTuple):
    """N-gram drafts below the aligned node.

    Attributes:
      root: Aligned node; M if there is none.
      has: True for nodes below it within the depth limit.
      is_above: True if node j is node i or between node i and the root.
      weights: Path weights from the root.
    """

    root: Int[jax.Array, " B"]
    has: Bool[jax.Array, "B M"]
    is_above: Bool[jax.Array, "B M M"]
    weights: Float[jax.Array, "B M"]


def align_to_newest(
    copies: NgramTrees, newest: Int[jax.Array, " B"], lengths: Int[jax.Array, " B"]
) -> Int[jax.Array, " B"]:
    """Returns the n-gram tree node aligned with the newest token, or M if there is none."""
    M = copies.tokens.shape[1]
    node, depths = jnp.arange(M, dtype=jnp.int32), draft_tree.depths(copies.parents)
    found = (depths == (lengths - copies.at)[:, None]) & (node < copies.num_nodes[:, None])
    found &= (copies.tokens == newest[:, None]) | (node == 0)
    return jnp.where(found, node, M).min(axis=1)


def merge(
    grown: DraftedTrees,
    copies: NgramTrees,
    lengths: Int[jax.Array, " B"],
    max_drafts: Int[jax.Array, " B"],
    nodes: int,
    depth: int,
    rows: int,
) -> MergedTrees:
    """Merges n-gram drafts into the drafter's trees and keeps the best nodes of both."""
    (B, D), M = grown.tokens.shape, copies.tokens.shape[1]
    node, below = jnp.arange(D, dtype=jnp.int32), _below(grown, copies, lengths, depth)
    is_draft = (node > 0) & (node < grown.num_nodes[:, None]) & (grown.weights > -jnp.inf)
    same = _same(grown, copies, is_draft, below)  # [B, drafter nodes, n-gram nodes]
    is_both, twin = same.any(axis=2), jnp.argmax(same, axis=1).astype(jnp.int32)
    is_twin = same.any(axis=1)
    of_copy = jnp.where(same, below.weights[:, None, :], -jnp.inf).max(axis=2)
    of_draft = jnp.where(same, grown.weights[:, :, None], -jnp.inf).max(axis=1)
    above_draft = draft_tree.ancestors(grown.parents) & (node > 0)
    by_draft = grown.weights + _raise(above_draft, is_both, of_copy - grown.weights)
    by_copy = below.weights + _raise(below.is_above, is_twin, of_draft - below.weights)
    shared = jnp.where(same, by_copy[:, None, :], -jnp.inf).max(axis=2)
    weights = [
        jnp.where(is_draft, jnp.maximum(by_draft, shared), -jnp.inf),
        jnp.where(below.has & ~is_twin, by_copy, -jnp.inf),
    ]
    weights = jnp.concatenate(weights, axis=1)
    number = jnp.arange(M, dtype=jnp.int32)
    number_of = jnp.where(is_twin, twin, D + number)
    number_of = jnp.where(number == below.root[:, None], 0, number_of)
    parents = [grown.parents, jnp.take_along_axis(number_of, copies.parents, axis=1)]
    parents = jnp.concatenate(parents, axis=1)
    is_candidate = weights[:, 1:] > -jnp.inf
    most = jnp.minimum(max_drafts, is_candidate.sum(axis=1, dtype=jnp.int32))
    chosen, joined_parents, num_nodes, kept_weights = draft_tree.keep_best(
        newest=jnp.zeros(B, jnp.int32),
        tokens=jnp.tile(jnp.arange(1, D + M, dtype=jnp.int32), (B, 1)),
        weights=weights[:, 1:],
        parents=jnp.where(is_candidate, parents[:, 1:], 0),
        max_drafts=most,
        has_relay=most > 0,
        nodes=nodes,
    )
    if rows < B * nodes:
        chosen, joined_parents, num_nodes = verify_budget.prune_to_budget(
            chosen, joined_parents, num_nodes, kept_weights, rows
        )
    of_drafts = jnp.where(same, number, 0).sum(axis=2, dtype=jnp.int32)
    of_copies = jnp.broadcast_to(number, (B, M))

    def taken(of_draft: jax.Array, of_copy: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.concatenate([of_draft, of_copy], axis=1), chosen, axis=1)

    tokens = taken(grown.tokens, copies.tokens)
    return MergedTrees(
        tokens=jnp.where((chosen > 0) | (jnp.arange(nodes) == 0), tokens, 0),
        parents=joined_parents,
        num_nodes=num_nodes,
        drafted=(chosen > 0) & (chosen < D),
        copied=jnp.where(chosen > 0, taken(of_drafts, of_copies), 0),
    )


def _below(
    grown: DraftedTrees, copies: NgramTrees, lengths: Int[jax.Array, " B"], depth: int
) -> _Below:
    M = copies.tokens.shape[1]
    node, root = (
        jnp.arange(M, dtype=jnp.int32),
        align_to_newest(copies, grown.tokens[:, 0], lengths),
    )
    place, ancestors = jnp.minimum(root, M - 1)[:, None], draft_tree.ancestors(copies.parents)
    is_root = node == root[:, None]
    level = ancestors.sum(axis=2, dtype=jnp.int32) - 1
    level -= jnp.take_along_axis(level, place, axis=1)
    has = (ancestors & is_root[:, None, :]).any(axis=2) & ~is_root
    has &= (node < copies.num_nodes[:, None]) & (level <= depth)
    weights = copies.weights - jnp.take_along_axis(copies.weights, place, axis=1)
    return _Below(root, has, ancestors & has[:, None, :], weights)


def _same(
    grown: DraftedTrees, copies: NgramTrees, is_draft: Bool[jax.Array, "B D"], below: _Below
) -> Bool[jax.Array, "B D M"]:
    """Returns True for pairs of drafter and n-gram nodes whose paths have the same tokens."""
    (B, D), M = grown.tokens.shape, copies.tokens.shape[1]
    draft, copy = jnp.arange(D, dtype=jnp.int32), jnp.arange(M, dtype=jnp.int32)
    is_root = (draft == 0)[:, None] & (copy == below.root[:, None])[:, None, :]
    both = is_draft[:, :, None] & below.has[:, None, :]
    both &= grown.tokens[:, :, None] == copies.tokens[:, None, :]
    agrees = both | is_root
    up_draft, up_copy = grown.parents, copies.parents
    up_copy = jnp.where(copy == below.root[:, None], copy, up_copy)
    row = jnp.arange(B)[:, None, None]
    for _ in range(max(D - 1, 1).bit_length()):  # each round doubles the distance covered
        agrees &= agrees[row, up_draft[:, :, None], up_copy[:, None, :]]
        up_draft = jnp.take_along_axis(up_draft, up_draft, axis=1)
        up_copy = jnp.take_along_axis(up_copy, up_copy, axis=1)
    return agrees & both


def _raise(
    is_above: Bool[jax.Array, "B n n"],
    is_shared: Bool[jax.Array, "B n"],
    more: Float[jax.Array, "B n"],
) -> Float[jax.Array, "B n"]:
    """Returns the largest excess of the other source's weight over a node's own on its path."""
    counts = is_above & is_shared[:, None, :]
    return jnp.where(counts, more[:, None, :], 0).max(axis=2)
