"""Ranking of a block's candidates after each token before; same as `shared.spec.candidate_lists`.

On a GPU the kernels of `sampling.rank` rank them; see `torch_impl.ops`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU
from torch_impl.ops import Kernels, any_row_set, kernel_or_reference
from torch_impl.ops.sampling.gumbel_noise import gumbel_at
from torch_impl.ops.sampling.sampling import (
    Sampling,
    counts_alone,
    draft_weights,
    penalized,
    supported,
)
from torch_impl.ops.sampling.vocab_parallel import ALL, best_of


def plain_rank(
    logits: Float[Tensor, "R P C"],
    tokens: Int[Tensor, "R C"],
    counts: Int[Tensor, "slots vocab"],
    slots: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    width: int,
) -> tuple[Int[Tensor, "R P width"], Float[Tensor, "R P width"]]:
    R, P, _ = logits.shape
    row = torch.arange(R, device=logits.device).repeat_interleave(P)
    by_row, at = sampling.rows(row), tokens[row]
    edited = edited_at(logits.flatten(0, 1), at, counts[slots[row, None], at], by_row)
    is_stop = (by_row.stop_ids[:, :, None] == at[:, None]).any(dim=1)
    is_early = (positions < sampling.min_length)[row, None]
    noisy = supported(edited.masked_fill(is_stop & is_early, -torch.inf), sampling, row, ALL)
    if any_row_set(sampling.temperature > 0):
        noise = gumbel_at(sampling.seed, positions, tokens, TARGET_STREAM)[row]
        noisy = noisy + torch.where(by_row.temperature[:, None] > 0, noise, 0)
    values, places = best_of(noisy, width, ALL)
    weights = draft_weights(noisy, values, by_row.temperature, DRAFT_TAU)
    return at.gather(1, places.long()).view(R, P, width), weights.view(R, P, width)


def edited_at(
    logits: Float[Tensor, "R C"],
    tokens: Int[Tensor, "R C"],
    seen: Int[Tensor, "R C"],
    sampling: Sampling,
) -> Float[Tensor, "R C"]:
    is_biased = sampling.bias_ids[:, :, None] == tokens[:, None]
    bias = torch.where(is_biased, sampling.bias_values[:, :, None], 0).sum(dim=1)
    return penalized(logits, seen, sampling) + bias


def kernel_rank(
    kernels: Kernels,
    logits: Float[Tensor, "R P C"],
    tokens: Int[Tensor, "R C"],
    counts: Int[Tensor, "slots vocab"],
    slots: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    width: int,
) -> tuple[Int[Tensor, "R P width"], Float[Tensor, "R P width"]]:
    R, P, _ = logits.shape
    seen = counts_alone(counts, slots.repeat_interleave(P))
    ids, weights, _ = kernels.sampling.rank(
        *(logits, seen, positions, sampling, positions, TARGET_STREAM, width, False, tokens),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=R * P),
    )
    return ids, weights


rank = kernel_or_reference(kernel_rank, plain_rank)
