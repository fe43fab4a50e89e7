"""Merged draft trees: n-gram drafts in a drafter's tree; same as `shared.spec.merge_drafts`."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops.trees import draft_tree, verify_budget


@dataclass(frozen=True)
class NgramTrees:
    """N-gram draft trees from the host; same fields as in the specification."""

    tokens: Int[Tensor, "B M"]
    parents: Int[Tensor, "B M"]
    num_nodes: Int[Tensor, " B"]
    weights: Float[Tensor, "B M"]
    at: Int[Tensor, " B"]


@dataclass(frozen=True)
class DraftedTrees:
    """Draft trees of a drafter; same fields as in the specification."""

    tokens: Int[Tensor, "B D"]
    parents: Int[Tensor, "B D"]
    num_nodes: Int[Tensor, " B"]
    weights: Float[Tensor, "B D"]


@dataclass(frozen=True)
class MergedTrees:
    """Merged draft trees; same fields as in the specification."""

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]
    drafted: Bool[Tensor, "B N"]
    copied: Int[Tensor, "B N"]


@dataclass(frozen=True)
class _Below:
    """N-gram drafts below the aligned node.

    Attributes:
      root: Aligned node; M if there is none.
      has: True for nodes below it within the depth limit.
      is_above: True if node j is node i or between node i and the root.
      weights: Path weights from the root.
    """

    root: Int[Tensor, " B"]
    has: Bool[Tensor, "B M"]
    is_above: Bool[Tensor, "B M M"]
    weights: Float[Tensor, "B M"]


def align_to_newest(
    copies: NgramTrees, newest: Int[Tensor, " B"], lengths: Int[Tensor, " B"]
) -> Int[Tensor, " B"]:
    M = copies.tokens.shape[1]
    node = torch.arange(M, dtype=torch.int32, device=newest.device)
    found = draft_tree.depths(copies.parents) == (lengths - copies.at)[:, None]
    found &= node < copies.num_nodes[:, None]
    found &= (copies.tokens == newest[:, None]) | (node == 0)
    return torch.where(found, node, M).amin(dim=1)


def merge(
    grown: DraftedTrees,
    copies: NgramTrees,
    lengths: Int[Tensor, " B"],
    max_drafts: Int[Tensor, " B"],
    nodes: int,
    depth: int,
    rows: int,
) -> MergedTrees:
    (B, D), M, device = grown.tokens.shape, copies.tokens.shape[1], lengths.device
    node = torch.arange(D, dtype=torch.int32, device=device)
    below = _below(grown, copies, lengths, depth)
    is_draft = (node > 0) & (node < grown.num_nodes[:, None]) & (grown.weights > -torch.inf)
    same = _same(grown, copies, is_draft, below)  # [B, drafter nodes, n-gram nodes]
    is_both, is_twin = same.any(dim=2), same.any(dim=1)
    of_copy = torch.where(same, below.weights[:, None, :], -torch.inf).amax(dim=2)
    of_draft = torch.where(same, grown.weights[:, :, None], -torch.inf).amax(dim=1)
    above_draft = draft_tree.ancestors(grown.parents) & (node > 0)
    by_draft = grown.weights + _raise(above_draft, is_both, of_copy - grown.weights)
    by_copy = below.weights + _raise(below.is_above, is_twin, of_draft - below.weights)
    shared = torch.where(same, by_copy[:, None, :], -torch.inf).amax(dim=2)
    weights = [
        torch.where(is_draft, torch.maximum(by_draft, shared), -torch.inf),
        torch.where(below.has & ~is_twin, by_copy, -torch.inf),
    ]
    weights = torch.cat(weights, dim=1)
    number = torch.arange(M, dtype=torch.int32, device=device)
    twin = torch.where(same, node[:, None], 0).amax(dim=1)
    number_of = torch.where(is_twin, twin, D + number)
    number_of = torch.where(number == below.root[:, None], 0, number_of)
    parents = torch.cat([grown.parents, number_of.gather(1, copies.parents.long())], dim=1)
    is_candidate = weights[:, 1:] > -torch.inf
    most = torch.minimum(max_drafts, is_candidate.sum(dim=1)).int()
    chosen, joined_parents, num_nodes, kept_weights = draft_tree.keep_best(
        newest=torch.zeros_like(most),
        tokens=torch.arange(1, D + M, dtype=torch.int32, device=device).repeat(B, 1),
        weights=weights[:, 1:].contiguous(),
        parents=torch.where(is_candidate, parents[:, 1:], 0),
        max_drafts=most,
        has_relay=most > 0,
        nodes=nodes,
    )
    if rows < B * nodes:
        chosen, joined_parents, num_nodes = verify_budget.prune_to_budget(
            chosen, joined_parents, num_nodes, kept_weights, rows
        )
    of_drafts = torch.where(same, number, 0).amax(dim=2)
    places, is_node = chosen.long(), chosen > 0
    tokens = torch.cat([grown.tokens, copies.tokens], dim=1).gather(1, places)
    copied = torch.cat([of_drafts, number.expand(B, M)], dim=1).gather(1, places)
    is_root = torch.arange(nodes, device=device) == 0
    return MergedTrees(
        tokens=torch.where(is_node | is_root, tokens, 0),
        parents=joined_parents,
        num_nodes=num_nodes,
        drafted=is_node & (chosen < D),
        copied=torch.where(is_node, copied, 0),
    )


def _below(
    grown: DraftedTrees, copies: NgramTrees, lengths: Int[Tensor, " B"], depth: int
) -> _Below:
    M, root = copies.tokens.shape[1], align_to_newest(copies, grown.tokens[:, 0], lengths)
    node = torch.arange(M, dtype=torch.int32, device=lengths.device)
    place, is_root = root.clamp(max=M - 1).long()[:, None], node == root[:, None]
    ancestors = draft_tree.ancestors(copies.parents)
    level = ancestors.sum(dim=2, dtype=torch.int32)
    has = (ancestors & is_root[:, None, :]).any(dim=2) & ~is_root
    has &= (node < copies.num_nodes[:, None]) & (level - level.gather(1, place) <= depth)
    weights = copies.weights - copies.weights.gather(1, place)
    return _Below(root, has, ancestors & has[:, None, :], weights)


def _same(
    grown: DraftedTrees, copies: NgramTrees, is_draft: Bool[Tensor, "B D"], below: _Below
) -> Bool[Tensor, "B D M"]:
    """Returns True for pairs of drafter and n-gram nodes whose paths have the same tokens."""
    (B, D), M, device = grown.tokens.shape, copies.tokens.shape[1], grown.tokens.device
    draft, copy = torch.arange(D, device=device), torch.arange(M, device=device)
    is_root = copy == below.root[:, None]
    both = is_draft[:, :, None] & below.has[:, None, :]
    both &= grown.tokens[:, :, None] == copies.tokens[:, None, :]
    agrees = both | ((draft == 0)[:, None] & is_root[:, None, :])
    up_draft, up_copy = grown.parents.long(), torch.where(is_root, copy, copies.parents.long())
    row = torch.arange(B, device=device)[:, None, None]
    for _ in range(max(D - 1, 1).bit_length()):  # each round doubles the distance covered
        agrees = agrees & agrees[row, up_draft[:, :, None], up_copy[:, None, :]]
        up_draft, up_copy = up_draft.gather(1, up_draft), up_copy.gather(1, up_copy)
    return agrees & both


def _raise(
    is_above: Bool[Tensor, "B n n"], is_shared: Bool[Tensor, "B n"], more: Float[Tensor, "B n"]
) -> Float[Tensor, "B n"]:
    """Returns the largest excess of the other source's weight over a node's own on its path."""
    counts = is_above & is_shared[:, None, :]
    return torch.where(counts, more[:, None, :], 0).amax(dim=2)
