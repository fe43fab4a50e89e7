"""DSpark: DFlash's block, of which each draft is chosen knowing the one before it.

The block is filled in one pass, as of DFlash. A slot's scores then get a bias that depends on the
token before: an embedding of that token, of few numbers, is scored against the vocabulary. So the
drafts are chosen one after the other, but each choice costs one small product. A confidence head
says of each draft, before it is verified, how likely it is accepted.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.block import BlockConfig
from shared.drafts.config import DraftConfig
from shared.drafts.markov import GATED, VANILLA, MarkovConfig
from shared.spec import layers
from shared.spec.eagle import HeadWeights, Rank
from shared.spec.model import Hidden
from shared.spec.sampling import over_tokens

Rows = Float[np.ndarray, "B rank"]


class Mixed(NamedTuple):
    """What a slot knows of the token before it.

    Attributes:
      before: The embedding of that token.
      factors: What the bias of the vocabulary's scores is the product of.
      state: Of the slots so far, which the next slot reads; 0 before the first, and always without
        a recurrent step.
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
    """One slot of each block.

    Args:
      previous: The token before the draft of the slot, of the target's vocabulary.
      hidden: Of the slot, after the final norm.
      state: After the slot before.

    Source: DSpark, arXiv:2607.05147.
    """
    before = weights["markov.embed"][previous]
    if markov.kind == VANILLA:
        return Mixed(before, before, state)
    if markov.kind == GATED:
        gate = layers.sigmoid(_linear(weights, "markov.mix", hidden, before))
        return Mixed(before, gate * before, state)
    mixed = _linear(weights, "markov.mix", state, before, hidden)
    kept, candidate, out = np.split(mixed, 3, axis=1)
    kept = layers.sigmoid(kept)
    return Mixed(before, np.tanh(out), kept * state + (1 - kept) * np.tanh(candidate))


def bias(config: DraftConfig, weights: HeadWeights, factors: Rows) -> Float[np.ndarray, "B vocab"]:
    """What is added to a slot's scores of the target's tokens.

    It is scaled as these are, where the target's `lm_head` makes them.
    """
    scored = layers.linear(factors, weights["markov.lm_head"])
    scale = 1.0 if "lm_head" in weights else config.layer.logits_factor
    return over_tokens(np.float32(scale) * scored, weights.get("draft_ids"), config.layer.vocab)


def confidence(
    markov: MarkovConfig, weights: HeadWeights, hidden: Hidden, before: Rows
) -> Float[np.ndarray, " B"]:
    """How likely the draft of a slot is accepted where those before it are, as a logarithm.

    Args:
      hidden, before: As of `mix`.
    """
    read = (hidden, before) if markov.confidence_sees_previous else (hidden,)
    return -layers.softplus(-_linear(weights, "confidence", *read))[:, 0]


def _linear(
    weights: HeadWeights, name: str, *read: Float[np.ndarray, "B _"]
) -> Float[np.ndarray, "B outputs"]:
    """Of what is read side by side."""
    return layers.linear(np.concatenate(read, axis=1), weights[name]) + weights[f"{name}_bias"]


def chain(
    config: DraftConfig,
    weights: HeadWeights,
    newest: Int[np.ndarray, " B"],
    hidden: Float[np.ndarray, "B size hidden"],
    scored: Float[np.ndarray, "B S vocab"],
    rank: Rank,
) -> tuple[Int[np.ndarray, "B S"], Float[np.ndarray, "B S"]]:
    """Chooses S drafts of each block, and says the log weights of their edges.

    Args:
      newest: The token of slot 0.
      hidden: Of all slots.
      scored: What the slots of the drafts score without knowing each other.
      rank: Picks a draft after those before it; its weights count where the head has no confidence.
    """
    block, markov = _of(config)
    state = np.zeros((len(newest), markov.rank), hidden.dtype)
    previous, drafts, edges = newest, np.zeros((len(newest), 0), np.int32), []
    for slot in range(block.first_slot + scored.shape[1]):
        mixed = mix(markov, weights, previous, hidden[:, slot], state)
        state, level = mixed.state, slot - block.first_slot
        if level < 0:  # a slot without a draft, whose token before it is itself
            continue
        logits = scored[:, level] + bias(config, weights, mixed.factors)
        ids, ranked = rank(logits[:, None], drafts[:, None])
        previous, edge = ids[:, 0, 0], ranked[:, 0, 0]
        if markov.has_confidence:
            edge = confidence(markov, weights, hidden[:, slot], mixed.before)
        drafts = np.concatenate([drafts, previous[:, None]], axis=1)
        edges.append(edge)
    return drafts, np.stack(edges, axis=1)


def _of(config: DraftConfig) -> tuple[BlockConfig, MarkovConfig]:
    assert config.block is not None  # a DSpark head has both
    assert config.block.markov is not None
    return config.block, config.block.markov
