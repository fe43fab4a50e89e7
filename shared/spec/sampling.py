"""Token sampling: penalties, temperature, top-k, top-p and min-p, and the Gumbel-max choice.

At position t of a request with seed s the token is the first maximum of `processed(logits) +
gumbel(s, t)`, and at temperature 0 of `processed(logits)`. The noise is defined in
`shared.spec.gumbel_noise`.
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32
from jaxtyping import Float32 as F32
from jaxtyping import Int32 as I32

from shared.spec import draft_tree
from shared.spec.gumbel_noise import TARGET_STREAM, gumbel

DRAFT_TAU = 0.5
"""Temperature of draft weights of rows with noise. It is one constant, because the backends' trees
must be equal."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of each row.

    Attributes:
      temperature: At least 0; 0 is greedy.
      top_p, min_p, top_k: Filters; off at 1, at 0, and at the vocabulary size.
      seed: Seed from `derive_seed`.
      presence, frequency: Penalties subtracted from output tokens once, or once per occurrence.
      repetition: Penalty that divides positive and multiplies negative logits of prompt and output
        tokens.
      prompt_length: Position of the first output token.
      min_length: Position before which `stop_ids` are excluded.
      max_drafts: Maximum nodes of the row's tree without the root.
      stop_ids: Stop tokens, padded with the row's first id; `min_length` is 0 without ids.
      bias_ids, bias_values: Logit biases, padded with (0, 0.0).
      calibration: For each of S_max depths, from 1: natural log of the measured probability that
        the row's draft tokens are accepted up to that depth; at most 0, which is neutral. It only
        affects the allocation of a batch's verify budget.
      branch_calibration: For each of S_max depths: natural log of the measured acceptance below
        nodes off the first path of the tree, relative to nodes on it; at most 0, which is neutral.
        It only affects the growth of trees over a block; see `best_prefixes`.
    """

    temperature: F32[np.ndarray, " B"]
    top_p: F32[np.ndarray, " B"]
    top_k: I32[np.ndarray, " B"]
    min_p: F32[np.ndarray, " B"]
    seed: UInt32[np.ndarray, " B"]
    presence: F32[np.ndarray, " B"]
    frequency: F32[np.ndarray, " B"]
    repetition: F32[np.ndarray, " B"]
    prompt_length: I32[np.ndarray, " B"]
    min_length: I32[np.ndarray, " B"]
    max_drafts: I32[np.ndarray, " B"]
    stop_ids: I32[np.ndarray, "B M"]
    bias_ids: I32[np.ndarray, "B K"]
    bias_values: F32[np.ndarray, "B K"]
    calibration: F32[np.ndarray, "B S_max"]
    branch_calibration: F32[np.ndarray, "B S_max"]

    def rows(self, index: Int[np.ndarray, " R"]) -> "Sampling":
        """Returns the parameters of the rows in `index`, which may repeat."""
        return Sampling(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True)
class TokenCounts:
    """Token counts before each row's choice, for penalties.

    The counts are not stored per row: most rows have no penalty, and a kernel adds a path of a few
    tokens to its slot's counts as it reads them.

    Attributes:
      counts: Per slot: twice a token's count in the output, plus 1 if it is in the prompt. The
        newest token is included.
      slots: Slot of each row.
      path: Draft tokens that may follow the newest token.
      on_path: True for those that precede the row's choice.
    """

    counts: I32[np.ndarray, "slots vocab"]
    slots: Int[np.ndarray, " R"]
    path: Int[np.ndarray, "R path"]
    on_path: Bool[np.ndarray, "R path"]


def counts_alone(
    counts: I32[np.ndarray, "slots vocab"], slots: Int[np.ndarray, " R"]
) -> TokenCounts:
    """Returns the token counts of rows that choose directly after their newest token."""
    return TokenCounts(
        counts, slots, np.zeros((len(slots), 0), np.int32), np.zeros((len(slots), 0), bool)
    )


def counts_in_trees(
    counts: I32[np.ndarray, "slots vocab"],
    slots: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    request: Int[np.ndarray, " R"],
    node: Int[np.ndarray, " R"],
) -> TokenCounts:
    """Returns the token counts of tree nodes: a node's path is its ancestors and itself.

    Node 0 is the newest token, which `counts` includes.
    """
    is_before = draft_tree.ancestors(parents)
    is_before[:, :, 0] = False
    return TokenCounts(counts, slots[request], tokens[request], is_before[request, node])


def counts_of_rows(seen: TokenCounts) -> I32[np.ndarray, "R vocab"]:
    """Computes the counts before each row's choice."""
    counts = seen.counts[seen.slots]
    row = np.arange(len(counts))[:, None]
    np.add.at(counts, (row, seen.path), 2 * seen.on_path.astype(np.int32))
    return counts


def penalized(
    logits: Float[np.ndarray, "R vocab"], seen: I32[np.ndarray, "R vocab"], sampling: Sampling
) -> Float[np.ndarray, "R vocab"]:
    """Applies the repetition penalty, then presence and frequency penalties."""
    repetition = sampling.repetition[:, None]
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where(seen > 0, repeated, logits)
    counts = seen // 2
    logits = logits - sampling.presence[:, None] * (counts > 0)
    return logits - sampling.frequency[:, None] * counts.astype(np.float32)


def support(
    logits: Float[np.ndarray, "R vocab"],
    top_k: I32[np.ndarray, " R"],
    top_p: F32[np.ndarray, " R"],
    min_p: F32[np.ndarray, " R"],
) -> Bool[np.ndarray, "R vocab"]:
    """Returns the tokens that pass top-k, top-p and min-p, each applied to the full distribution.

    A token passes if fewer than `top_k` precede it (a larger logit, or an equal one with a lower
    id), if their total probability is below `top_p`, and if its own is at least `min_p` times the
    largest. The first token always passes. A neutral filter is skipped: a float32 sum of
    probabilities reaches 1 early and would drop the tail.

    Args:
      logits: Logits, divided by the temperature.
      top_k: Off at the vocabulary size and above.
      top_p: Off at 1 and above.
      min_p: Off at 0.
    """
    probability = np.exp(log_softmax(logits))
    order = np.argsort(-logits, axis=1, kind="stable")
    ranked = np.take_along_axis(probability, order, axis=1)
    before = np.cumsum(ranked, axis=1, dtype=np.float32) - ranked
    rank = np.arange(logits.shape[1])[None, :]
    stays = (rank < top_k[:, None]) | (top_k >= logits.shape[1])[:, None]
    stays &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    stays &= (ranked >= min_p[:, None] * ranked[:, :1]) | (min_p <= 0)[:, None]
    keep = np.zeros(logits.shape, bool)
    np.put_along_axis(keep, order, stays | (rank == 0), axis=1)
    return keep


def processed(
    logits: Float[np.ndarray, "R vocab"],
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    sampling: Sampling,
    request: Int[np.ndarray, " R"],
    allowed: Bool[np.ndarray, "R vocab"] | None,
) -> Float[np.ndarray, "R vocab"]:
    """Applies all logits processing before the noise.

    In this order: penalties, bias, exclusion of stop tokens before `min_length`, grammar mask; for
    rows with a temperature above 0, division by it and the filters. Excluded tokens are -inf.

    Args:
      logits: Raw logits.
      seen: Token counts before each row's choice.
      positions: Position of the sampled token.
      sampling: Parameters of the requests.
      request: Request of each row.
      allowed: Tokens that the grammar allows; None without a grammar.
    """
    by_row = sampling.rows(request)
    logits = penalized(logits, counts_of_rows(seen), by_row)
    row = np.arange(len(logits))[:, None]
    np.add.at(logits, (row, by_row.bias_ids), by_row.bias_values)
    too_short = np.flatnonzero(positions < by_row.min_length)
    logits[too_short[:, None], by_row.stop_ids[too_short]] = -np.inf
    if allowed is not None:
        logits = np.where(allowed, logits, np.float32(-np.inf))
    return filtered(logits, by_row)


def filtered(
    logits: Float[np.ndarray, "R vocab"], sampling: Sampling
) -> Float[np.ndarray, "R vocab"]:
    """Divides rows with a temperature above 0 by it and excludes tokens outside the filters."""
    sampled = (sampling.temperature > 0)[:, None]
    scaled = logits / np.where(sampled, sampling.temperature[:, None], np.float32(1))
    keep = support(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return np.where(keep | ~sampled, scaled, np.float32(-np.inf))


def add_gumbel_noise(
    processed: Float[np.ndarray, "R vocab"],
    sampling: Sampling,
    request: Int[np.ndarray, " R"],
    keys: Int[np.ndarray, " R"],
    stream: int,
) -> Float[np.ndarray, "R vocab"]:
    """Adds Gumbel noise to rows with a temperature above 0.

    Args:
      processed: Result of `processed`.
      sampling: Parameters of the requests.
      request: Request of each row.
      keys: Position that selects a row's noise.
      stream: RNG stream, such as `TARGET_STREAM`.
    """
    by_row = sampling.rows(request)
    if not (by_row.temperature > 0).any():
        return processed
    noise = gumbel(by_row.seed, keys, processed.shape[1], stream)
    return processed + np.where((by_row.temperature > 0)[:, None], noise, np.float32(0))


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of the target.

    Attributes:
      ids: One token per row.
      is_finite: True for rows whose logits are all finite; other tokens are undefined.
    """

    ids: I32[np.ndarray, " R"]
    is_finite: Bool[np.ndarray, " R"]


def choose(
    logits: Float[np.ndarray, "R vocab"],
    seen: TokenCounts,
    positions: Int[np.ndarray, " R"],
    sampling: Sampling,
    request: Int[np.ndarray, " R"],
    allowed: Bool[np.ndarray, "R vocab"] | None,
) -> SampledTokens:
    """Samples the target's token of each row: the first maximum of processed logits plus noise.

    Args:
      logits, seen, positions, sampling, request, allowed: See `processed`.
    """
    scores = processed(logits, seen, positions, sampling, request, allowed)
    ids = best(add_gumbel_noise(scores, sampling, request, positions, TARGET_STREAM))
    return SampledTokens(ids, is_finite(logits))


def is_finite(logits: Float[np.ndarray, "R vocab"]) -> Bool[np.ndarray, " R"]:
    """Returns True for rows whose logits are all finite."""
    return np.asarray(np.isfinite(logits).all(axis=1))


def best(perturbed: Float[np.ndarray, "R vocab"]) -> I32[np.ndarray, " R"]:
    """Returns the first maximum of each row."""
    return perturbed.argmax(axis=1).astype(np.int32)


@dataclass(frozen=True)
class RankedCandidates:
    """Candidates for the children of nodes.

    Attributes:
      ids: Best tokens of each node, best first.
      weights: Log weights of their edges.
      processed: Processed logits without noise, which rejection sampling needs; None if draft
        tokens are not sampled.
    """

    ids: I32[np.ndarray, "B k width"]
    weights: F32[np.ndarray, "B k width"]
    processed: F32[np.ndarray, "R vocab"] | None


def rank(
    logits: Float[np.ndarray, "B k vocab"],
    seen: TokenCounts,
    positions: Int[np.ndarray, "B ..."],
    sampling: Sampling,
    keys: Int[np.ndarray, "B ..."],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[np.ndarray, " vocab"] | None,
) -> RankedCandidates:
    """Ranks the children of k nodes of each request as the target will choose among them.

    Args:
      logits: Drafter's logits, over its vocabulary.
      seen: Token counts before the choice at each of the B * k nodes.
      positions: Position of the children, of a request (its nodes have one depth) or of each node.
      sampling: Parameters of the requests.
      keys, stream: See `add_gumbel_noise`; the target's own for exact-match acceptance.
      width: Children of a node.
      is_sampled: True if draft tokens are sampled for rejection sampling.
      columns: Target token id of each logit; of equal logits the earlier one wins. None if the
        vocabularies are equal.
    """
    B, k, vocab = logits.shape
    request = np.repeat(np.arange(B), k)
    flat = over_tokens(logits.reshape(B * k, vocab), columns, seen.counts.shape[1])
    at, keys = (np.broadcast_to(x.reshape(B, -1), (B, k)).ravel() for x in (positions, keys))
    scores = processed(flat, seen, at, sampling, request, None)
    noisy = add_gumbel_noise(scores, sampling, request, keys, stream)
    ids = top_candidates(noisy if columns is None else noisy[:, columns], width)
    ids = ids if columns is None else columns[ids]
    weights = draft_weights(noisy, sampling.temperature[request], DRAFT_TAU)
    weights = np.take_along_axis(weights, ids, axis=1)
    kept = scores if is_sampled else None
    return RankedCandidates(ids.reshape(B, k, width), weights.reshape(B, k, width), kept)


def over_tokens(
    logits: Float[np.ndarray, "R columns"], columns: Int[np.ndarray, " columns"] | None, vocab: int
) -> Float[np.ndarray, "R vocab"]:
    """Scatters a drafter's logits to the target's vocabulary; -inf for tokens that it lacks."""
    if columns is None:
        return logits
    scores = np.full((len(logits), vocab), -np.inf, logits.dtype)
    scores[:, columns] = logits
    return scores


def draft_weights(
    perturbed: Float[np.ndarray, "R vocab"], temperature: F32[np.ndarray, " R"], tau: float
) -> Float[np.ndarray, "R vocab"]:
    """Returns the log probability, estimated by the drafter, that each token is the target's
    choice.

    Args:
      perturbed: Drafter's processed logits with the target's noise.
      temperature: Temperatures of the rows; at 0 there is no noise, and `tau` is 1.
      tau: Temperature of the weights. It never changes the output, only which nodes a tree keeps.
    """
    softness = np.where(temperature > 0, np.float32(tau), np.float32(1))
    return log_softmax(perturbed / softness[:, None])


def top_candidates(perturbed: Float[np.ndarray, "R vocab"], k: int) -> I32[np.ndarray, "R k"]:
    """Returns the ids of the k largest values, best first; ties go to the lower id."""
    return np.argsort(-perturbed, axis=1, kind="stable")[:, :k].astype(np.int32)


def log_softmax(logits: Float[np.ndarray, "R vocab"]) -> Float[np.ndarray, "R vocab"]:
    """Returns the natural logarithms of the probabilities of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def probabilities(processed: Float[np.ndarray, "R vocab"]) -> Float[np.ndarray, "R vocab"]:
    """Returns the sampling distribution of a row with a temperature; 0 for excluded tokens."""
    return np.exp(log_softmax(processed))
