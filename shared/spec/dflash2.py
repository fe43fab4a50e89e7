"""DFlash2: DFlash's block with convolutions, of which each draft is selected by the one before it.

The block is filled in one pass, as of DFlash, and a convolution along its rows stands before and
behind each part of a layer (`shared.spec.convolution`). The best tokens of a slot are candidates.
The drafts are selected one after the other: a candidate's score is its own and that of the pair
that it makes with the draft before, as the slot's hidden state weighs the few numbers of a pair. So
the choices wait for each other, but each looks at a few tokens.
"""

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.config import DraftConfig
from shared.spec import layers
from shared.spec.eagle import HeadWeights, Rank

NEVER = -1e30
"""Score of a token that is no candidate: its probability is 0 beside any candidate's, and where a
request excludes all candidates there still is a law."""


def candidates(
    scored: Float[np.ndarray, "R vocab"], k: int
) -> tuple[Float[np.ndarray, "R k"], Int[np.ndarray, "R k"]]:
    """The k best tokens of slots and their scores, best first and of equals the lower id."""
    ids = np.argsort(-scored, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scored, ids, axis=1), ids


def pairs(
    weights: HeadWeights,
    previous: Int[np.ndarray, " B"],
    projected: Float[np.ndarray, "B rank"],
    ids: Int[np.ndarray, "B k"],
) -> Float[np.ndarray, "B k"]:
    """What candidates score as the tokens behind others.

    Args:
      previous: The token before the draft of each slot.
      projected: Of the slots' hidden states, what weighs each number of a pair.
      ids: The candidates.

    Source: DFlash2, z-lab; the equations are those of its model.
    """
    before = weights["selector.before"][previous] * projected
    return np.einsum("br,bkr->bk", before, weights["selector.after"][ids])


def chain(
    config: DraftConfig,
    weights: HeadWeights,
    newest: Int[np.ndarray, " B"],
    hidden: Float[np.ndarray, "B size hidden"],
    scored: Float[np.ndarray, "B S vocab"],
    rank: Rank,
) -> tuple[Int[np.ndarray, "B S"], Float[np.ndarray, "B S"]]:
    """Selects S drafts of each block, and says the log weights of their edges.

    Args:
      newest: The token of slot 0.
      hidden: Of all slots.
      scored: What these slots score without knowing each other.
      rank: Picks a draft after those before it, among all tokens.
    """
    assert config.block is not None  # a DFlash2 head has both
    assert config.block.selector is not None
    first = config.block.first_slot
    previous, drafts, edges = newest, np.zeros((len(newest), 0), np.int32), []
    for level in range(scored.shape[1]):
        values, ids = candidates(scored[:, level], config.block.selector.candidates)
        projected = layers.linear(hidden[:, first + level], weights["selector.hidden"])
        logits = np.full_like(scored[:, level], NEVER)
        own = values + pairs(weights, previous, projected, ids)
        np.put_along_axis(logits, ids, own, axis=1)
        chosen, ranked = rank(logits[:, None], drafts[:, None])
        previous = chosen[:, 0, 0]
        drafts = np.concatenate([drafts, previous[:, None]], axis=1)
        edges.append(ranked[:, 0, 0])
    return drafts, np.stack(edges, axis=1)
