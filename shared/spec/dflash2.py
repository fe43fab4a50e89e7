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
from shared.spec import draft_tree, layers, verify_rows
from shared.spec.dflash import Drafter
from shared.spec.eagle import HeadWeights, Rank, Tree
from shared.spec.model import KV, Hidden

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
    hidden: Float[np.ndarray, "B S hidden"],
    scored: Float[np.ndarray, "B S vocab"],
    rank: Rank,
) -> tuple[Int[np.ndarray, "B S"], Float[np.ndarray, "B S"]]:
    """Selects S drafts of each block, and says the log weights of their edges.

    Args:
      newest: The token of slot 0.
      hidden: Of the slots of the drafts.
      scored: What these slots score without knowing each other.
      rank: Picks a draft after those before it, among all tokens.
    """
    assert config.block is not None  # a DFlash2 head has both
    assert config.block.selector is not None
    previous, drafts, edges = newest, np.zeros((len(newest), 0), np.int32), []
    for level in range(scored.shape[1]):
        values, ids = candidates(scored[:, level], config.block.selector.candidates)
        projected: Hidden = layers.linear(hidden[:, level], weights["selector.hidden"])
        logits = np.full_like(scored[:, level], NEVER)
        own = values + pairs(weights, previous, projected, ids)
        np.put_along_axis(logits, ids, own, axis=1)
        chosen, ranked = rank(logits[:, None], drafts[:, None])
        previous = chosen[:, 0, 0]
        drafts = np.concatenate([drafts, previous[:, None]], axis=1)
        edges.append(ranked[:, 0, 0])
    return drafts, np.stack(edges, axis=1)


def draft(
    drafter: Drafter,
    kv: KV,
    newest: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    depth: int,
    rank: Rank,
) -> Tree:
    """Drafts a chain for each request; the pools stay as they are.

    Args:
      drafter: Of a DFlash2 head; the other arguments are those of its own `draft`.
      rank: Picks the one child of a node.
    """
    config = drafter.head.config
    assert config.block is not None  # a DFlash2 head has a block
    hidden = drafter.filled(kv, newest, lengths, draft_from, page_table)
    scored, first = drafter.scores(hidden, depth), config.block.first_slot
    slots = hidden[:, first : first + depth]
    drafts, edges = chain(config, drafter.head.weights, newest, slots, scored, rank)
    chains = draft_tree.chains(drafts, newest, max_drafts, draft_from < lengths)
    return (*chains, verify_rows.chain_weights(edges))
