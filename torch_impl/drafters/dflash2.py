"""DFlash2 selection: each draft token of a block depends on the token before it.

Same results as `shared.spec.dflash2`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.dflash2 import SelectorConfig
from shared.spec.dflash2 import NEVER
from shared.spec.tree_growth import MAX_LISTS
from torch_impl.drafters import Lists, Ranking
from torch_impl.model_weights import BlockWeights
from torch_impl.ops.gemm.linear import Matrix, product, product_float32
from torch_impl.ops.sampling import vocab_parallel


@dataclass(frozen=True)
class SelectorWeights:
    """Weights of the low-rank selector of a DFlash2 head.

    Attributes:
      before, after: Embeddings of the first and the second token of a pair.
      hidden: Matrix that computes the weights of the rank dimensions from a slot's hidden state.
    """

    config: SelectorConfig
    before: Float[Tensor, "vocab rank"]
    after: Float[Tensor, "vocab rank"]
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
    previous: Int[Tensor, "B P"],
    projected: Float[Tensor, "B rank"],
    ids: Int[Tensor, "B k"],
) -> Float[Tensor, "B P k"]:
    """Scores candidate tokens given each previous token."""
    before = selector.before[previous] * projected[:, None]
    return products(before, selector.after[ids])


def products(
    factors: Float[Tensor, "B P rank"], rows: Float[Tensor, "B k rank"], factor: float = 1.0
) -> Float[Tensor, "B P k"]:
    """Multiplies the factors of each request with the rows of its candidates.

    One GEMM covers the candidates of all requests, so the order of its sums is fixed. Each request
    reads its own scores.
    """
    (B, k), P = rows.shape[:2], factors.shape[1]
    every = product_float32(factors.flatten(0, 1), Matrix.plain(rows.flatten(0, 1)), factor)
    return every.view(B, P, B, k).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def chain(
    selector: SelectorWeights,
    weights: BlockWeights,
    newest: Int[Tensor, " B"],
    hidden: Float[Tensor, "B size hidden"],
    scored: Float[Tensor, "B S share"],
    rank: Ranking,
    is_weighed: bool,
) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
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
    projected = product(slots.flatten(0, 1), selector.hidden).unflatten(0, (B, S))
    nothing = scored.new_full((B, rank.counts.shape[1]), NEVER)
    previous, drafts = newest, newest.new_zeros(B, 0)
    edges, laws = [], []
    for level in range(S):
        some = ids[:, level]
        own = values[:, level] + pairs(selector, previous[:, None], projected[:, level], some)[:, 0]
        logits = vocab_parallel.part(nothing.scatter(1, some.long(), own), rank.vocabulary)
        ranked = rank.of_scores(logits[:, None], drafts[:, None], level)
        previous = ranked.ids[:, 0, 0]
        drafts = torch.cat([drafts, previous[:, None]], dim=1)
        edges.append(ranked.weights[:, 0, 0])
        laws.append(ranked.processed)
    weighed = torch.stack(edges, dim=1) if is_weighed else None
    return drafts, weighed, torch.stack(laws, dim=1) if rank.is_sampled else None


def lists(
    selector: SelectorWeights,
    weights: BlockWeights,
    newest: Int[Tensor, " B"],
    hidden: Float[Tensor, "B size hidden"],
    scored: Float[Tensor, "B S share"],
    rank: Ranking,
) -> Lists:
    """Ranks the candidates of each slot after each candidate of the slot before, for a tree."""
    block = weights.config.block
    assert block is not None  # required for DFlash2
    (B, S, _), first = scored.shape, block.first_slot
    P, slots = min(selector.config.candidates, MAX_LISTS), hidden[:, first : first + S]
    values, ids = rank.candidates(scored, P)
    projected = product(slots.flatten(0, 1), selector.hidden).unflatten(0, (B, S))
    before, levels = tokens_before(newest, ids), range(S)
    added = [pairs(selector, before[:, i], projected[:, i], ids[:, i]) for i in levels]
    return rank.lists(values[:, :, None] + torch.stack(added, dim=1), ids)


def tokens_before(newest: Int[Tensor, " B"], ids: Int[Tensor, "B S P"]) -> Int[Tensor, "B S P"]:
    """Returns the tokens that may precede each slot: the candidates of the slot before."""
    root = newest[:, None, None].expand_as(ids[:, :1])
    return torch.cat([root, ids[:, :-1]], dim=1)


def selection(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `chain` of a head, see `BlockDrafter.select`."""
    return partial(chain, SelectorWeights.of(weights), weights)


def ranking(weights: BlockWeights) -> Callable[..., Any]:
    """Returns `lists` of a head, see `BlockDrafter.lists`."""
    return partial(lists, SelectorWeights.of(weights), weights)
