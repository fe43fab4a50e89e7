"""The projection of rows onto the vocabulary, and the choice from its scores as one operation.

By definition the choice is that from the scores. Whoever has both before it can leave the scores
out: each block of the head's outputs leaves the best of its tokens and, where there is a
temperature, what its groups hold, as `vocabulary` says of any part. A row that asks for nothing but
its best token is chosen from what the blocks leave. A rank's part of the head leaves the same to
the other ranks, whose ids begin where its own tokens do.

Children of a draft's nodes are ranked so too, with their weights: the best k tokens of a row are
among the k groups with the best peaks, and how likely all tokens are follows from what groups hold.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import linear, sampling
from shared.spec.linear import Matrix
from shared.spec.sampling import Chosen, Ranked, Sampling, Seen


@dataclass(frozen=True)
class Projection:
    """Rows and the head that scores tokens by them, not multiplied yet.

    Attributes:
      weight: A row for each token.
      factor: What scores are multiplied by.
    """

    rows: Float[np.ndarray, "R hidden"]
    weight: Matrix
    factor: float = 1.0


def scores(projection: Projection) -> Float[np.ndarray, "R vocab"]:
    """The scores of all tokens, float32."""
    return linear.product_float32(projection.rows, projection.weight, projection.factor)


def asking(
    seen: Seen, positions: Int[np.ndarray, " R"], params: Sampling, request: Int[np.ndarray, " R"]
) -> Bool[np.ndarray, " R"]:
    """Rows that ask for more than the best of their scores: noise, penalties, biases, no end yet.

    Args:
      seen, positions, params, request: As of `sampling.choose`.
    """
    asks = (params.temperature > 0) | (params.repetition != 1)
    asks |= (params.presence != 0) | (params.frequency != 0)
    asks |= (params.bias_values != 0).any(axis=1)
    return asks[request] | (positions < params.min_length[request])


def joined(
    projection: Projection,
    seen: Seen,
    positions: Int[np.ndarray, " R"],
    params: Sampling,
    request: Int[np.ndarray, " R"],
) -> Chosen:
    """As `choose` without a mask; what backends make of it on a GPU leaves scores out."""
    return choose(projection, seen, positions, params, request, None)


def choose(
    projection: Projection,
    seen: Seen,
    positions: Int[np.ndarray, " R"],
    params: Sampling,
    request: Int[np.ndarray, " R"],
    allowed: Bool[np.ndarray, "R vocab"] | None,
) -> Chosen:
    """The target's token of each row; arguments as of `sampling.choose`."""
    return sampling.choose(scores(projection), seen, positions, params, request, allowed)


def ranked(
    projection: Projection,
    seen: Seen,
    positions: Int[np.ndarray, " B"],
    params: Sampling,
    keys: Int[np.ndarray, " B"],
    stream: int,
    width: int,
    columns: Int[np.ndarray, " vocab"] | None,
) -> Ranked:
    """As `rank`, of drafts that are not sampled; on a GPU backends leave scores out."""
    return rank(projection, seen, positions, params, keys, stream, width, False, columns)


def rank(
    projection: Projection,
    seen: Seen,
    positions: Int[np.ndarray, " B"],
    params: Sampling,
    keys: Int[np.ndarray, " B"],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[np.ndarray, " vocab"] | None,
) -> Ranked:
    """The best children of nodes, of which each request has as many; arguments as there."""
    logits = scores(projection)
    by_node = logits.reshape(len(positions), -1, logits.shape[1])
    how = (keys, stream, width, is_sampled, columns)
    return sampling.rank(by_node, seen, positions, params, *how)
