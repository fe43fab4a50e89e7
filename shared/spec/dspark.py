"""DSpark: DFlash with a Markov head, which conditions each draft token on the previous one.

The block is filled in one pass, as in DFlash. The logits of a slot then get a bias from the
previous token: its low-rank embedding, scored against the vocabulary. Draft tokens are selected one
after the other, each at the cost of one small product. A confidence head predicts the acceptance
probability of each draft token before verification.

Source: DSpark, arXiv:2607.05147.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.config import DraftConfig
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.dspark_config import GATED, VANILLA, MarkovConfig
from shared.spec import layers
from shared.spec.dflash2 import slot_candidates, tokens_before
from shared.spec.eagle import HeadWeights
from shared.spec.model import Hidden
from shared.spec.sampling import over_tokens
from shared.spec.tree_growth import MAX_LISTS, Lists, Rank, RankLists

Rows = Float[np.ndarray, "B rank"]


class Mixed(NamedTuple):
    """Output of the Markov step of a slot.

    Attributes:
      before: Embedding of the previous token.
      factors: Input of the product that gives the logit bias.
      state: Recurrent state for the next slot; 0 before the first slot, and always for
        non-recurrent kinds.
    """

    before: Rows
    factors: Rows
    state: Rows


def mix(
    markov: MarkovConfig,
    weights: HeadWeights,
    previous: Int[np.ndarray, " B"],
    hidden: Hidden,
    state: Rows,
) -> Mixed:
    """Computes the Markov step of one slot of each block.

    Args:
      markov, weights: Config and weights of the Markov head.
      previous: Token before the slot's draft token, in the target's vocabulary.
      hidden: Hidden state of the slot after the final norm.
      state: Recurrent state after the previous slot.

    Source: DSpark, arXiv:2607.05147.
    """
    before = weights["markov.embed"][previous]
    if markov.kind == VANILLA:
        return Mixed(before, before, state)
    if markov.kind == GATED:
        gate = layers.sigmoid(_linear(weights, "markov.mix", [hidden, before]))
        return Mixed(before, gate * before, state)
    mixed = _linear(weights, "markov.mix", [state, before, hidden])
    update, candidate, out = np.split(mixed, 3, axis=1)
    update = layers.sigmoid(update)
    return Mixed(before, np.tanh(out), update * state + (1 - update) * np.tanh(candidate))


def bias(config: DraftConfig, weights: HeadWeights, factors: Rows) -> Float[np.ndarray, "B vocab"]:
    """Computes the bias of a slot's logits over the target's vocabulary.

    It has the scale of the target's logits if the target's `lm_head` produces the logits.
    """
    scored = layers.linear(factors, weights["markov.lm_head"])
    scale = 1.0 if "lm_head" in weights else config.layer.logits_factor
    return over_tokens(np.float32(scale) * scored, weights.get("draft_ids"), config.layer.vocab)


def bias_at(
    config: DraftConfig,
    weights: HeadWeights,
    factors: Float[np.ndarray, "B P rank"],
    ids: Int[np.ndarray, "B k"],
) -> Float[np.ndarray, "B P k"]:
    """Computes the bias of some tokens of each request; see `bias`.

    Args:
      config, weights: Config and weights of the head.
      factors: See `Mixed`, for each token that may precede.
      ids: Tokens of the draft vocabulary, as ids of the target.
    """
    rows = ids
    if "draft_ids" in weights:
        rows = np.zeros(config.layer.vocab, np.int32)
        rows[weights["draft_ids"]] = np.arange(config.draft_vocab)
        rows = rows[ids]
    scale = 1.0 if "lm_head" in weights else config.layer.logits_factor
    return np.float32(scale) * np.einsum("bpr,bkr->bpk", factors, weights["markov.lm_head"][rows])


def confidence(
    markov: MarkovConfig, weights: HeadWeights, hidden: Hidden, before: Rows
) -> Float[np.ndarray, " B"]:
    """Computes the log probability that a slot's draft token is accepted, given that the earlier
    ones are.

    Args:
      markov, weights: Config and weights of the head.
      hidden, before: See `mix` and `Mixed`.
    """
    inputs = [hidden, before] if markov.confidence_sees_previous else [hidden]
    return -layers.softplus(-_linear(weights, "confidence", inputs))[:, 0]


def _linear(
    weights: HeadWeights, name: str, inputs: Sequence[Float[np.ndarray, "B _"]]
) -> Float[np.ndarray, "B outputs"]:
    """Applies a linear layer to the concatenated inputs."""
    return layers.linear(np.concatenate(inputs, axis=1), weights[name]) + weights[f"{name}_bias"]


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
      scored: Logits of the draft slots, independent of each other.
      rank: Selects a draft token after the previous ones; its weights are used without a confidence
        head.
    """
    block, markov = _of(config)
    state = np.zeros((len(newest), markov.rank), hidden.dtype)
    previous, drafts, edges = newest, np.zeros((len(newest), 0), np.int32), []
    for slot in range(block.first_slot + scored.shape[1]):
        mixed = mix(markov, weights, previous, hidden[:, slot], state)
        state, level = mixed.state, slot - block.first_slot
        if level < 0:  # slot 0 without a draft token: its previous token is its own
            continue
        logits = scored[:, level] + bias(config, weights, mixed.factors)
        ids, ranked = rank(logits[:, None], drafts[:, None])
        previous, edge = ids[:, 0, 0], ranked[:, 0, 0]
        if markov.has_confidence:
            edge = confidence(markov, weights, hidden[:, slot], mixed.before)
        drafts = np.concatenate([drafts, previous[:, None]], axis=1)
        edges.append(edge)
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

    The candidates of a slot are the best tokens of its own logits; their logits have the bias of
    the token before. The confidence head is not used: it predicts the acceptance of one path. A
    recurrent Markov head is not supported, because its state depends on the whole path.

    Args:
      config, weights, newest, hidden, scored: See `chain`.
      rank: Ranks the candidates of all slots.
    """
    (block, markov), (B, S, _) = _of(config), scored.shape
    P = min(MAX_LISTS, config.draft_vocab)
    state = np.zeros((B * P, markov.rank), hidden.dtype)
    values, ids = slot_candidates(scored, P)
    previous = tokens_before(newest, ids)
    logits = np.zeros((*ids.shape, P), scored.dtype)
    for level in range(S):
        of_slot = np.repeat(hidden[:, block.first_slot + level], P, axis=0)
        mixed = mix(markov, weights, previous[:, level].reshape(-1), of_slot, state)
        added = bias_at(config, weights, mixed.factors.reshape(B, P, -1), ids[:, level])
        logits[:, level] = values[:, level, None] + added
    return rank(logits, ids)


def _of(config: DraftConfig) -> tuple[BlockConfig, MarkovConfig]:
    assert config.block is not None  # both are required for DSpark
    markov = config.block.part(MarkovConfig)
    assert markov is not None
    return config.block, markov
