"""Acceptance of draft tokens: exact match, rejection sampling; same as `shared.spec.acceptance`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import Kernels, cond_any, kernel_or_reference
from jax_impl.ops.sampling.gumbel_noise import uniforms
from jax_impl.ops.sampling.sampling import (
    Sampling,
    TokenCounts,
    add_shared_gumbel_noise,
    best,
    is_finite,
    probabilities,
    processed,
)
from jax_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    all_of,
    any_of,
    at,
    mass,
    spread,
    whole,
)
from shared.spec.gumbel_noise import ACCEPT_STREAM, RESIDUAL_STREAM, TARGET_STREAM


def force_chain(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    forced: Bool[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Replaces the target's choices of forced rows by the row's own tokens."""
    following = jnp.concatenate([tokens[:, 1:], choices[:, -1:]], axis=1)
    forces = forced & (num_nodes > 1)
    return jnp.where(forces[:, None], following, choices), num_nodes - forces.astype(jnp.int32)


def simulate(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    rates: tuple[float, ...],
    seeds: UInt32[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Simulates acceptance at the given rates, whatever the tokens are."""
    B, N = tokens.shape
    place, chance = jnp.arange(N), uniforms(seeds, lengths, len(rates))
    is_draft = (place > 0) & (place < num_nodes[:, None])
    node, goes_on = jnp.zeros(B, jnp.int32), jnp.ones(B, bool)
    for level, rate in enumerate(rates):
        is_child = is_draft & (parents == node[:, None])
        goes_on = goes_on & is_child.any(axis=1) & (chance[:, level] < rate)
        child = jnp.argmax(is_child, axis=1).astype(jnp.int32)
        draft = jnp.take_along_axis(tokens, child[:, None], axis=1)
        choices = jnp.where(goes_on[:, None] & (place == node[:, None]), draft, choices)
        node = jnp.where(goes_on, child, node)
    return choices, node + 1


def accept_greedy_path(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    depth: int,
    is_chain: bool = False,
) -> tuple[Int[jax.Array, "B W"], Int[jax.Array, " B"]]:
    """Follows the target's choices from each root; returns the accepted nodes and their number.

    For a chain this is the longest prefix of draft tokens that equal the choices.
    """
    B, N = tokens.shape
    numbers = jnp.arange(N, dtype=jnp.int32)
    if is_chain:
        is_next = (tokens[:, 1:] == choices[:, :-1]) & (numbers[1:] < num_nodes[:, None])
        last = jnp.cumprod(is_next.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        return jnp.minimum(numbers[: depth + 1], last[:, None]), last + 1
    is_draft = (numbers > 0) & (numbers < num_nodes[:, None])
    node, counts = jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.int32)
    path = [node]
    for _ in range(depth):
        wanted = jnp.take_along_axis(choices, node[:, None], axis=1)
        is_next = is_draft & (parents == node[:, None]) & (tokens == wanted)
        has_next = is_next.any(axis=1)
        node = jnp.where(has_next, jnp.argmax(is_next, axis=1).astype(jnp.int32), node)
        path.append(node)
        counts = counts + has_next.astype(jnp.int32)
    return jnp.stack(path, axis=1), counts


def emitted(
    choices: Int[jax.Array, "B N"], path: Int[jax.Array, "B W"], counts: Int[jax.Array, " B"]
) -> Int[jax.Array, "B W"]:
    """Returns the step's tokens, the bonus token last; 0 past a row's count."""
    chosen = jnp.take_along_axis(choices, path, axis=1)
    return jnp.where(jnp.arange(path.shape[1]) < counts[:, None], chosen, 0)


def failed(is_bad: Bool[jax.Array, "B N"], path: Int[jax.Array, "B W"]) -> Bool[jax.Array, " B"]:
    """Returns True for rows with a non-finite logit on the path; other nodes affect no output."""
    return jnp.take_along_axis(is_bad, path, axis=1).any(axis=1)


class AcceptedPath(NamedTuple):
    """Accepted path of each tree; same fields as in the specification."""

    path: Int[jax.Array, "B W"]
    counts: Int[jax.Array, " B"]
    tokens: Int[jax.Array, "B W"]
    failed: Bool[jax.Array, " B"]
    rows: Int[jax.Array, "B W"]


def plain_follow(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    row_of: Int[jax.Array, "B N"],
    is_finite: Bool[jax.Array, " R"],
    is_row: Bool[jax.Array, " B"],
    depth: int,
    is_chain: bool = False,
) -> AcceptedPath:
    """Follows the choices; returns the accepted path and the emitted tokens."""
    path, counts = accept_greedy_path(tokens, parents, num_nodes, choices, depth, is_chain)
    has_failed = failed(~is_finite[row_of], path) & is_row
    counts = jnp.where(is_row & ~has_failed, counts, 0)
    rows = jnp.take_along_axis(row_of, path, axis=1)
    return AcceptedPath(path, counts, emitted(choices, path, counts), has_failed, rows)


def kernel_follow(
    kernels: Kernels,
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    row_of: Int[jax.Array, "B N"],
    is_finite: Bool[jax.Array, " R"],
    is_row: Bool[jax.Array, " B"],
    depth: int,
    is_chain: bool = False,
) -> AcceptedPath:
    """Same as `plain_follow`; a chain is handled like any tree."""
    given = (tokens, parents, num_nodes, choices, row_of, is_finite, is_row)
    return AcceptedPath(*kernels.acceptance.follow(*given, depth))


follow = kernel_or_reference(kernel_follow, plain_follow)


def one_hot_q(tokens: Int[jax.Array, "B N"], vocab: int) -> Float[jax.Array, "B S vocab"]:
    """Returns q for drafts that were not sampled: one-hot distributions."""
    return jax.nn.one_hot(tokens[:, 1:], vocab)


def draft_probs(
    scores: Float[jax.Array, "B S vocab"],
    tokens: Int[jax.Array, "B N"],
    vocabulary: Vocabulary = ALL,
) -> Float[jax.Array, "B S vocab"]:
    """Returns q for drafts sampled from the drafter's processed logits."""
    B, S, vocab = scores.shape
    q = probabilities(scores.reshape(B * S, vocab), vocabulary)
    is_law = all_of(jnp.isfinite(q).all(axis=1), vocabulary).reshape(B, S, 1)
    return jnp.where(is_law, q.reshape(B, S, vocab), one_hot_q(tokens, vocab))


def rejection_choices(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    p: Float[jax.Array, "B N vocab"],
    q: Float[jax.Array, "B S vocab"],
    sampling: Sampling,
    lengths: Int[jax.Array, " B"],
    vocabulary: Vocabulary = ALL,
) -> Int[jax.Array, "B N"]:
    """Accepts draft x with probability min(1, p(x) / q(x)), else samples from the residual."""
    chance = uniforms(sampling.seed, lengths, q.shape[1])
    p_of, q_of = _of_drafts(p, tokens, vocabulary), _of_drafts(q, tokens, vocabulary)
    given = (tokens, num_nodes, choices, chance * q_of < p_of, p, p[:, :-1] - q)
    return _decided(*given, sampling, lengths, vocabulary)


def block_choices(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    p: Float[jax.Array, "B N vocab"],
    q: Float[jax.Array, "B S vocab"],
    sampling: Sampling,
    lengths: Int[jax.Array, " B"],
    vocabulary: Vocabulary = ALL,
) -> Int[jax.Array, "B N"]:
    """Block verification: accepts the longest passing prefix, then samples from the residual."""
    S = q.shape[1]
    p_of, q_of = _of_drafts(p, tokens, vocabulary), _of_drafts(q, tokens, vocabulary)
    weight, passes, residuals = jnp.ones(len(p), jnp.float32), [], []
    chance = uniforms(sampling.seed, lengths, S)
    for level in range(S):
        residuals.append(weight[:, None] * p[:, level] - q[:, level])
        ratio = p_of[:, level] / jnp.where(q_of[:, level] > 0, q_of[:, level], 1e-30)
        weight = jnp.minimum(weight * ratio, 1)
        share = weight
        if level + 1 < S:
            after = weight[:, None] * p[:, level + 1] - q[:, level + 1]
            left = mass(after, vocabulary)
            total = left + 1 - weight
            passing = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), 1)
            share = jnp.where(level + 2 < num_nodes, passing, weight)
        passes.append((chance[:, level] < share) & (level + 1 < num_nodes))
    # A draft is accepted if a prefix that contains it passes.
    reached = jnp.cumsum(jnp.stack(passes, axis=1)[:, ::-1].astype(jnp.int32), axis=1)
    accepted, residual = reached[:, ::-1] > 0, jnp.stack(residuals, axis=1)
    given = (tokens, num_nodes, choices, accepted, p, residual)
    return _decided(*given, sampling, lengths, vocabulary)


JUDGES = {"rejection": rejection_choices, "block": block_choices}
"""The rules that judge sampled drafts."""


def plain_rejection_sample(
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    row_of: Int[jax.Array, "B N"],
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    drafted: Float[jax.Array, "B S vocab"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    rule: str,
    vocabulary: Vocabulary = ALL,
) -> tuple[Int[jax.Array, "B N"], Bool[jax.Array, " R"]]:
    """Chooses the token after each node of sampled chains by rejection sampling.

    With TP, target and draft logits are this rank's shard.
    """
    scores = spread(logits, vocabulary)
    scores = processed(scores, seen, positions, sampling, request, allowed, vocabulary)[row_of]
    B, N, vocab = scores.shape

    def judged(scores: Float[jax.Array, "B N vocab"]) -> Int[jax.Array, "B N"]:
        # Only a chain's last node uses the target's noise.
        noisy = add_shared_gumbel_noise(scores, sampling, lengths + num_nodes, TARGET_STREAM)
        chosen = best(noisy.reshape(B * N, vocab), vocabulary).reshape(B, N)
        p = probabilities(scores.reshape(B * N, vocab), vocabulary).reshape(B, N, vocab)
        q = draft_probs(drafted, tokens, vocabulary)
        return JUDGES[rule](tokens, num_nodes, chosen, p, q, sampling, lengths, vocabulary)

    def greedy(scores: Float[jax.Array, "B N vocab"]) -> Int[jax.Array, "B N"]:
        return best(scores.reshape(B * N, vocab), vocabulary).reshape(B, N)

    choices = cond_any(sampling.temperature > 0, judged, greedy, scores)
    return choices, is_finite(logits, vocabulary)


def kernel_rejection_sample(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    row_of: Int[jax.Array, "B N"],
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    drafted: Float[jax.Array, "B S vocab"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    rule: str,
    vocabulary: Vocabulary = ALL,
) -> tuple[Int[jax.Array, "B N"], Bool[jax.Array, " R"]]:
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
    probability: Float[jax.Array, "B places vocab"],
    tokens: Int[jax.Array, "B N"],
    vocabulary: Vocabulary,
) -> Float[jax.Array, "B S"]:
    drafts, vocab = tokens[:, 1:], probability.shape[2]
    after = probability[:, : drafts.shape[1]].reshape(-1, vocab)
    return at(after, drafts.reshape(-1, 1), vocabulary).reshape(drafts.shape)


def _decided(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    accepted: Bool[jax.Array, "B S"],
    p: Float[jax.Array, "B N vocab"],
    residual: Float[jax.Array, "B S vocab"],
    sampling: Sampling,
    lengths: Int[jax.Array, " B"],
    vocabulary: Vocabulary,
) -> Int[jax.Array, "B N"]:
    """Returns accepted draft tokens, and else samples from the positive part of the residual."""
    B, S, vocab = residual.shape
    is_left = any_of((residual > 0).any(axis=2).reshape(-1), vocabulary).reshape(B, S, 1)
    left = jnp.where(is_left, jnp.maximum(residual, 0), p[:, :S])
    scores = add_shared_gumbel_noise(jnp.log(left), sampling, lengths, RESIDUAL_STREAM)
    drawn = best(scores.reshape(B * S, vocab), vocabulary).reshape(B, S)
    decided = jnp.where(accepted, tokens[:, 1:], drawn)
    is_judged = (jnp.arange(S) + 1 < num_nodes[:, None]) & (sampling.temperature > 0)[:, None]
    judged = jnp.where(is_judged, decided, choices[:, :S])
    return jnp.concatenate([judged, choices[:, S:]], axis=1)
