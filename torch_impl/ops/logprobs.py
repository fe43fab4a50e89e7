"""As `shared.spec.logprobs`, in torch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.ops import any_row
from torch_impl.ops.sampling import log_softmax, top_candidates


def chosen(logits: Float[Tensor, "R vocab"], ids: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    return log_softmax(logits).gather(1, ids.long()[:, None])[:, 0]


def top(
    logits: Float[Tensor, "R vocab"], k: int
) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    ids = top_candidates(logits, k)
    return ids, log_softmax(logits).gather(1, ids.long())


def reported(
    logits: Float[Tensor, "R vocab"],
    row_of: Int[Tensor, "B W"],
    tokens: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    reports: Bool[Tensor, " B"],
    k: int,
) -> tuple[Float[Tensor, "B W"], Int[Tensor, "B W k"], Float[Tensor, "B W k"]]:
    """What a step reports of its tokens, else 0; where no row reports, a CPU computes nothing."""
    B, W = tokens.shape
    is_reported = (torch.arange(W, device=tokens.device) < counts[:, None]) & reports[:, None]
    if not any_row(is_reported):
        zeros = logits.new_zeros(B, W, k)
        return zeros[:, :, 0], zeros.int(), zeros
    rows, is_top = logits[row_of.flatten()], is_reported[:, :, None]
    logprob = chosen(rows, tokens.flatten()).view(B, W)
    ids, values = (best.view(B, W, k) for best in top(rows, k))
    return (
        torch.where(is_reported, logprob, 0),
        torch.where(is_top, ids, 0),
        torch.where(is_top, values, 0),
    )


def scored(
    logits: Float[Tensor, "R vocab"], ids: Int[Tensor, " R"], k: int
) -> tuple[Float[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    logit = logits.gather(1, ids.long()[:, None])
    places = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits == logit) & (places < ids[:, None])
    ranks = 1 + ((logits > logit) | is_before).sum(dim=1, dtype=torch.int32)
    return chosen(logits, ids), ranks, *top(logits, k)
