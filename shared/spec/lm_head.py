"""LM head with fused sampling epilogue: product with the vocabulary and choice of tokens as one
operation.

By definition the result is the choice from the logits. An implementation that fuses both need not
store the logits: each block of LM-head outputs writes its best token and, for rows with a
temperature, the partial sums of its groups, as `vocabulary` defines for any shard. Greedy rows need
only the best token of each block. A TP rank's shard of the LM head sends the same partial results
to the other ranks, with ids offset by the shard's first token.

Children of draft nodes are ranked in the same way, with their weights: the top k tokens of a row
are in the k groups with the highest peaks, and the log-sum-exp follows from the sums of the groups.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import layers, linear, sampling, token_clusters
from shared.spec.linear import Matrix
from shared.spec.sampling import RankedCandidates, SampledTokens, Sampling, TokenCounts
from shared.spec.token_clusters import TokenClusters


@dataclass(frozen=True)
class Projection:
    """Hidden states and an LM head, before their product.

    Attributes:
      rows: Hidden states.
      weight: LM head, one row per token.
      factor: Multiplier of the logits.
      softcap: Soft cap of the logits; None for none.
      clusters: Clusters of the tokens; logits outside of a row's best clusters are -inf. None for
        all logits.
    """

    rows: Float[np.ndarray, "R hidden"]
    weight: Matrix
    factor: float = 1.0
    softcap: float | None = None
    clusters: TokenClusters | None = None


def scores(projection: Projection) -> Float[np.ndarray, "R vocab"]:
    """Computes all logits in float32."""
    found = linear.product_float32(projection.rows, projection.weight, projection.factor)
    if projection.softcap is not None:
        found = layers.softcap(found, projection.softcap)
    if projection.clusters is None:
        return found
    return token_clusters.kept(found, projection.rows, projection.clusters)


def needs_logits(
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    params: Sampling,
    request: Int[np.ndarray, " R"],
) -> Bool[np.ndarray, " R"]:
    """Returns True for rows that need more than the argmax: noise, penalties, biases, or a minimum
    length.

    Args:
      seen, positions, params, request: See `sampling.choose`.
    """
    asks = (params.temperature > 0) | (params.repetition != 1)
    asks |= (params.presence != 0) | (params.frequency != 0)
    asks |= (params.bias_values != 0).any(axis=1)
    return asks[request] | (positions < params.min_length[request])


def fused_choose(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    params: Sampling,
    request: Int[np.ndarray, " R"],
) -> SampledTokens:
    """Same as `choose` without a mask; GPU backends fuse it and do not store logits."""
    return choose(projection, seen, positions, params, request, None)


def choose(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    params: Sampling,
    request: Int[np.ndarray, " R"],
    allowed: Bool[np.ndarray, "R vocab"] | None,
) -> SampledTokens:
    """Returns the target's token of each row; for the arguments see `sampling.choose`."""
    return sampling.choose(scores(projection), seen, positions, params, request, allowed)


def fused_rank(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[np.ndarray, "B ..."],
    params: Sampling,
    keys: Int[np.ndarray, "B ..."],
    stream: int,
    width: int,
    columns: Int[np.ndarray, " vocab"] | None,
) -> RankedCandidates:
    """Same as `rank` for draft tokens that are not sampled; GPU backends fuse it and do not store
    logits.
    """
    return rank(projection, seen, positions, params, keys, stream, width, False, columns)


def rank(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[np.ndarray, "B ..."],
    params: Sampling,
    keys: Int[np.ndarray, "B ..."],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[np.ndarray, " vocab"] | None,
) -> RankedCandidates:
    """Returns the best children of nodes, of which each request has the same number; see
    `sampling.rank`.
    """
    logits = scores(projection)
    by_node = logits.reshape(len(positions), -1, logits.shape[1])
    return sampling.rank(by_node, seen, positions, params, keys, stream, width, is_sampled, columns)
