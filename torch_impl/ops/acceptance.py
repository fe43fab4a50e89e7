"""As `shared.spec.acceptance`, in torch."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def force(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    forced: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, " B"]]:
    """As the specification."""
    following = torch.cat([tokens[:, 1:], choices[:, -1:]], dim=1)
    forces = forced & (num_nodes > 1)
    return torch.where(forces[:, None], following, choices), num_nodes - forces.int()


def walk(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    depth: int,
) -> tuple[Int[Tensor, "B W"], Int[Tensor, " B"]]:
    """As the specification."""
    number = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    is_draft = (number > 0) & (number < num_nodes[:, None])
    node, counts = torch.zeros_like(num_nodes), torch.ones_like(num_nodes)
    path = [node]
    for _ in range(depth):
        wanted = choices.gather(1, node[:, None].long())
        is_next = (parents == node[:, None]) & (tokens == wanted) & is_draft
        found = is_next.any(dim=1)
        node = torch.where(found, is_next.int().argmax(dim=1).int(), node)
        path.append(node)
        counts = counts + found.int()
    return torch.stack(path, dim=1), counts


def emitted(
    choices: Int[Tensor, "B N"], path: Int[Tensor, "B W"], counts: Int[Tensor, " B"]
) -> Int[Tensor, "B W"]:
    """As the specification."""
    place = torch.arange(path.shape[1], device=path.device)
    return torch.where(place < counts[:, None], choices.gather(1, path.long()), 0).int()


def failed(is_nan: Bool[Tensor, "B N"], path: Int[Tensor, "B W"]) -> Bool[Tensor, " B"]:
    """As the specification."""
    return is_nan.gather(1, path.long()).any(dim=1)
