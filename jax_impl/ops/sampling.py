"""From logits to the chosen token; as `shared.spec.sampling`.

What no row of a step needs - penalties, filters, noise - is skipped by data on a CPU, so one
compiled program serves all mixtures of rows; on a GPU all of it runs, see `when_any`. There
`choose` and `rank` are kernels, see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import Kernels, draft_tree, kernel_or_plain, ranks, when_any
from jax_impl.ops.noise import Stream, gumbel
from shared.boundary.ranks import ALONE, Ranks
from shared.spec.noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU

_BLOCK = 128
_DIGIT = 4  # bits of the border that a pass of `_searched` finds

Scores = Float[jax.Array, "R vocab"]
Filter = Float[jax.Array, " R"]
Support = Bool[jax.Array, "R vocab"]


class Sampling(NamedTuple):
    """The parameters of each row; fields as in the specification."""

    temperature: Float[jax.Array, " B"]
    top_p: Float[jax.Array, " B"]
    top_k: Int[jax.Array, " B"]
    min_p: Float[jax.Array, " B"]
    seed: UInt32[jax.Array, " B"]
    presence: Float[jax.Array, " B"]
    frequency: Float[jax.Array, " B"]
    repetition: Float[jax.Array, " B"]
    prompt_length: Int[jax.Array, " B"]
    min_length: Int[jax.Array, " B"]
    max_drafts: Int[jax.Array, " B"]
    stop_ids: Int[jax.Array, "B M"]
    bias_ids: Int[jax.Array, "B K"]
    bias_values: Float[jax.Array, "B K"]
    calibration: Float[jax.Array, "B S_max"]

    def rows(self, index: Int[jax.Array, " R"]) -> "Sampling":
        """The parameters of the rows that `index` names, which may repeat."""
        return Sampling(*(field[index] for field in self))

    @property
    def has_penalty(self) -> Bool[jax.Array, " B"]:
        """Whether a row looks at what was seen before."""
        return (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)


class Seen(NamedTuple):
    """What stands in the text before each row's choice; fields as in the specification."""

    counts: Int[jax.Array, "slots vocab"]
    slots: Int[jax.Array, " R"]
    path: Int[jax.Array, "R path"]
    on_path: Bool[jax.Array, "R path"]


def seen_alone(counts: Int[jax.Array, "slots vocab"], slots: Int[jax.Array, " R"]) -> Seen:
    """Of rows that choose right after their newest token."""
    nothing = jnp.zeros((len(slots), 0), jnp.int32)
    return Seen(counts, slots, nothing, nothing > 0)


def seen_in_trees(
    counts: Int[jax.Array, "slots vocab"],
    slots: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    request: Int[jax.Array, " R"],
    node: Int[jax.Array, " R"],
    is_chain: bool = False,
) -> Seen:
    """Of rows that are nodes of draft trees; node 0 is the newest token, which `counts` holds.

    On a chain all nodes before one are its ancestors.
    """
    if tokens.shape[1] == 1:
        return seen_alone(counts, slots[request])
    place = jnp.arange(tokens.shape[1])
    on_path = place <= node[:, None] if is_chain else draft_tree.ancestors(parents)[request, node]
    return Seen(counts, slots[request], tokens[request], on_path & (place > 0))


def seen_rows(seen: Seen) -> Int[jax.Array, "R vocab"]:
    """The counts before each row's choice."""
    counts, row = seen.counts[seen.slots], jnp.arange(len(seen.slots))[:, None]
    return counts.at[row, seen.path].add(2 * seen.on_path.astype(jnp.int32))


def penalized(logits: Scores, seen: Int[jax.Array, "R vocab"], sampling: Sampling) -> Scores:
    """Applies repetition, then presence and frequency."""
    repetition = sampling.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    counts = seen // 2
    logits = logits - sampling.presence[:, None] * (counts > 0)
    return logits - sampling.frequency[:, None] * counts.astype(jnp.float32)


def support(logits: Scores, top_k: Int[jax.Array, " R"], top_p: Filter, min_p: Filter) -> Support:
    """The tokens that may be chosen, each filter measured on the full distribution.

    A GPU searches for the border of the support: sorting a vocabulary there is many passes over it.
    """
    return lax.platform_dependent(logits, top_k, top_p, min_p, cuda=_searched, default=_sorted)


def _sorted(logits: Scores, top_k: Int[jax.Array, " R"], top_p: Filter, min_p: Filter) -> Support:
    ids = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)
    negated, order = lax.sort((-logits, ids), dimension=1, num_keys=1, is_stable=True)
    ranked = jnp.exp(log_softmax(-negated))
    before = _running_sum(ranked) - ranked
    rank = jnp.arange(logits.shape[1])[None, :]
    stays = (rank < top_k[:, None]) | (top_k >= logits.shape[1])[:, None]
    stays &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    stays &= (ranked >= min_p[:, None] * ranked[:, :1]) | (min_p <= 0)[:, None]
    stays |= rank == 0
    rows = jnp.arange(len(logits))[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(stays, unique_indices=True)


def _searched(logits: Scores, top_k: Int[jax.Array, " R"], top_p: Filter, min_p: Filter) -> Support:
    """Finds the smallest logit that has fewer than `top_k` tokens and less than `top_p` above it.

    Of the tokens that share it the first ones stay, as many as the bounds have room for.
    """
    vocab = logits.shape[1]
    most = jnp.where(top_k >= vocab, vocab + 1, jnp.maximum(top_k, 1))[:, None]
    # The first token stays whatever `top_p` says, so its bound lies above the mass before it.
    mass = jnp.where(top_p >= 1, jnp.inf, jnp.maximum(top_p, 1e-30))[:, None]
    probability, keys = probabilities(logits), _order_keys(logits)
    border = jnp.zeros((len(logits), 1), jnp.uint32)
    ways = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        # The border is in the first part whose last key has too little above it to reach a bound.
        count, above = _above(keys, probability, border + (ways << shift) - 1)
        reaches = (count >= most) | (above >= mass)
        border += reaches.sum(axis=1, keepdims=True, dtype=jnp.uint32) << shift
    count, above = _above(keys, probability, border)
    ties = keys == border
    earlier = _running_sum(ties.astype(jnp.float32)) - ties
    room = (count + earlier < most) & (above + earlier * probability < mass)
    stays = (keys > border) | (ties & room)
    highest = probability.max(axis=1, keepdims=True)
    stays &= (probability >= min_p[:, None] * highest) | (min_p <= 0)[:, None]
    return stays | (jnp.arange(vocab) == best(logits)[:, None])


def _order_keys(x: Scores) -> UInt32[jax.Array, "R vocab"]:
    """Unsigned words in the order of the numbers; both zeros have one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31 > 0, ~bits, bits | jnp.uint32(1 << 31))


def _above(
    keys: UInt32[jax.Array, "R vocab"], probability: Scores, borders: UInt32[jax.Array, "R ways"]
) -> tuple[Int[jax.Array, "R ways"], Float[jax.Array, "R ways"]]:
    """How many tokens lie above each border, and how probable they are together."""
    is_above = keys[:, None] > borders[:, :, None]
    above = jnp.where(is_above, probability[:, None], 0)
    return is_above.sum(axis=2, dtype=jnp.int32), above.sum(axis=2)


def _running_sum(x: Float[jax.Array, "R vocab"]) -> Float[jax.Array, "R vocab"]:
    """Cumulative sum over axis 1 in blocks: few operations to compile whatever the vocabulary."""
    R, vocab = x.shape
    num_blocks = -(-vocab // _BLOCK)
    blocks = jnp.pad(x, ((0, 0), (0, num_blocks * _BLOCK - vocab))).reshape(R, num_blocks, _BLOCK)
    upto = jnp.triu(jnp.ones((_BLOCK, _BLOCK), jnp.float32))
    sums = jnp.einsum("rbi,ij->rbj", blocks, upto, precision=lax.Precision.HIGHEST)
    if num_blocks > 1:
        earlier = _running_sum(sums[:, :, -1]) - sums[:, :, -1]
        sums = sums + earlier[:, :, None]
    return sums.reshape(R, -1)[:, :vocab]


def processed(
    logits: Float[jax.Array, "R vocab"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
) -> Float[jax.Array, "R vocab"]:
    """Everything between raw logits and the choice, but the noise; excluded tokens are -inf."""
    by_row, row = sampling.rows(request), jnp.arange(len(logits))[:, None]

    def with_penalties(logits: Scores) -> Scores:
        return penalized(logits, seen_rows(seen), by_row)

    logits = when_any(sampling.has_penalty, with_penalties, _as_it_is, logits)
    logits = logits.at[row, by_row.bias_ids].add(by_row.bias_values)
    bound = jnp.where(positions < by_row.min_length, -jnp.inf, jnp.inf)[:, None]
    logits = logits.at[row, by_row.stop_ids].min(jnp.broadcast_to(bound, by_row.stop_ids.shape))
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    is_sampled = by_row.temperature > 0
    scaled = logits / jnp.where(is_sampled, by_row.temperature, 1)[:, None]
    filters = (by_row.top_k < logits.shape[1]) | (by_row.top_p < 1) | (by_row.min_p > 0)

    def filtered(scaled: Scores) -> Scores:
        keep = support(scaled, by_row.top_k, by_row.top_p, by_row.min_p)
        return jnp.where(keep | ~is_sampled[:, None], scaled, -jnp.inf)

    return when_any(filters & is_sampled, filtered, _as_it_is, scaled)


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def perturbed(
    processed: Float[jax.Array, "R vocab"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    keys: Int[jax.Array, " R"],
    stream: Stream,
) -> Float[jax.Array, "R vocab"]:
    """Adds the noise to rows with a temperature above 0."""
    warm = (sampling.temperature > 0)[request, None]

    def noisy(processed: Scores) -> Scores:
        noise = gumbel(sampling.seed[request], keys, processed.shape[1], stream)
        return processed + jnp.where(warm, noise, 0)

    return when_any(sampling.temperature > 0, noisy, _as_it_is, processed)


def perturbed_alike(
    processed: Float[jax.Array, "B k vocab"],
    sampling: Sampling,
    keys: Int[jax.Array, " B"],
    stream: Stream,
) -> Float[jax.Array, "B k vocab"]:
    """As `perturbed`, where one row of noise serves the k rows of a request."""
    warm = (sampling.temperature > 0)[:, None, None]

    def noisy(processed: Float[jax.Array, "B k vocab"]) -> Float[jax.Array, "B k vocab"]:
        noise = gumbel(sampling.seed, keys, processed.shape[2], stream)
        return processed + jnp.where(warm, noise[:, None], 0)

    return when_any(sampling.temperature > 0, noisy, _as_it_is, processed)


class Chosen(NamedTuple):
    """The target's tokens; fields as in the specification."""

    ids: Int[jax.Array, " R"]
    is_finite: Bool[jax.Array, " R"]


def plain_choose(
    logits: Float[jax.Array, "R vocab"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    group: Ranks = ALONE,
) -> Chosen:
    """The target's token of each row: the first maximum of its processed logits and the noise.

    Args:
      logits: Of several ranks, the part of the one that calls; the parts are gathered.
    """
    logits = _whole(group, logits, seen)
    scores = processed(logits, seen, positions, sampling, request, allowed)
    ids = best(perturbed(scores, sampling, request, positions, TARGET_STREAM))
    return Chosen(ids, is_finite(logits))


def kernel_choose(
    kernels: Kernels,
    logits: Float[jax.Array, "R vocab"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    group: Ranks = ALONE,
) -> Chosen:
    logits = _whole(group, logits, seen)
    chosen = kernels.sampling.choose(
        *(logits, seen, positions, sampling, request, allowed),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    return Chosen(*chosen)


choose = kernel_or_plain(kernel_choose, plain_choose)


def _whole(
    group: Ranks, logits: Float[jax.Array, "R share"], seen: Seen
) -> Float[jax.Array, "R vocab"]:
    """Those of all tokens, of which each rank has a part."""
    return logits if group.is_alone else ranks.gathered(group, logits)[:, : seen.counts.shape[1]]


def is_finite(logits: Float[jax.Array, "R vocab"]) -> Bool[jax.Array, " R"]:
    """Rows whose logits are finite, all of them."""
    return jnp.isfinite(logits).all(axis=1)


def best(perturbed: Float[jax.Array, "R vocab"]) -> Int[jax.Array, " R"]:
    """The first maximum of each row, NaN as the maximum included.

    `jnp.argmax` takes nine times as long on a CPU.
    """
    is_maximum = (perturbed == perturbed.max(axis=1, keepdims=True)) | jnp.isnan(perturbed)
    vocab = perturbed.shape[1]
    return jnp.where(is_maximum, jnp.arange(vocab, dtype=jnp.int32), vocab).min(axis=1)


class Ranked(NamedTuple):
    """Candidates for the children of nodes; fields as in the specification."""

    ids: Int[jax.Array, "B k width"]
    weights: Float[jax.Array, "B k width"]
    processed: Float[jax.Array, "R vocab"] | None


def plain_rank(
    logits: Float[jax.Array, "B k vocab"],
    seen: Seen,
    positions: Int[jax.Array, " B"],
    sampling: Sampling,
    keys: Int[jax.Array, " B"],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " vocab"] | None,
) -> Ranked:
    """Ranks the children of k nodes of each request as the target will choose among them."""
    (B, k, vocab), request = logits.shape, jnp.repeat(jnp.arange(len(logits)), logits.shape[1])
    flat = over_tokens(logits.reshape(B * k, vocab), columns, seen.counts.shape[1])
    scores = processed(flat, seen, positions[request], sampling, request, None)
    noisy = perturbed_alike(scores.reshape(B, k, -1), sampling, keys, stream).reshape(flat.shape)
    ids = top_candidates(noisy if columns is None else noisy[:, columns], width)
    ids = ids if columns is None else columns[ids]
    weights = draft_weights(noisy, sampling.temperature[request], DRAFT_TAU)
    weights = jnp.take_along_axis(weights, ids, axis=1).reshape(B, k, width)
    return Ranked(ids.reshape(B, k, width), weights, scores if is_sampled else None)


def kernel_rank(
    kernels: Kernels,
    logits: Float[jax.Array, "B k vocab"],
    seen: Seen,
    positions: Int[jax.Array, " B"],
    sampling: Sampling,
    keys: Int[jax.Array, " B"],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " vocab"] | None,
) -> Ranked:
    ranked = kernels.sampling.rank(
        *(logits, seen, positions, sampling, keys, stream, width, is_sampled, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=logits.shape[0] * logits.shape[1]),
    )
    return Ranked(*ranked)


rank = kernel_or_plain(kernel_rank, plain_rank)


def over_tokens(
    logits: Float[jax.Array, "R columns"], columns: Int[jax.Array, " columns"] | None, vocab: int
) -> Float[jax.Array, "R vocab"]:
    """A drafter's logits over the target's vocabulary; -inf where it has no token."""
    nothing = jnp.full((len(logits), vocab), -jnp.inf, logits.dtype)
    return logits if columns is None else nothing.at[:, columns].set(logits)


def draft_weights(perturbed: Scores, temperature: Float[jax.Array, " R"], tau: float) -> Scores:
    """How likely the drafter takes each token for the target's choice, as a logarithm."""
    softness = jnp.where(temperature > 0, jnp.float32(tau), jnp.float32(1))
    return log_softmax(perturbed / softness[:, None])


def top_candidates(perturbed: Float[jax.Array, "R vocab"], k: int) -> Int[jax.Array, "R k"]:
    """The ids of the k largest values, best first; equal ones by the lower id."""
    if k == 1:
        return best(perturbed)[:, None]
    return lax.top_k(perturbed, k)[1].astype(jnp.int32)


def log_softmax(logits: Float[jax.Array, "R vocab"]) -> Float[jax.Array, "R vocab"]:
    """Natural logarithms of the probabilities of each row."""
    return jax.nn.log_softmax(logits, axis=1)


def probabilities(processed: Float[jax.Array, "R vocab"]) -> Float[jax.Array, "R vocab"]:
    """What a row with a temperature samples from; 0 for what is excluded."""
    return jax.nn.softmax(processed, axis=1)
