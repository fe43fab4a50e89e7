"""Clustered LM head: of each row, only the tokens in the best clusters have logits.

A row is scored against the centroid of each cluster. Tokens outside of the best clusters have the
logit -inf, so their draft probability is 0, and rejection sampling keeps the target's distribution.

Source: Gemma 4 assistants ("ordered embeddings" in transformers).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.spec import linear
from shared.spec.linear import Matrix
from shared.spec.sampling import top_candidates


@dataclass(frozen=True)
class TokenClusters:
    """Clusters of the tokens of an LM head.

    Attributes:
      centroids: Centroid of each cluster.
      of_tokens: Cluster of each token.
      top_k: Number of clusters that a row selects; ties go to the lower cluster.
    """

    centroids: Matrix
    of_tokens: Int[np.ndarray, " vocab"]
    top_k: int


def kept(
    logits: Float[np.ndarray, "R vocab"],
    rows: Float[np.ndarray, "R hidden"],
    clusters: TokenClusters,
) -> Float[np.ndarray, "R vocab"]:
    """Returns the logits of the tokens in each row's best clusters, and -inf for other tokens.

    Args:
      logits: Logits of all tokens.
      rows: Inputs of the LM head.
      clusters: Clusters of the tokens.
    """
    scores = linear.product_float32(rows, clusters.centroids)
    is_best = np.zeros(scores.shape, bool)
    np.put_along_axis(is_best, top_candidates(scores, clusters.top_k), True, axis=1)
    return np.where(is_best[:, clusters.of_tokens], logits, np.float32(-np.inf))
