"""DFlash2 selection: each draft token of a block depends on the token before it.

Same results as `shared.spec.dflash2`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.drafters import Lists, Ranking
from jax_impl.model_weights import BlockWeights
from jax_impl.ops import scan
from jax_impl.ops.gemm.linear import Matrix, product, product_float32
from jax_impl.ops.sampling import vocab_parallel
from shared.drafts.dflash2 import SelectorConfig
from shared.spec.dflash2 import NEVER
from shared.spec.tree_growth import MAX_LISTS


class SelectorWeights(NamedTuple):
    """Weights of the low-rank selector of a DFlash2 head.

    Attributes:
      before, after: Embeddings of the first and the second token of a pair.
      hidden: Matrix that computes the weights of the rank dimensions from a slot's hidden state.
    """

    config: SelectorConfig
    before: Float[jax.Array, "vocab rank"]
    after: Float[jax.Array, "vocab rank"]
    hidden: Matrix

    @classmethod
    def of(cls, weights: BlockWeights) -> "SelectorWeights":
        """Builds the weights from the named arrays of a head."""
        selector, arrays = weights.config.part(SelectorConfig), weights.own
        assert selector is not None  # required for DFlash2
        return cls(
            config=selector,
            before=arrays["selector.before"],
            after=arrays["selector.after"],
            hidden=Matrix.plain(arrays["selector.hidden"]),
        )


def pairs(
    selector: SelectorWeights,
    previous: Int[jax.Array, "B P"],
    projected: Float[jax.Array, "B rank"],
    ids: Int[jax.Array, "B k"],
) -> Float[jax.Array, "B P k"]:
    """Scores candidate tokens given each previous token."""
    before = selector.before[previous] * projected[:, None]
    return products(before, selector.after[ids])


def products(
    factors: Float[jax.Array, "B P rank"], rows: Float[jax.Array, "B k rank"], factor: float = 1.0
) -> Float[jax.Array, "B P k"]:
    """Multiplies the factors of each request with the rows of its candidates.

    One GEMM covers the candidates of all requests, so the order of its sums is fixed. Each request
    reads its own scores.
    """
    (B, k, rank), P = rows.shape, factors.shape[1]
    candidates = Matrix.plain(rows.reshape(B * k, rank))
    every = product_float32(factors.reshape(B * P, rank), candidates, factor)
    return every.reshape(B, P, B, k)[jnp.arange(B), :, jnp.arange(B)]


def chain(
    selector: SelectorWeights,
    weights: BlockWeights,
    newest: Int[jax.Array, " B"],
    hidden: Float[jax.Array, "B size hidden"],
    scored: Float[jax.Array, "B S share"],
    rank: Ranking,
    is_weighed: bool,
) -> tuple[
    Int[jax.Array, "B S"], Float[jax.Array, "B S"] | None, Float[jax.Array, "B S vocab"] | None
]:
    """Selects S draft tokens of each block one by one; same results as `Ranking.chain`.

    Args:
      hidden: Hidden states of all slots.
      scored: Logits of this rank's shard of the target vocabulary.
    """
    block = weights.config.block
    assert block is not None  # required for DFlash2
    (B, S, _), first = scored.shape, block.first_slot
    slots = hidden[:, first : first + S]
    values, ids = rank.candidates(scored, selector.config.candidates)
    projected = product(slots.reshape(B * S, -1), selector.hidden).reshape(B, S, -1)
    nothing = jnp.full((B, rank.counts.shape[1]), NEVER, scored.dtype)

    def body(carry: tuple, at: tuple) -> tuple[tuple, tuple]:
        previous, drafts = carry
        level, of_values, some, of_slot = at
        own = of_values + pairs(selector, previous[:, None], of_slot, some)[:, 0]
        logits = nothing.at[jnp.arange(B)[:, None], some].set(own)
        logits = vocab_parallel.part(logits, rank.vocabulary)
        ranked = rank.of_scores(logits[:, None], drafts[:, None], level)
        previous, edge = ranked.ids[:, 0, 0], ranked.weights[:, 0, 0]
        drafts = drafts.at[:, level].set(previous)
        return (previous, drafts), (edge if is_weighed else None, ranked.processed)

    levels = jnp.arange(S, dtype=jnp.int32)
    by_level = (jnp.moveaxis(x, 1, 0) for x in (values, ids, projected))
    begun = (newest, jnp.zeros((B, S), jnp.int32))
    (_, drafts), (edges, laws) = scan(body, begun, (levels, *by_level))
    weighed = edges.T if is_weighed else None
    return drafts, weighed, jnp.moveaxis(laws, 0, 1) if rank.is_sampled else None


def lists(
    selector: SelectorWeights,
    weights: BlockWeights,
    newest: Int[jax.Array, " B"],
    hidden: Float[jax.Array, "B size hidden"],
    scored: Float[jax.Array, "B S share"],
    rank: Ranking,
) -> Lists:
    """Ranks the candidates of each slot after each candidate of the slot before, for a tree."""
    block = weights.config.block
    assert block is not None  # required for DFlash2
    (B, S, _), first = scored.shape, block.first_slot
    P, slots = min(selector.config.candidates, MAX_LISTS), hidden[:, first : first + S]
    values, ids = rank.candidates(scored, P)
    projected = product(slots.reshape(B * S, -1), selector.hidden).reshape(B, S, -1)

    def body(_: None, at: tuple) -> tuple[None, jax.Array]:
        before, of_slot, some = at
        return None, pairs(selector, before, of_slot, some)

    by_level = (jnp.moveaxis(x, 1, 0) for x in (tokens_before(newest, ids), projected, ids))
    _, added = scan(body, None, tuple(by_level))
    return rank.lists(values[:, :, None] + jnp.moveaxis(added, 0, 1), ids)


def tokens_before(
    newest: Int[jax.Array, " B"], ids: Int[jax.Array, "B S P"]
) -> Int[jax.Array, "B S P"]:
    """Returns the tokens that may precede each slot: the candidates of the slot before."""
    root = jnp.broadcast_to(newest[:, None, None], ids[:, :1].shape)
    return jnp.concatenate([root, ids[:, :-1]], axis=1)


def selection(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `chain` of a head, see `BlockDrafter.select`."""
    return partial(chain, SelectorWeights.of(weights), weights)


def ranking(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `lists` of a head, see `BlockDrafter.lists`."""
    return partial(lists, SelectorWeights.of(weights), weights)
