"""Clustered LM head; same as `shared.spec.token_clusters`."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.ops.gemm.linear import Matrix, product_float32


@dataclass(frozen=True)
class TokenClusters:
    """Clusters of the tokens of an LM head, or of this rank's shard of it."""

    centroids: Matrix
    of_tokens: Int[Tensor, " share"]
    top_k: int


def kept(
    logits: Float[Tensor, "R share"], rows: Float[Tensor, "R hidden"], clusters: TokenClusters
) -> Float[Tensor, "R share"]:
    """Same as the specification, for this rank's shard of the logits."""
    scores = product_float32(rows, clusters.centroids)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : clusters.top_k]
    is_best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    return logits.masked_fill(~is_best[:, clusters.of_tokens], -torch.inf)
