"""Acceptance of draft tokens: exact match, rejection sampling; same as `shared.spec.acceptance`."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.gumbel_noise import ACCEPT_STREAM, RESIDUAL_STREAM, TARGET_STREAM
from torch_impl.ops import Kernels, any_row_set, kernel_or_reference
from torch_impl.ops.sampling.gumbel_noise import uniforms
from torch_impl.ops.sampling.sampling import (
    Sampling,
    TokenCounts,
    add_shared_gumbel_noise,
    best,
    is_finite,
    probabilities,
    processed,
)
from torch_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    all_of,
    any_of,
    at,
    mass,
    spread,
    whole,
)


def force_chain(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    forced: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, " B"]]:
    following = torch.cat([tokens[:, 1:], choices[:, -1:]], dim=1)
    forces = forced & (num_nodes > 1)
    return torch.where(forces[:, None], following, choices), num_nodes - forces.int()


def simulate(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    rates: tuple[float, ...],
    seeds: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
) -> tuple[Int[Tensor, "B N"], Int[Tensor, " B"]]:
    place = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    is_draft, chance = (
        (place > 0) & (place < num_nodes[:, None]),
        uniforms(seeds, lengths, len(rates)),
    )
    node, goes_on = torch.zeros_like(num_nodes), torch.ones_like(num_nodes, dtype=torch.bool)
    for level, rate in enumerate(rates):
        is_child = (parents == node[:, None]) & is_draft
        goes_on = goes_on & is_child.any(dim=1) & (chance[:, level] < rate)
        child = is_child.int().argmax(dim=1).int()
        draft = tokens.gather(1, child[:, None].long())
        choices = torch.where(goes_on[:, None] & (place == node[:, None]), draft, choices)
        node = torch.where(goes_on, child, node)
    return choices, node + 1


def accept_greedy_path(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    depth: int,
    is_chain: bool = False,
) -> tuple[Int[Tensor, "B W"], Int[Tensor, " B"]]:
    """Follows the target's choices from each root; returns the accepted nodes and their number.

    For a chain this is the longest prefix of draft tokens that equal the choices.
    """
    number = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    if is_chain:
        is_next = (tokens[:, 1:] == choices[:, :-1]) & (number[1:] < num_nodes[:, None])
        last = is_next.int().cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
        return torch.minimum(number[: depth + 1], last[:, None]), last + 1
    is_draft = (number > 0) & (number < num_nodes[:, None])
    node, counts = torch.zeros_like(num_nodes), torch.ones_like(num_nodes)
    path = [node]
    for _ in range(depth):
        wanted = choices.gather(1, node[:, None].long())
        is_next = (parents == node[:, None]) & (tokens == wanted) & is_draft
        has_next = is_next.any(dim=1)
        node = torch.where(has_next, is_next.int().argmax(dim=1).int(), node)
        path.append(node)
        counts = counts + has_next.int()
    return torch.stack(path, dim=1), counts


def emitted(
    choices: Int[Tensor, "B N"], path: Int[Tensor, "B W"], counts: Int[Tensor, " B"]
) -> Int[Tensor, "B W"]:
    place = torch.arange(path.shape[1], device=path.device)
    return torch.where(place < counts[:, None], choices.gather(1, path.long()), 0).int()


def failed(is_bad: Bool[Tensor, "B N"], path: Int[Tensor, "B W"]) -> Bool[Tensor, " B"]:
    return is_bad.gather(1, path.long()).any(dim=1)


@dataclass(frozen=True)
class AcceptedPath:
    """Accepted path of each tree; same fields as in the specification."""

    path: Int[Tensor, "B W"]
    counts: Int[Tensor, " B"]
    tokens: Int[Tensor, "B W"]
    failed: Bool[Tensor, " B"]
    rows: Int[Tensor, "B W"]


def plain_follow(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    is_finite: Bool[Tensor, " R"],
    is_row: Bool[Tensor, " B"],
    depth: int,
    is_chain: bool = False,
) -> AcceptedPath:
    path, counts = accept_greedy_path(tokens, parents, num_nodes, choices, depth, is_chain)
    has_failed = failed(~is_finite[row_of], path) & is_row
    counts = torch.where(is_row & ~has_failed, counts, 0)
    rows = row_of.gather(1, path.long())
    return AcceptedPath(path, counts, emitted(choices, path, counts), has_failed, rows)


def kernel_follow(
    kernels: Kernels,
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    is_finite: Bool[Tensor, " R"],
    is_row: Bool[Tensor, " B"],
    depth: int,
    is_chain: bool = False,
) -> AcceptedPath:
    """Same as `plain_follow`; a chain is handled like any tree."""
    given = (tokens, parents, num_nodes, choices, row_of, is_finite, is_row)
    return AcceptedPath(*kernels.acceptance.follow(*given, depth))


follow = kernel_or_reference(kernel_follow, plain_follow)


def one_hot_q(tokens: Int[Tensor, "B N"], vocab: int) -> Float[Tensor, "B S vocab"]:
    ids = torch.arange(vocab, dtype=torch.int32, device=tokens.device)
    return (tokens[:, 1:, None] == ids).float()


def draft_probs(
    scores: Float[Tensor, "B S vocab"], tokens: Int[Tensor, "B N"], vocabulary: Vocabulary = ALL
) -> Float[Tensor, "B S vocab"]:
    q = probabilities(scores.flatten(0, 1), vocabulary)
    is_law = all_of(q.isfinite().all(dim=1), vocabulary).view(*scores.shape[:2], 1)
    return torch.where(is_law, q.view_as(scores), one_hot_q(tokens, scores.shape[2]))


def rejection_choices(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    p: Float[Tensor, "B N vocab"],
    q: Float[Tensor, "B S vocab"],
    sampling: Sampling,
    lengths: Int[Tensor, " B"],
    vocabulary: Vocabulary = ALL,
) -> Int[Tensor, "B N"]:
    chance = uniforms(sampling.seed, lengths, q.shape[1])
    p_of, q_of = _of_drafts(p, tokens, vocabulary), _of_drafts(q, tokens, vocabulary)
    given = (tokens, num_nodes, choices, chance * q_of < p_of, p, p[:, :-1] - q)
    return _decided(*given, sampling, lengths, vocabulary)


def block_choices(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    p: Float[Tensor, "B N vocab"],
    q: Float[Tensor, "B S vocab"],
    sampling: Sampling,
    lengths: Int[Tensor, " B"],
    vocabulary: Vocabulary = ALL,
) -> Int[Tensor, "B N"]:
    S = q.shape[1]
    p_of, q_of = _of_drafts(p, tokens, vocabulary), _of_drafts(q, tokens, vocabulary)
    weight, passes, residuals = torch.ones_like(p_of[:, 0]), [], []
    chance = uniforms(sampling.seed, lengths, S)
    for level in range(S):
        residuals.append(weight[:, None] * p[:, level] - q[:, level])
        ratio = p_of[:, level] / torch.where(q_of[:, level] > 0, q_of[:, level], 1e-30)
        weight = (weight * ratio).clamp(max=1)
        share = weight
        if level + 1 < S:
            after = weight[:, None] * p[:, level + 1] - q[:, level + 1]
            left = mass(after, vocabulary)
            total = left + 1 - weight
            passing = torch.where(total > 0, left / torch.where(total > 0, total, 1), 1)
            share = torch.where(level + 2 < num_nodes, passing, weight)
        passes.append((chance[:, level] < share) & (level + 1 < num_nodes))
    # A draft is accepted if a prefix that contains it passes.
    accepted = torch.stack(passes[::-1], dim=1).int().cumsum(dim=1).flip(1) > 0
    residual = torch.stack(residuals, dim=1)
    given = (tokens, num_nodes, choices, accepted, p, residual)
    return _decided(*given, sampling, lengths, vocabulary)


JUDGES = {"rejection": rejection_choices, "block": block_choices}
"""The rules that judge sampled drafts."""


def plain_rejection_sample(
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    row_of: Int[Tensor, "B N"],
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    drafted: Float[Tensor, "B S vocab"],
    allowed: Bool[Tensor, "R vocab"] | None,
    rule: str,
    vocabulary: Vocabulary = ALL,
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " R"]]:
    """Chooses the token after each node of sampled chains by rejection sampling.

    Only a chain's last node uses the target's noise. With TP, target and draft logits are this
    rank's shard.
    """
    scores = spread(logits, vocabulary)
    scores = processed(scores, seen, positions, sampling, request, allowed, vocabulary)[row_of]
    after = add_shared_gumbel_noise(scores, sampling, lengths + num_nodes, TARGET_STREAM)
    choices = best(after.flatten(0, 1), vocabulary).view_as(tokens)
    if not any_row_set(sampling.temperature > 0):
        return choices, is_finite(logits, vocabulary)
    p = probabilities(scores.flatten(0, 1), vocabulary).view_as(scores)
    law = draft_probs(drafted, tokens, vocabulary)
    choices = JUDGES[rule](tokens, num_nodes, choices, p, law, sampling, lengths, vocabulary)
    return choices, is_finite(logits, vocabulary)


def kernel_rejection_sample(
    kernels: Kernels,
    logits: Float[Tensor, "R share"],
    seen: TokenCounts,
    positions: Int[Tensor, " R"],
    sampling: Sampling,
    request: Int[Tensor, " R"],
    row_of: Int[Tensor, "B N"],
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    drafted: Float[Tensor, "B S vocab"],
    allowed: Bool[Tensor, "R vocab"] | None,
    rule: str,
    vocabulary: Vocabulary = ALL,
) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " R"]]:
    """Same as `plain_rejection_sample`; the kernels read both distributions as whole logits."""
    chosen, is_finite, scores = kernels.sampling.score(
        *(whole(logits, vocabulary), seen, positions, sampling, request, allowed),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    choices = kernels.rejection.rejection_sample(
        *(tokens, num_nodes, chosen[row_of], row_of, scores, drafted),
        *(sampling.temperature, sampling.seed, lengths),
        is_block=rule == "block",
        accept_stream=ACCEPT_STREAM,
        residual_stream=RESIDUAL_STREAM,
    )
    return choices, is_finite


rejection_sample = kernel_or_reference(kernel_rejection_sample, plain_rejection_sample)


def _of_drafts(
    probability: Float[Tensor, "B places vocab"], tokens: Int[Tensor, "B N"], vocabulary: Vocabulary
) -> Float[Tensor, "B S"]:
    drafts = tokens[:, 1:]
    after = probability[:, : drafts.shape[1]].flatten(0, 1)
    return at(after, drafts.reshape(-1, 1), vocabulary).view(drafts.shape)


def _decided(
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    accepted: Bool[Tensor, "B S"],
    p: Float[Tensor, "B N vocab"],
    residual: Float[Tensor, "B S vocab"],
    sampling: Sampling,
    lengths: Int[Tensor, " B"],
    vocabulary: Vocabulary,
) -> Int[Tensor, "B N"]:
    B, S, _ = residual.shape
    is_left = any_of((residual > 0).any(dim=2).flatten(), vocabulary).view(B, S, 1)
    left = torch.where(is_left, residual.clamp(min=0), p[:, :S])
    noisy = add_shared_gumbel_noise(left.log(), sampling, lengths, RESIDUAL_STREAM)
    drawn = best(noisy.flatten(0, 1), vocabulary).view(B, S)
    decided = torch.where(accepted, tokens[:, 1:], drawn)
    place = torch.arange(S, dtype=torch.int32, device=tokens.device)
    is_judged = (place + 1 < num_nodes[:, None]) & (sampling.temperature > 0)[:, None]
    judged = torch.where(is_judged, decided, choices[:, :S])
    return torch.cat([judged, choices[:, S:]], dim=1)
