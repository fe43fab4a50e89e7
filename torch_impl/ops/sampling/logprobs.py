"""Logprobs of output tokens and of the top tokens; same as `shared.spec.logprobs`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops import any_row_set
from torch_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    added,
    at,
    best_of,
    log_probabilities,
    norm,
    spread,
)


def chosen(
    rows: Float[Tensor, "R vocab"], ids: Int[Tensor, " R"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, " R"]:
    return log_probabilities(at(rows, ids[:, None], vocabulary), norm(rows, vocabulary))[:, 0]


def top(
    rows: Float[Tensor, "R vocab"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    values, ids = best_of(rows, k, vocabulary)
    return ids, log_probabilities(values, norm(rows, vocabulary))


def output_logprobs(
    logits: Float[Tensor, "R share"],
    row_of: Int[Tensor, "B W"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    reports: Bool[Tensor, " B"],
    k: int,
    vocabulary: Vocabulary = ALL,
) -> tuple[Float[Tensor, "B W"], Int[Tensor, "B W k"], Float[Tensor, "B W k"]]:
    """Computes the logprobs of a step's tokens, 0 for other rows; a CPU may skip it."""
    B, W = tokens.shape
    is_reported = (torch.arange(W, device=tokens.device) < counts[:, None]) & reports[:, None]
    if not any_row_set(is_reported):
        zeros = logits.new_zeros(B, W, k)
        return zeros[:, :, 0], zeros.int(), zeros
    rows, is_top = spread(logits[row_of.flatten()], vocabulary), is_reported[:, :, None]
    logprob = chosen(rows, tokens.flatten(), vocabulary).view(B, W)
    ids, values = (best.view(B, W, k) for best in top(rows, k, vocabulary))
    return (
        torch.where(is_reported, logprob, 0),
        torch.where(is_top, ids, 0),
        torch.where(is_top, values, 0),
    )


def prompt_logprobs(
    logits: Float[Tensor, "R share"], ids: Int[Tensor, " R"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Float[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    rows = spread(logits, vocabulary)
    logit = at(rows, ids[:, None], vocabulary)
    places = torch.arange(rows.shape[1], device=rows.device)
    is_before = (rows > logit) | ((rows == logit) & (places < ids[:, None]))
    before = added(is_before.sum(dim=1, keepdim=True, dtype=torch.int32), vocabulary)
    return chosen(rows, ids, vocabulary), 1 + before[:, 0], *top(rows, k, vocabulary)
