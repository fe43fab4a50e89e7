"""Acceptance of draft tokens: exact match on trees, and rejection sampling on chains.

Exact match (rule "exact") applies to every temperature and drafter. Each node has the target's
choice for the token after it. A walk from the root moves to the child whose token equals the choice
and stops if there is none. The output tokens of the step are the choices on the path. They depend
on the prefix, the parameters and the seed, never on the draft tokens, so the output equals plain
decoding. The last one, the bonus token, is not in the tree and has no KV yet.

Rejection sampling (rules "rejection" and "block") applies to chains and only replaces the choices.
A row with a temperature chooses the draft token if it is accepted, and otherwise samples from the
residual distribution. Its output has the target distribution but depends on the draft tokens.
Arguments shared by these functions:

  tokens, num_nodes: Chains; node i > 0 is the draft token of level i - 1. choices: The target's own
  choice after each node. Greedy rows keep it, and so does the last node of each chain, whose choice
  is the bonus token. p: Target probabilities after each node. q: Draft probabilities from which the
  draft token of each level was sampled (`draft_probs`), or one-hot if it was not sampled
  (`one_hot_q`). sampling, lengths: Parameters of the rows, and the position of their newest
  tokens. Seed and length select the uniform numbers that decide on each draft token, and the noise
  of the residual, which a row samples at most once per step. Rows at temperature 0 are greedy.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from shared.spec.gumbel_noise import RESIDUAL_STREAM, TARGET_STREAM, uniforms
from shared.spec.sampling import (
    Sampling,
    TokenCounts,
    add_gumbel_noise,
    best,
    is_finite,
    probabilities,
    processed,
)

RULES = ("exact", "rejection", "block")
"""Exact match, rejection sampling token by token, and block verification of a whole chain."""


def force_chain(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    forced: Bool[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Replaces the target's choices of forced rows by the row's own tokens.

    A forced row is a chain of n nodes. Nodes 0 to n - 2 are accepted whatever the target predicts.
    The bonus token is the token of node n - 1, which has no KV, as the newest token never has. The
    row therefore walks as a chain of n - 1 nodes. A forced row of one node has nothing to force.

    Returns:
      The choices and the node counts for `accept_greedy_path`.
    """
    following = np.concatenate([tokens[:, 1:], choices[:, -1:]], axis=1)
    forces = forced & (num_nodes > 1)
    return np.where(forces[:, None], following, choices), num_nodes - forces.astype(num_nodes.dtype)


def simulate(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    rates: tuple[float, ...],
    seeds: UInt32[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Simulates acceptance for benchmarks: accepts draft tokens at given rates, whatever they are.

    Each level of the first-child path is accepted with the rate of its level. Nodes on the accepted
    path choose the draft token of the next level; the last one keeps the target's choice. Its
    children have larger indices, so a node count that ends with it excludes them.

    Args:
      tokens, parents, num_nodes: The trees.
      choices: The target's token after each node.
      rates: Acceptance rate of each level, given that earlier levels are accepted; deeper levels
        are never accepted.
      seeds: Seeds of the rows; with the length they select the uniform numbers.
      lengths: Position of the step's newest token.

    Returns:
      The choices and the node counts for `accept_greedy_path`.
    """
    B, N = tokens.shape
    place, chance = np.arange(N), uniforms(seeds, lengths, len(rates))
    node, goes_on = np.zeros(B, np.int32), np.ones(B, bool)
    for level, rate in enumerate(rates):
        is_child = (parents == node[:, None]) & (place > 0) & (place < num_nodes[:, None])
        goes_on = goes_on & is_child.any(axis=1) & (chance[:, level] < np.float32(rate))
        child = is_child.argmax(axis=1)
        draft = np.take_along_axis(tokens, child[:, None], axis=1)
        choices = np.where(goes_on[:, None] & (place == node[:, None]), draft, choices)
        node = np.where(goes_on, child, node).astype(np.int32)
    return choices, node + 1


def accept_greedy_path(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    depth: int,
) -> tuple[Int[np.ndarray, "B W"], Int[np.ndarray, " B"]]:
    """Follows the target's choices from each root (exact-match acceptance).

    Args:
      tokens, parents: The trees; siblings have different tokens.
      num_nodes: Real nodes of each tree; padding nodes are never accepted.
      choices: The target's token after each node.
      depth: S, the maximum number of accepted draft tokens; W = S + 1.

    Returns:
      The nodes of the path, root first, and their number: accepted draft tokens + 1. Entries past
      the count repeat the last node of the path, so that gathers stay in bounds.
    """
    B, N = tokens.shape
    node = np.zeros(B, np.int32)
    path, counts = [node], np.ones(B, np.int32)
    for _ in range(depth):
        wanted = np.take_along_axis(choices, node[:, None], axis=1)
        is_next = (parents == node[:, None]) & (tokens == wanted)
        is_next &= (np.arange(N) > 0) & (np.arange(N) < num_nodes[:, None])
        has_next = is_next.any(axis=1)
        node = np.where(has_next, is_next.argmax(axis=1), node).astype(np.int32)
        path.append(node)
        counts = counts + has_next.astype(np.int32)
    return np.stack(path, axis=1), counts


def emitted(
    choices: Int[np.ndarray, "B N"], path: Int[np.ndarray, "B W"], counts: Int[np.ndarray, " B"]
) -> Int[np.ndarray, "B W"]:
    """Returns the step's output tokens, the bonus token last; 0 past a row's count (0 for a failed
    row).
    """
    chosen = np.take_along_axis(choices, path, axis=1)
    return np.where(np.arange(path.shape[1]) < counts[:, None], chosen, 0).astype(np.int32)


def failed(is_bad: Bool[np.ndarray, "B N"], path: Int[np.ndarray, "B W"]) -> Bool[np.ndarray, " B"]:
    """Returns True for rows with a non-finite logit on the path; other nodes cannot affect the
    output.
    """
    return np.any(np.take_along_axis(is_bad, path, axis=1), axis=1)


@dataclass(frozen=True)
class AcceptedPath:
    """Accepted path of a verify step in each tree.

    Attributes:
      path, counts: Results of `accept_greedy_path`; the count is 0 for padding and failed rows.
      tokens: Result of `emitted`.
      failed: Result of `failed`; padding does not fail.
      rows: Flat row of each node on the path.
    """

    path: Int[np.ndarray, "B W"]
    counts: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B W"]
    failed: Bool[np.ndarray, " B"]
    rows: Int[np.ndarray, "B W"]


def follow(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    row_of: Int[np.ndarray, "B N"],
    is_finite: Bool[np.ndarray, " R"],
    is_row: Bool[np.ndarray, " B"],
    depth: int,
) -> AcceptedPath:
    """Walks the choices and returns the accepted path with its output tokens.

    Args:
      tokens, parents, num_nodes, choices, depth: See `accept_greedy_path`.
      row_of: Flat row of each node.
      is_finite: True for flat rows with finite logits.
      is_row: False for padding.
    """
    path, counts = accept_greedy_path(tokens, parents, num_nodes, choices, depth)
    has_failed = failed(~is_finite[row_of], path) & is_row
    counts = np.where(is_row & ~has_failed, counts, 0).astype(np.int32)
    rows = np.take_along_axis(row_of, path, axis=1)
    return AcceptedPath(path, counts, emitted(choices, path, counts), has_failed, rows)


def one_hot_q(tokens: Int[np.ndarray, "B N"], vocab: int) -> Float[np.ndarray, "B S vocab"]:
    """Returns one-hot q for draft tokens that were not sampled."""
    return (tokens[:, 1:, None] == np.arange(vocab)).astype(np.float32)


def draft_probs(
    scores: Float[np.ndarray, "B S vocab"], tokens: Int[np.ndarray, "B N"]
) -> Float[np.ndarray, "B S vocab"]:
    """Returns q of draft tokens sampled from the drafter's processed logits.

    If the drafter's probabilities are not finite, q is one-hot on its token; the output still has
    the target distribution.
    """
    B, S, vocab = scores.shape
    with np.errstate(invalid="ignore"):
        q = probabilities(scores.reshape(B * S, vocab)).reshape(B, S, vocab)
    is_law = np.isfinite(q).all(axis=2, keepdims=True)
    return np.where(is_law, q, one_hot_q(tokens, vocab))


def rejection_choices(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    p: Float[np.ndarray, "B N vocab"],
    q: Float[np.ndarray, "B S vocab"],
    sampling: Sampling,
    lengths: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B N"]:
    """Rejection sampling (speculative sampling): accepts each draft token x with probability min(1,
    p(x) / q(x)).

    A rejected token is replaced by a sample from the positive part of p - q.

    Args:
      tokens, num_nodes: The chains.
      choices: The target's own, for rows at temperature 0 and after the last draft token.
      p, q: Target distribution after each node, and draft distribution of each draft token.
      sampling: Parameters of the rows, whose seeds select the noise.
      lengths: Position of the step's newest token, which selects it too.

    Returns:
      The choices for `accept_greedy_path`.

    Source: Leviathan et al. 2023, arXiv:2211.17192.
    """
    chance = uniforms(sampling.seed, lengths, q.shape[1])
    accepted = chance * _of_drafts(q, tokens) < _of_drafts(p, tokens)
    return _decided(tokens, num_nodes, choices, accepted, p, p[:, :-1] - q, sampling, lengths)


def block_choices(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    p: Float[np.ndarray, "B N vocab"],
    q: Float[np.ndarray, "B S vocab"],
    sampling: Sampling,
    lengths: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B N"]:
    """Block verification: accepts the longest passing prefix of a chain, on average more tokens
    than token-by-token rejection sampling.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the first i draft tokens pass with
    probability r / (r + 1 - w_i). r is the mass of the positive part of w_i p - q after them, or
    w_i for the whole chain. The next token is sampled from that positive part.

    Returns:
      The choices for `accept_greedy_path`.

    Source: Block Verification, Sun et al. 2024, arXiv:2403.10444.
    """
    B, S, _ = q.shape
    p_of, q_of = _of_drafts(p, tokens), _of_drafts(q, tokens)
    weight, passes, residuals = np.ones(B, np.float32), [], []
    chance = uniforms(sampling.seed, lengths, S)
    for level in range(S):
        residuals.append(weight[:, None] * p[:, level] - q[:, level])
        ratio = p_of[:, level] / np.where(q_of[:, level] > 0, q_of[:, level], np.float32(1e-30))
        weight = np.minimum(weight * ratio, np.float32(1))
        share = weight
        if level + 1 < S:
            left = np.maximum(weight[:, None] * p[:, level + 1] - q[:, level + 1], 0).sum(axis=1)
            total = left + 1 - weight
            passing = np.where(total > 0, left / np.where(total > 0, total, 1), 1)
            share = np.where(level + 2 < num_nodes, passing, weight)
        passes.append((chance[:, level] < share) & (level + 1 < num_nodes))
    # A draft token is accepted if any prefix that contains it passes.
    accepted = np.cumsum(np.stack(passes, axis=1)[:, ::-1], axis=1)[:, ::-1] > 0
    residual = np.stack(residuals, axis=1)
    return _decided(tokens, num_nodes, choices, accepted, p, residual, sampling, lengths)


JUDGES = {"rejection": rejection_choices, "block": block_choices}
"""Rejection-sampling rules by name."""


def rejection_sample(
    logits: Float[np.ndarray, "R vocab"],
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    sampling: Sampling,
    request: Int[np.ndarray, " R"],
    row_of: Int[np.ndarray, "B N"],
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    drafted: Float[np.ndarray, "B S vocab"],
    allowed: Bool[np.ndarray, "R vocab"] | None,
    rule: str,
) -> tuple[Int[np.ndarray, "B N"], Bool[np.ndarray, " R"]]:
    """Returns the token after each node of chains sampled from the drafter, by rejection sampling.

    Args:
      logits, seen, positions, sampling, request, allowed: Rows of the target, see
        `sampling.choose`.
      row_of: Row of each node.
      tokens, num_nodes: The chains.
      lengths: Position of each chain's root, which selects the noise of the rule.
      drafted: Processed logits from which each draft token was sampled.
      rule: A key of `JUDGES`.

    Returns:
      The choices for `accept_greedy_path`, and a flag for each row: True if its logits are finite.
    """
    scores = processed(logits, seen, positions, sampling, request, allowed)
    chosen = best(add_gumbel_noise(scores, sampling, request, positions, TARGET_STREAM))
    p = probabilities(scores)[row_of]
    q = draft_probs(drafted, tokens)
    choices = JUDGES[rule](tokens, num_nodes, chosen[row_of], p, q, sampling, lengths)
    return choices, is_finite(logits)


def _of_drafts(
    probability: Float[np.ndarray, "B places vocab"], tokens: Int[np.ndarray, "B N"]
) -> Float[np.ndarray, "B S"]:
    drafts = tokens[:, 1:, None]
    return np.take_along_axis(probability[:, : drafts.shape[1]], drafts, axis=2)[:, :, 0]


def _decided(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    accepted: Bool[np.ndarray, "B S"],
    p: Float[np.ndarray, "B N vocab"],
    residual: Float[np.ndarray, "B S vocab"],
    sampling: Sampling,
    lengths: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B N"]:
    """Returns the draft token where it is accepted, else a sample from the positive part of the
    residual.

    If rounding leaves no positive part, p and q are equal, and the sample is from p.
    """
    B, S, vocab = residual.shape
    is_left = residual > 0
    left = np.where(is_left.any(axis=2, keepdims=True), np.where(is_left, residual, 0), p[:, :S])
    with np.errstate(divide="ignore"):
        scores = np.log(left).reshape(B * S, vocab)
    rows = np.repeat(np.arange(B), S)
    drawn = best(add_gumbel_noise(scores, sampling, rows, lengths[rows], RESIDUAL_STREAM)).reshape(
        B, S
    )
    decided = np.where(accepted, tokens[:, 1:], drawn)
    is_judged = (np.arange(S) + 1 < num_nodes[:, None]) & (sampling.temperature > 0)[:, None]
    judged = np.where(is_judged, decided, choices[:, :S])
    return np.concatenate([judged, choices[:, S:]], axis=1).astype(np.int32)
