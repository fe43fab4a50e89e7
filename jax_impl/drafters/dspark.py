"""DSpark sampling: the logits of a block depend on the previous draft; see `shared.spec.dspark`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.drafters import Lists, Ranking, dflash2
from jax_impl.model_weights import BlockWeights
from jax_impl.ops import scan
from jax_impl.ops.gemm import layers
from jax_impl.ops.gemm.linear import Matrix, product_float32
from jax_impl.ops.sampling import vocab_parallel
from jax_impl.ops.sampling.vocab_parallel import Vocabulary
from shared.drafts.dspark_config import GATED, VANILLA, MarkovConfig
from shared.models.stacks import BIAS
from shared.spec.tree_growth import MAX_LISTS


class MarkovWeights(NamedTuple):
    """Weights of a DSpark head beyond those of a DFlash head. Absent weights are None.

    Attributes:
      embed: Embedding of the token before a draft token.
      lm_head: Output matrix of the Markov part, over the head's vocabulary.
      mix: Matrix that computes the gate, or the state and the input of `lm_head`.
    """

    config: MarkovConfig
    embed: Float[jax.Array, "vocab rank"]
    lm_head: Float[jax.Array, "vocab rank"]
    mix: Matrix | None
    confidence: Matrix | None

    @classmethod
    def of(cls, weights: BlockWeights) -> "MarkovWeights":
        """Builds the weights from the named arrays of a head."""
        markov, arrays = weights.config.part(MarkovConfig), weights.own
        assert markov is not None  # required for DSpark

        def biased(name: str) -> Matrix | None:
            found = name in arrays
            return Matrix.plain(arrays[name], bias=arrays[f"{name}{BIAS}"]) if found else None

        return cls(
            config=markov,
            embed=arrays["markov.embed"],
            lm_head=arrays["markov.lm_head"],
            mix=biased("markov.mix"),
            confidence=biased("confidence"),
        )


class Mixed(NamedTuple):
    """Same as the class of this name in the specification."""

    before: Float[jax.Array, "B rank"]
    factors: Float[jax.Array, "B rank"]
    state: Float[jax.Array, "B rank"]


def mix(
    markov: MarkovWeights,
    previous: Int[jax.Array, " B"],
    hidden: Float[jax.Array, "B hidden"],
    state: Float[jax.Array, "B rank"],
) -> Mixed:
    """Mixes the Markov part into one position of each block."""
    before, kind = layers.embed_tokens(markov.embed, previous, None), markov.config.kind
    if kind == VANILLA:
        return Mixed(before, before, state)
    assert markov.mix is not None  # set for all other kinds
    if kind == GATED:
        gate = layers.sigmoid(_joined(markov.mix, hidden, before))
        return Mixed(before, (gate * before).astype(before.dtype), state)
    mixed = _joined(markov.mix, state, before, hidden)
    kept, candidate, out = jnp.split(mixed, 3, axis=1)
    kept = layers.sigmoid(kept)
    advanced = kept * state + (1 - kept) * _tanh(candidate)
    return Mixed(before, _tanh(out).astype(before.dtype), advanced.astype(before.dtype))


def confidence(
    markov: MarkovWeights, hidden: Float[jax.Array, "B hidden"], before: Float[jax.Array, "B rank"]
) -> Float[jax.Array, " B"]:
    """Returns the acceptance confidence; only for a head with a confidence output."""
    assert markov.confidence is not None
    read = (hidden, before) if markov.config.confidence_sees_previous else (hidden,)
    return -layers.softplus(-_joined(markov.confidence, *read))[:, 0]


def _joined(weight: Matrix, *read: Float[jax.Array, "B _"]) -> Float[jax.Array, "B outputs"]:
    return product_float32(jnp.concatenate(read, axis=1), weight)


def _tanh(x: Float[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Computes tanh with the sigmoid, which is batch-invariant in torch."""
    return 2 * layers.sigmoid(2 * x) - 1


def chain(
    markov: MarkovWeights,
    weights: BlockWeights,
    newest: Int[jax.Array, " B"],
    hidden: Float[jax.Array, "B size hidden"],
    scored: Float[jax.Array, "B S share"],
    rank: Ranking,
    is_weighed: bool,
) -> tuple[
    Int[jax.Array, "B S"], Float[jax.Array, "B S"] | None, Float[jax.Array, "B S vocab"] | None
]:
    """Chooses S draft tokens of each block one by one; same results as `Ranking.chain`.

    Args:
      hidden: Hidden states of all slots.
      scored: Logits of this rank's shard of the head's vocabulary.
    """
    block = weights.config.block
    assert block is not None  # required for DSpark
    factor = 1.0 if weights.lm_head is not None else weights.config.layer.logits_factor
    (B, S, _), first = scored.shape, block.first_slot
    state = jnp.zeros((B, markov.config.rank), hidden.dtype)
    for slot in range(first):  # positions without a draft: the previous token is `newest`
        state = mix(markov, newest, hidden[:, slot], state).state

    def body(carry: tuple, at: tuple) -> tuple[tuple, tuple]:
        previous, state, drafts = carry
        level, of_slot, of_scores = at
        mixed = mix(markov, previous, of_slot, state)
        logits = of_scores + product_float32(mixed.factors, Matrix.plain(markov.lm_head), factor)
        ranked = rank.of_scores(logits[:, None], drafts[:, None], level)
        previous, edge = ranked.ids[:, 0, 0], ranked.weights[:, 0, 0]
        if is_weighed and markov.confidence is not None:
            edge = confidence(markov, of_slot, mixed.before)
        drafts = drafts.at[:, level].set(previous)
        return (previous, mixed.state, drafts), (edge if is_weighed else None, ranked.processed)

    levels = jnp.arange(S, dtype=jnp.int32)
    by_level = (jnp.moveaxis(x, 1, 0) for x in (hidden[:, first : first + S], scored))
    begun = (newest, state, jnp.zeros((B, S), jnp.int32))
    (_, _, drafts), (edges, laws) = scan(body, begun, (levels, *by_level))
    weighed = edges.T if is_weighed else None
    return drafts, weighed, jnp.moveaxis(laws, 0, 1) if rank.is_sampled else None


def lists(
    markov: MarkovWeights,
    weights: BlockWeights,
    newest: Int[jax.Array, " B"],
    hidden: Float[jax.Array, "B size hidden"],
    scored: Float[jax.Array, "B S share"],
    rank: Ranking,
) -> Lists:
    """Ranks the candidates of each slot after each candidate of the slot before, for a tree."""
    block, vocab = weights.config.block, weights.config.draft_vocab
    assert block is not None  # required for DSpark
    factor = 1.0 if weights.lm_head is not None else weights.config.layer.logits_factor
    (B, S, _), first, P = scored.shape, block.first_slot, min(MAX_LISTS, vocab)
    state = jnp.zeros((B * P, markov.config.rank), hidden.dtype)
    values, ids = rank.candidates(scored, P)
    some = ids if rank.columns is None else rank.columns[ids]

    def body(_: None, at: tuple) -> tuple[None, jax.Array]:
        previous, of_slot, own = at
        of_rows = jnp.repeat(of_slot, P, axis=0)
        factors = mix(markov, previous.reshape(-1), of_rows, state).factors
        return None, bias_at(markov, factors, own, rank.vocabulary, factor)

    previous, slots = dflash2.tokens_before(newest, some), hidden[:, first : first + S]
    _, added = scan(body, None, tuple(jnp.moveaxis(x, 1, 0) for x in (previous, slots, ids)))
    return rank.lists(values[:, :, None] + jnp.moveaxis(added, 0, 1), some)


def bias_at(
    markov: MarkovWeights,
    factors: Float[jax.Array, "BP rank"],
    ids: Int[jax.Array, "B k"],
    vocabulary: Vocabulary,
    factor: float,
) -> Float[jax.Array, "B P k"]:
    """Computes the bias of some tokens of the head's vocabulary; each rank has those it owns."""
    own, last = vocab_parallel.local(ids, vocabulary), len(markov.lm_head) - 1
    rows = markov.lm_head[jnp.clip(own, 0, last)]
    added = dflash2.products(factors.reshape(len(ids), -1, factors.shape[1]), rows, factor)
    is_own = ((own >= 0) & (own <= last))[:, None]
    added = jnp.where(is_own, added, -jnp.inf)
    shape = added.shape
    return vocab_parallel.owned(added.reshape(-1, shape[2]), vocabulary).reshape(shape)


def selection(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `chain` of a head, see `BlockDrafter.select`."""
    return partial(chain, MarkovWeights.of(weights), weights)


def ranking(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `lists` of a head, see `BlockDrafter.lists`."""
    return partial(lists, MarkovWeights.of(weights), weights)
