"""Best prefixes: the draft tree of a block head; same as `shared.spec.best_prefixes`.

On a GPU a kernel grows the tree of each request; see `torch_impl.ops`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops import Kernels, kernel_or_reference
from torch_impl.ops.trees.draft_tree import Kept

NONE = -torch.inf


def plain_grow(
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B S P K"],
    edges: Float[Tensor, "B S P K"],
    lists: Int[Tensor, "B S P K"] | None,
    branch_calibration: Float[Tensor, "B S_max"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
    nodes: int,
) -> Kept:
    """Same as the specification; open prefixes are lanes."""
    (B, S, P, K), device = edges.shape, edges.device
    flat = torch.where(edges > NONE, edges, NONE).flatten(1)
    row, last = torch.arange(B, device=device), S * P * K - 1
    key, above = flat.new_full((B, nodes), NONE), flat.new_zeros(B, nodes)
    key[:, 0] = flat[:, 0]
    parent, slot, number = (torch.zeros_like(key, dtype=torch.int64) for _ in range(3))
    slots, parents = torch.zeros_like(slot), torch.zeros_like(slot)
    weights = torch.zeros_like(key)
    is_off, is_real = (torch.zeros_like(key, dtype=torch.bool) for _ in range(2))

    def edge_weight(slot: Int[Tensor, " B"], is_off: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
        slot = slot.clamp(max=last)
        depth = torch.div(slot, P * K, rounding_mode="floor")
        return flat[row, slot] + torch.where(is_off, branch_calibration[row, depth], 0)

    for node in range(1, nodes):
        weight = key.amax(dim=1)
        at = torch.where(key == weight[:, None], number, 2 * nodes).argmin(dim=1)
        is_open, of, base = weight > NONE, parent[row, at], above[row, at]
        own = slot[row, at].clamp(max=last)  # of a closed tree it may be past the end
        slots[:, node], parents[:, node], weights[:, node] = own, of, weight
        is_real[:, node] = is_open
        beside, begin = own + 1, (torch.div(own, P * K, rounding_mode="floor") + 1) * P * K
        if lists is not None:
            begin = begin + K * lists.flatten(1)[row, own]
        own_off = is_off[row, at]
        child_off = own_off | (own % K > 0)
        sibling = base + edge_weight(beside, own_off)
        child = weight + edge_weight(begin, child_off)
        key[row, at] = torch.where(is_open & (beside % K > 0), sibling, NONE)
        key[:, node] = torch.where(is_open & (begin <= last), child, NONE)
        slot[row, at], number[row, at] = beside, 2 * node - 1
        slot[:, node], number[:, node] = begin, 2 * node
        parent[:, node], above[:, node], is_off[:, node] = node, weight, child_off
    count = torch.where(can_draft, max_drafts.clamp(0, nodes - 1), 0)
    is_real &= torch.arange(nodes, device=device) <= count[:, None]
    found = torch.where(is_real, tokens.flatten(1).gather(1, slots), 0)
    found[:, 0] = newest
    return (
        found.int(),
        torch.where(is_real, parents, 0).int(),
        1 + is_real.sum(dim=1, dtype=torch.int32),
        torch.where(is_real, weights, 0),
    )


def kernel_grow(
    kernels: Kernels,
    newest: Int[Tensor, " B"],
    tokens: Int[Tensor, "B S P K"],
    edges: Float[Tensor, "B S P K"],
    lists: Int[Tensor, "B S P K"] | None,
    branch_calibration: Float[Tensor, "B S_max"],
    max_drafts: Int[Tensor, " B"],
    can_draft: Bool[Tensor, " B"],
    nodes: int,
) -> Kept:
    return kernels.best_prefixes.grow(
        newest, tokens, edges, lists, branch_calibration, max_drafts, can_draft, nodes
    )


grow = kernel_or_reference(kernel_grow, plain_grow)
