"""DFlash2 selection: each draft token of a block depends on the token before it.

Same results as `shared.spec.dflash2`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.spec.dflash2 import NEVER
from torch_impl.drafters import Ranking
from torch_impl.model_weights import SelectorWeights
from torch_impl.ops.gemm.linear import Matrix, product, product_float32
from torch_impl.ops.sampling import vocab_parallel


def pairs(
    selector: SelectorWeights,
    previous: Int[Tensor, " B"],
    projected: Float[Tensor, "B rank"],
    ids: Int[Tensor, "B k"],
) -> Float[Tensor, "B k"]:
    """Scores candidate tokens given the previous token.

    One GEMM covers the candidates of all requests, so the order of its sums is fixed. Each request
    reads its own scores.
    """
    (B, k), before = ids.shape, selector.before[previous] * projected
    every = product_float32(before, Matrix(selector.after[ids.flatten()]))
    return every.view(B, B, k).diagonal(dim1=0, dim2=1).t()


def chain(
    selector: SelectorWeights,
    newest: Int[Tensor, " B"],
    hidden: Float[Tensor, "B S hidden"],
    scored: Float[Tensor, "B S share"],
    rank: Ranking,
    is_weighed: bool,
) -> tuple[Int[Tensor, "B S"], Float[Tensor, "B S"] | None, Float[Tensor, "B S vocab"] | None]:
    """Selects S draft tokens of each block one by one; same results as `Ranking.chain`.

    Args:
      scored: Logits of this rank's shard of the target vocabulary.
    """
    B, S, _ = scored.shape
    values, ids = rank.candidates(scored, selector.config.candidates)
    projected = product(hidden.flatten(0, 1), selector.hidden).unflatten(0, (B, S))
    nothing = scored.new_full((B, rank.counts.shape[1]), NEVER)
    previous, drafts = newest, newest.new_zeros(B, 0)
    edges, laws = [], []
    for level in range(S):
        some = ids[:, level]
        own = values[:, level] + pairs(selector, previous, projected[:, level], some)
        logits = vocab_parallel.part(nothing.scatter(1, some.long(), own), rank.vocabulary)
        ranked = rank.of_scores(logits[:, None], drafts[:, None], level)
        previous = ranked.ids[:, 0, 0]
        drafts = torch.cat([drafts, previous[:, None]], dim=1)
        edges.append(ranked.weights[:, 0, 0])
        laws.append(ranked.processed)
    weighed = torch.stack(edges, dim=1) if is_weighed else None
    return drafts, weighed, torch.stack(laws, dim=1) if rank.is_sampled else None
