"""DFlash2: DFlash with convolutions, and a selector that conditions each draft token on the
previous one.

The block is filled in one pass, as in DFlash, with a convolution along its rows before and after
each part of a layer (`shared.spec.convolution`). The top tokens of a slot are candidates. Draft
tokens are selected one after the other: a candidate's score is its logit plus a score of the pair
with the previous draft token, weighted by the slot's hidden state. The selections are sequential,
but each reads only a few tokens.
"""

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import SelectorConfig
from shared.spec import layers
from shared.spec.eagle import HeadWeights
from shared.spec.tree_growth import MAX_LISTS, Lists, Rank, RankLists

NEVER = -1e30
"""Logit of a token that is not a candidate. Its probability is 0 next to any candidate, but the
distribution stays valid if a request excludes all candidates."""


def candidates(
    scored: Float[np.ndarray, "R vocab"], k: int
) -> tuple[Float[np.ndarray, "R k"], Int[np.ndarray, "R k"]]:
    """Returns the top-k tokens of slots and their logits, best first; ties go to the lower id."""
    ids = np.argsort(-scored, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scored, ids, axis=1), ids


def pairs(
    weights: HeadWeights,
    previous: Int[np.ndarray, "B P"],
    projected: Float[np.ndarray, "B rank"],
    ids: Int[np.ndarray, "B k"],
) -> Float[np.ndarray, "B P k"]:
    """Computes the pair scores of candidates with each previous token.

    Args:
      weights: Weights of the head.
      previous: Tokens before the draft token of each slot.
      projected: Projections of the slots' hidden states, which weight the elements of a pair.
      ids: The candidates.

    Source: DFlash2, z-lab; the equations are those of its model.
    """
    before = weights["selector.before"][previous] * projected[:, None]
    return np.einsum("bpr,bkr->bpk", before, weights["selector.after"][ids])


def chain(
    config: DraftConfig,
    weights: HeadWeights,
    newest: Int[np.ndarray, " B"],
    hidden: Float[np.ndarray, "B size hidden"],
    scored: Float[np.ndarray, "B S vocab"],
    rank: Rank,
) -> tuple[Int[np.ndarray, "B S"], Float[np.ndarray, "B S"]]:
    """Selects S draft tokens of each block, and returns the log weights of their edges.

    Args:
      config, weights: Config and weights of the head.
      newest: Token of slot 0.
      hidden: Hidden states of all slots.
      scored: Logits of the slots, independent of each other.
      rank: Selects a draft token after the previous ones, among all tokens.
    """
    assert config.block is not None  # both are required for DFlash2
    selector = config.block.part(SelectorConfig)
    assert selector is not None
    first = config.block.first_slot
    previous, drafts, edges = newest, np.zeros((len(newest), 0), np.int32), []
    for level in range(scored.shape[1]):
        values, ids = candidates(scored[:, level], selector.candidates)
        projected = layers.linear(hidden[:, first + level], weights["selector.hidden"])
        logits = np.full_like(scored[:, level], NEVER)
        candidate_logits = values + pairs(weights, previous[:, None], projected, ids)[:, 0]
        np.put_along_axis(logits, ids, candidate_logits, axis=1)
        chosen, ranked = rank(logits[:, None], drafts[:, None])
        previous = chosen[:, 0, 0]
        drafts = np.concatenate([drafts, previous[:, None]], axis=1)
        edges.append(ranked[:, 0, 0])
    return drafts, np.stack(edges, axis=1)


def lists(
    config: DraftConfig,
    weights: HeadWeights,
    newest: Int[np.ndarray, " B"],
    hidden: Float[np.ndarray, "B size hidden"],
    scored: Float[np.ndarray, "B S vocab"],
    rank: RankLists,
) -> Lists:
    """Ranks the candidates of each slot after each candidate of the slot before, for a tree.

    A pair score depends on two tokens alone, so the best prefixes of this distribution are exact.

    Args:
      config, weights, newest, hidden, scored: See `chain`.
      rank: Ranks the candidates of all slots.
    """
    assert config.block is not None  # both are required for DFlash2
    selector = config.block.part(SelectorConfig)
    assert selector is not None
    first, P = config.block.first_slot, min(selector.candidates, MAX_LISTS)
    values, ids = slot_candidates(scored, P)
    previous = tokens_before(newest, ids)
    logits = np.zeros((*ids.shape, P), scored.dtype)
    for level in range(scored.shape[1]):
        projected = layers.linear(hidden[:, first + level], weights["selector.hidden"])
        added = pairs(weights, previous[:, level], projected, ids[:, level])
        logits[:, level] = values[:, level, None] + added
    return rank(logits, ids)


def slot_candidates(
    scored: Float[np.ndarray, "B S vocab"], k: int
) -> tuple[Float[np.ndarray, "B S k"], Int[np.ndarray, "B S k"]]:
    """Returns the `candidates` of each slot of blocks."""
    B, S, vocab = scored.shape
    values, ids = candidates(scored.reshape(B * S, vocab), k)
    return values.reshape(B, S, k), ids.reshape(B, S, k)


def tokens_before(
    newest: Int[np.ndarray, " B"], ids: Int[np.ndarray, "B S P"]
) -> Int[np.ndarray, "B S P"]:
    """Returns the tokens that may precede each slot: the candidates of the slot before.

    The newest token precedes the first slot; it is repeated.
    """
    root = np.broadcast_to(newest[:, None, None], ids[:, :1].shape)
    return np.concatenate([root, ids[:, :-1]], axis=1)
