"""DSpark sampling: the logits of a block depend on the previous draft; see `shared.spec.dspark`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.dspark_config import GATED, VANILLA, MarkovConfig
from shared.models.stacks import BIAS
from shared.spec.tree_growth import MAX_LISTS
from torch_impl.drafters import Lists, Ranking, dflash2
from torch_impl.model_weights import BlockWeights
from torch_impl.ops.gemm import layers
from torch_impl.ops.gemm.linear import Matrix, product_float32
from torch_impl.ops.sampling import vocab_parallel
from torch_impl.ops.sampling.vocab_parallel import Vocabulary


@dataclass(frozen=True)
class MarkovWeights:
    """Weights of a DSpark head beyond those of a DFlash head. Absent weights are None.

    Attributes:
      embed: Embedding of the token before a draft token.
      lm_head: Output matrix of the Markov part, over the head's vocabulary.
      mix: Matrix that computes the gate, or the state and the input of `lm_head`.
    """

    config: MarkovConfig
    embed: Float[Tensor, "vocab rank"]
    lm_head: Float[Tensor, "vocab rank"]
    mix: Matrix | None
    confidence: Matrix | None

    @classmethod
    def of(cls, weights: BlockWeights) -> "MarkovWeights":
        """Builds the weights from the named arrays of a head."""
        markov, arrays = weights.config.part(MarkovConfig), weights.own
        assert markov is not None  # required for DSpark

        def biased(name: str) -> Matrix | None:
            return Matrix.plain(arrays[name], arrays[f"{name}{BIAS}"]) if name in arrays else None

        return cls(
            config=markov,
            embed=arrays["markov.embed"],
            lm_head=arrays["markov.lm_head"],
            mix=biased("markov.mix"),
            confidence=biased("confidence"),
        )


class Mixed(NamedTuple):
    """Same as the class of this name in the specification."""

    before: Float[Tensor, "B rank"]
    factors: Float[Tensor, "B rank"]
    state: Float[Tensor, "B rank"]


def mix(
    markov: MarkovWeights,
    previous: Int[Tensor, " B"],
    hidden: Float[Tensor, "B hidden"],
    state: Float[Tensor, "B rank"],
) -> Mixed:
    before, kind = layers.embed_tokens(markov.embed, previous, None), markov.config.kind
    if kind == VANILLA:
        return Mixed(before, before, state)
    assert markov.mix is not None  # set for all other kinds
    if kind == GATED:
        gate = layers.sigmoid(_joined(markov.mix, hidden, before))
        return Mixed(before, (gate * before).to(before.dtype), state)
    kept, candidate, out = _joined(markov.mix, state, before, hidden).chunk(3, dim=1)
    kept = layers.sigmoid(kept)
    advanced = kept * state + (1 - kept) * _tanh(candidate)
    return Mixed(before, _tanh(out).to(before.dtype), advanced.to(before.dtype))


def confidence(
    markov: MarkovWeights, hidden: Float[Tensor, "B hidden"], before: Float[Tensor, "B rank"]
) -> Float[Tensor, " B"]:
    """Returns the acceptance confidence; only for a head with a confidence output."""
    assert markov.confidence is not None
    read = (hidden, before) if markov.config.confidence_sees_previous else (hidden,)
    return -layers.softplus(-_joined(markov.confidence, *read))[:, 0]


def _joined(weight: Matrix, *read: Float[Tensor, "B _"]) -> Float[Tensor, "B outputs"]:
    return product_float32(torch.cat(read, dim=1), weight)


def _tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Computes tanh with the sigmoid, which is batch-invariant in torch."""
    return 2 * layers.sigmoid(2 * x) - 1


def chain(
    markov: MarkovWeights,
    weights: BlockWeights,
    newest: Int[Tensor, " B"],
    hidden: Float[Tensor, "B size hidden"],
    scored: Float[Tensor, "B S share"],
    rank: Ranking,
    is_weighed: bool,
) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
    """Chooses S draft tokens of each block one by one; same results as `Ranking.chain`.

    Args:
      hidden: Hidden states of all slots.
      scored: Logits of this rank's shard of the head's vocabulary.
    """
    block = weights.config.block
    assert block is not None  # required for DSpark
    factor = 1.0 if weights.lm_head is not None else weights.config.layer.logits_factor
    (B, S, _), first = scored.shape, block.first_slot
    state = hidden.new_zeros(B, markov.config.rank)
    previous, drafts = newest, newest.new_zeros(B, 0)
    edges, laws = [], []
    for slot in range(first):  # positions without a draft: the previous token is `newest`
        state = mix(markov, newest, hidden[:, slot], state).state
    for level in range(S):
        of_slot = hidden[:, first + level]
        mixed = mix(markov, previous, of_slot, state)
        bias = product_float32(mixed.factors, Matrix.plain(markov.lm_head), factor)
        ranked = rank.of_scores((scored[:, level] + bias)[:, None], drafts[:, None], level)
        previous, edge, state = ranked.ids[:, 0, 0], ranked.weights[:, 0, 0], mixed.state
        if is_weighed and markov.confidence is not None:
            edge = confidence(markov, of_slot, mixed.before)
        drafts = torch.cat([drafts, previous[:, None]], dim=1)
        edges.append(edge)
        laws.append(ranked.processed)
    weighed = torch.stack(edges, dim=1) if is_weighed else None
    return drafts, weighed, torch.stack(laws, dim=1) if rank.is_sampled else None


def lists(
    markov: MarkovWeights,
    weights: BlockWeights,
    newest: Int[Tensor, " B"],
    hidden: Float[Tensor, "B size hidden"],
    scored: Float[Tensor, "B S share"],
    rank: Ranking,
) -> Lists:
    """Ranks the candidates of each slot after each candidate of the slot before, for a tree."""
    block, vocab = weights.config.block, weights.config.draft_vocab
    assert block is not None  # required for DSpark
    factor = 1.0 if weights.lm_head is not None else weights.config.layer.logits_factor
    (B, S, _), first, P = scored.shape, block.first_slot, min(MAX_LISTS, vocab)
    state = hidden.new_zeros(B * P, markov.config.rank)
    values, ids = rank.candidates(scored, P)
    some, added = ids if rank.columns is None else rank.columns[ids], []
    previous = dflash2.tokens_before(newest, some)
    for level in range(S):
        of_slot = hidden[:, first + level].repeat_interleave(P, dim=0)
        factors = mix(markov, previous[:, level].flatten(), of_slot, state).factors
        added.append(bias_at(markov, factors, ids[:, level], rank.vocabulary, factor))
    return rank.lists(values[:, :, None] + torch.stack(added, dim=1), some)


def bias_at(
    markov: MarkovWeights,
    factors: Float[Tensor, "BP rank"],
    ids: Int[Tensor, "B k"],
    vocabulary: Vocabulary,
    factor: float,
) -> Float[Tensor, "B P k"]:
    """Computes the bias of some tokens of the head's vocabulary; each rank has those it owns."""
    own, last = vocab_parallel.local(ids, vocabulary), len(markov.lm_head) - 1
    rows = markov.lm_head[own.clamp(0, last)]
    added = dflash2.products(factors.unflatten(0, (len(ids), -1)), rows, factor)
    is_own = ((own >= 0) & (own <= last))[:, None]
    added = added.masked_fill(~is_own, -torch.inf)
    return vocab_parallel.owned(added.flatten(0, 1), vocabulary).view(added.shape)


def selection(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `chain` of a head, see `BlockDrafter.select`."""
    return partial(chain, MarkovWeights.of(weights), weights)


def ranking(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `lists` of a head, see `BlockDrafter.lists`."""
    return partial(lists, MarkovWeights.of(weights), weights)
