"""Verify budget: prunes the trees of a batch; same as `shared.spec.verify_budget`.

On a GPU both operations are kernels; see `torch_impl.ops`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.ops import Kernels, kernel_or_reference
from torch_impl.ops.trees import draft_tree


def chain_weights(edges: Float[Tensor, "B S"]) -> Float[Tensor, "B N"]:
    sums = [torch.zeros_like(edges[:, 0])]
    for edge in edges.unbind(dim=1):  # `cumsum` would add in double precision
        sums.append(sums[-1] + edge)
    return torch.stack(sums, dim=1)


def plain_log_acceptance(
    parents: Int[Tensor, "B N"],
    weights: Float[Tensor, "B N"],
    calibration: Float[Tensor, "B S_max"],
) -> Float[Tensor, "B N"]:
    ancestors = draft_tree.ancestors(parents)
    level = ancestors.sum(dim=2) - 2  # calibration index, not read for the root
    node_weights = weights + calibration.gather(1, level.clamp(min=0))
    node_weights = torch.where(node_weights > -torch.inf, node_weights, -torch.inf)
    is_above = ancestors & (torch.arange(parents.shape[1], device=parents.device) > 0)
    return torch.where(is_above, node_weights[:, None, :], 0).amin(dim=2)


def kernel_log_acceptance(
    kernels: Kernels,
    parents: Int[Tensor, "B N"],
    weights: Float[Tensor, "B N"],
    calibration: Float[Tensor, "B S_max"],
) -> Float[Tensor, "B N"]:
    return kernels.verify_budget.log_acceptance(parents, weights, calibration)


log_acceptance = kernel_or_reference(kernel_log_acceptance, plain_log_acceptance)


def plain_prune_to_budget(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    rank_weights: Float[Tensor, "B N"],
    rows: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    (B, N), node = tokens.shape, torch.arange(tokens.shape[1], device=tokens.device)
    is_draft = (node > 0) & (node < num_nodes[:, None])
    weight, number = rank_weights.flatten(), torch.arange(B * N, device=tokens.device)
    is_before = (weight == weight[:, None]) & (number < number[:, None])
    is_before |= weight > weight[:, None]
    before = (is_before & is_draft.flatten()).sum(dim=1).view(B, N)
    kept = (is_draft & (before < rows - B)) | (node == 0)
    place_of = kept.cumsum(dim=1, dtype=torch.int32) - 1
    is_at = kept[:, None, :] & (place_of[:, None, :] == node[:, None])  # by new and old place
    new_parents = place_of.gather(1, parents.long())
    return (
        torch.where(is_at, tokens[:, None, :], 0).sum(dim=2, dtype=torch.int32),
        torch.where(is_at, new_parents[:, None, :], 0).sum(dim=2, dtype=torch.int32),
        kept.sum(dim=1, dtype=torch.int32),
    )


def kernel_prune_to_budget(
    kernels: Kernels,
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    rank_weights: Float[Tensor, "B N"],
    rows: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"]]:
    return kernels.verify_budget.prune_to_budget(tokens, parents, num_nodes, rank_weights, rows)


prune_to_budget = kernel_or_reference(kernel_prune_to_budget, plain_prune_to_budget)
