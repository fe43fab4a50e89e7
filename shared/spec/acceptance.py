"""Which drafts of a tree become text.

By the match rule, for every temperature and every drafter, each node has the target's choice for
the token after it. From the root, the walk goes to the child that carries the choice, and stops
where there is none. The tokens of the step are the choices on the way, so they depend on the
prefix, the parameters and the seed, never on the drafts; the last one, the bonus token, is not in
the tree and has no KV yet.

The rejection rule, for chains, changes the choices and nothing else: a row with a temperature
chooses the draft where it accepts it, and draws from what the drafter left over where it does not.
Its text has the target's law, but depends on the drafts. Each function takes what follows:

  tokens, num_nodes: Chains; node i > 0 is the draft of level i - 1.
  choices: The target's own choice after each node; greedy rows keep theirs, and so does the last
    node of each chain, whose choice is the bonus token.
  p: The target's probabilities after each node.
  q: The drafter's, from which the draft of each level was sampled (`sampled_law`), or all on the
    draft's token where it was not sampled (`certain_law`).
  sampling, lengths: Parameters of the rows, and the position of their newest tokens: seed and
    length name the number that decides on each draft, and the noise of the residual, which a step
    draws from at most once a row. At temperature 0 a row is greedy.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from shared.spec.noise import RESIDUAL_STREAM, TARGET_STREAM, uniforms
from shared.spec.sampling import (
    Sampling,
    Seen,
    best,
    is_finite,
    perturbed,
    probabilities,
    processed,
)

RULES = ("exact", "rejection", "block")
"""Match, rejection token by token, and rejection that judges a chain as a whole."""


def force(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    forced: Bool[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Puts a forced row's own tokens in the place of the target's choices.

    A forced row is a chain of n nodes. Nodes 0 to n - 2 are accepted whatever the target says, and
    the bonus token is the token of node n - 1: it has no KV, as the newest token never has, and so
    the row walks as one of n - 1 nodes. A forced row of one node has nothing to force.

    Returns:
      The choices and the node counts with which to `walk`.
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
    """Accepts drafts by lot, whatever they say: for measurements of speed.

    The way leads from the root to the first child of each node, as far as the lot and the tree go.
    The nodes on it but the last choose the draft that follows; the last one keeps the target's
    choice. Its children come after it, so a count of nodes that ends with it leaves them out.

    Args:
      tokens, parents, num_nodes: The trees.
      choices: The target's token after each node.
      rates: For each level how often a draft is accepted, given those before it; never beyond.
      seeds: Of the rows; with the length one names the numbers that decide.
      lengths: The position of the step's newest token.

    Returns:
      The choices and the node counts with which to `walk`.
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


def walk(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    depth: int,
) -> tuple[Int[np.ndarray, "B W"], Int[np.ndarray, " B"]]:
    """Follows the target's choices from each root.

    Args:
      tokens, parents: The trees; siblings carry different tokens.
      num_nodes: Real nodes of each tree; the others are never accepted.
      choices: The target's token after each node.
      depth: S, the most drafts that can be accepted; W = S + 1.

    Returns:
      The nodes on the way, the root first, and how many there are: accepted drafts + 1. Entries
      past the count repeat the last node of the way, so that a gather stays in the tree.
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
    """The step's tokens, the bonus token last; 0 past a row's count (0: a failed row)."""
    chosen = np.take_along_axis(choices, path, axis=1)
    return np.where(np.arange(path.shape[1]) < counts[:, None], chosen, 0).astype(np.int32)


def failed(is_bad: Bool[np.ndarray, "B N"], path: Int[np.ndarray, "B W"]) -> Bool[np.ndarray, " B"]:
    """Whether a logit on the way was not finite; elsewhere in the tree it cannot reach the text."""
    return np.any(np.take_along_axis(is_bad, path, axis=1), axis=1)


@dataclass(frozen=True)
class Followed:
    """The way that a verify goes down each tree.

    Attributes:
      path, counts: Of `walk`; the count is 0 where a row is padding or has failed.
      tokens: Of `emitted`.
      failed: Of `failed`; padding does not fail.
      rows: The flat row of each node on the way.
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
) -> Followed:
    """Goes the way of the choices, and says what it emits.

    Args:
      tokens, parents, num_nodes, choices, depth: See `walk`.
      row_of: The flat row of each node.
      is_finite: Whether the logits of a flat row are.
      is_row: False for padding.
    """
    path, counts = walk(tokens, parents, num_nodes, choices, depth)
    has_failed = failed(~is_finite[row_of], path) & is_row
    counts = np.where(is_row & ~has_failed, counts, 0).astype(np.int32)
    rows = np.take_along_axis(row_of, path, axis=1)
    return Followed(path, counts, emitted(choices, path, counts), has_failed, rows)


def certain_law(tokens: Int[np.ndarray, "B N"], vocab: int) -> Float[np.ndarray, "B S vocab"]:
    """q of drafts that were not sampled: each is certain."""
    return (tokens[:, 1:, None] == np.arange(vocab)).astype(np.float32)


def sampled_law(
    scores: Float[np.ndarray, "B S vocab"], tokens: Int[np.ndarray, "B N"]
) -> Float[np.ndarray, "B S vocab"]:
    """q of drafts sampled from the drafter's processed logits.

    A drafter that is not finite drafts what it likes, which makes its token a certain one; the text
    has the target's law all the same.
    """
    B, S, vocab = scores.shape
    with np.errstate(invalid="ignore"):
        q = probabilities(scores.reshape(B * S, vocab)).reshape(B, S, vocab)
    is_law = np.isfinite(q).all(axis=2, keepdims=True)
    return np.where(is_law, q, certain_law(tokens, vocab))


def rejection_choices(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    p: Float[np.ndarray, "B N vocab"],
    q: Float[np.ndarray, "B S vocab"],
    sampling: Sampling,
    lengths: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B N"]:
    """Accepts each draft x with probability min(1, p(x) / q(x)).

    A rejected one gives way to a token drawn from the positive part of p - q.

    Args:
      tokens, num_nodes: The chains.
      choices: The target's own, for rows at temperature 0 and after the last draft.
      p, q: The target's law after each node, and the drafter's of each draft.
      sampling: Parameters of the rows, whose seeds name the noise.
      lengths: The position of the step's newest token, which names it too.

    Returns:
      The choices with which to `walk`.

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
    """Accepts the longest prefix of a chain that passes; on average more than token by token.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the first i drafts pass with
    probability r / (r + 1 - w_i), where r is the mass of the positive part of w_i p - q after them,
    or w_i where they are all. What follows them is drawn from that positive part.

    Returns:
      The choices with which to `walk`.

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
    # A draft is accepted where a prefix passes that reaches it.
    accepted = np.cumsum(np.stack(passes, axis=1)[:, ::-1], axis=1)[:, ::-1] > 0
    residual = np.stack(residuals, axis=1)
    return _decided(tokens, num_nodes, choices, accepted, p, residual, sampling, lengths)


JUDGES = {"rejection": rejection_choices, "block": block_choices}
"""The rules that judge sampled drafts."""


def judge(
    logits: Float[np.ndarray, "R vocab"],
    seen: Seen,
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
    """The token after each node of chains that were sampled from the drafter.

    Args:
      logits, seen, positions, sampling, request, allowed: Of the target's rows, as in `choose`.
      row_of: The row of each node.
      tokens, num_nodes: The chains.
      lengths: The position of each chain's root, which names the noise of the rule.
      drafted: The processed logits that each draft was sampled from.
      rule: A name of `JUDGES`.

    Returns:
      The choices with which to `walk`, and the rows whose logits are finite, all of them.
    """
    scores = processed(logits, seen, positions, sampling, request, allowed)
    chosen = best(perturbed(scores, sampling, request, positions, TARGET_STREAM))
    p = probabilities(scores)[row_of]
    q = sampled_law(drafted, tokens)
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
    """The draft where it is accepted, else a token drawn from the residual's positive part.

    Where rounding leaves the residual without one, p and q are equal, and it is drawn from p.
    """
    B, S, vocab = residual.shape
    is_left = residual > 0
    left = np.where(is_left.any(axis=2, keepdims=True), np.where(is_left, residual, 0), p[:, :S])
    with np.errstate(divide="ignore"):
        scores = np.log(left).reshape(B * S, vocab)
    rows = np.repeat(np.arange(B), S)
    drawn = best(perturbed(scores, sampling, rows, lengths[rows], RESIDUAL_STREAM)).reshape(B, S)
    decided = np.where(accepted, tokens[:, 1:], drawn)
    is_judged = (np.arange(S) + 1 < num_nodes[:, None]) & (sampling.temperature > 0)[:, None]
    judged = np.where(is_judged, decided, choices[:, :S])
    return np.concatenate([judged, choices[:, S:]], axis=1).astype(np.int32)
