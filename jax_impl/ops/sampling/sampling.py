"""Sampling from logits; same as `shared.spec.sampling`.

On a CPU, penalties, filters and noise that no row needs are skipped at run time, so one program
serves any mixture of rows. On a GPU `choose` and `rank` are kernels; see `jax_impl.ops`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import Kernels, cond_any, kernel_or_reference
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.sampling.gumbel_noise import Stream, gumbel
from jax_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    all_of,
    best_of,
    first_of,
    is_parted,
    log_probabilities,
    moved,
    norm,
    over_tokens,
    spread,
    support,
    whole,
)
from jax_impl.ops.trees import draft_tree
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU

Scores = Float[jax.Array, "R vocab"]


class Sampling(NamedTuple):
    """Sampling parameters of each row; same fields as in the specification."""

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
    branch_calibration: Float[jax.Array, "B S_max"]

    def rows(self, index: Int[jax.Array, " R"]) -> "Sampling":
        """Returns the parameters of the rows in `index`, which may repeat."""
        return Sampling(*(field[index] for field in self))

    @property
    def unasked(self) -> "Sampling":
        """Returns neutral parameters, with which the best token has the highest logit."""
        ask = ("temperature", "presence", "frequency", "min_length", "bias_values")
        nothing = {name: jnp.zeros_like(getattr(self, name)) for name in ask}
        return self._replace(**nothing, repetition=jnp.ones_like(self.repetition))

    @property
    def has_penalty(self) -> Bool[jax.Array, " B"]:
        """Returns True for rows with a penalty, whose logits depend on token counts."""
        return (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)


class TokenCounts(NamedTuple):
    """Token counts before each row's choice; same fields as in the specification."""

    counts: Int[jax.Array, "slots vocab"]
    slots: Int[jax.Array, " R"]
    path: Int[jax.Array, "R path"]
    on_path: Bool[jax.Array, "R path"]


def counts_alone(counts: Int[jax.Array, "slots vocab"], slots: Int[jax.Array, " R"]) -> TokenCounts:
    """Returns the token counts of rows that choose directly after their newest token."""
    nothing = jnp.zeros((len(slots), 0), jnp.int32)
    return TokenCounts(counts, slots, nothing, nothing > 0)


def counts_in_trees(
    counts: Int[jax.Array, "slots vocab"],
    slots: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    request: Int[jax.Array, " R"],
    node: Int[jax.Array, " R"],
    is_chain: bool = False,
) -> TokenCounts:
    """Returns the token counts of draft-tree nodes; `counts` includes node 0, the newest token.

    In a chain all earlier nodes are ancestors.
    """
    if tokens.shape[1] == 1:
        return counts_alone(counts, slots[request])
    place = jnp.arange(tokens.shape[1])
    on_path = place <= node[:, None] if is_chain else draft_tree.ancestors(parents)[request, node]
    return TokenCounts(counts, slots[request], tokens[request], on_path & (place > 0))


def counts_of_rows(seen: TokenCounts) -> Int[jax.Array, "R vocab"]:
    """Computes the token counts before each row's choice."""
    counts, row = seen.counts[seen.slots], jnp.arange(len(seen.slots))[:, None]
    return counts.at[row, seen.path].add(2 * seen.on_path.astype(jnp.int32))


def penalized(logits: Scores, seen: Int[jax.Array, "R vocab"], sampling: Sampling) -> Scores:
    """Applies the repetition penalty, then presence and frequency penalties."""
    repetition = sampling.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    counts = seen // 2
    logits = logits - sampling.presence[:, None] * (counts > 0)
    return logits - sampling.frequency[:, None] * counts.astype(jnp.float32)


def processed(
    logits: Float[jax.Array, "R vocab"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Float[jax.Array, "R vocab"]:
    """Applies all logits processing except the noise; excluded tokens are -inf.

    With TP, tokens of other ranks are excluded.
    """
    logits = _edited(logits, seen, positions, sampling, request, allowed)
    return supported(logits, sampling, request, vocabulary)


def _edited(
    logits: Float[jax.Array, "R vocab"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
) -> Float[jax.Array, "R vocab"]:
    """Applies penalties, biases and masks, which precede the division by the temperature."""
    by_row, row = sampling.rows(request), jnp.arange(len(logits))[:, None]

    def with_penalties(logits: Scores) -> Scores:
        return penalized(logits, counts_of_rows(seen), by_row)

    logits = cond_any(sampling.has_penalty, with_penalties, _as_it_is, logits)
    logits = logits.at[row, by_row.bias_ids].add(by_row.bias_values)
    bound = jnp.where(positions < by_row.min_length, -jnp.inf, jnp.inf)[:, None]
    logits = logits.at[row, by_row.stop_ids].min(jnp.broadcast_to(bound, by_row.stop_ids.shape))
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def supported(
    logits: Float[jax.Array, "R size"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    vocabulary: Vocabulary,
) -> Float[jax.Array, "R size"]:
    """Divides by the temperature and excludes tokens outside the top-k, top-p and min-p filters."""
    by_row = sampling.rows(request)
    is_sampled = by_row.temperature > 0
    scaled = logits / jnp.where(is_sampled, by_row.temperature, 1)[:, None]
    filters = (by_row.top_k < logits.shape[1]) | (by_row.top_p < 1) | (by_row.min_p > 0)

    def filtered(scaled: Scores) -> Scores:
        keep = support(scaled, by_row.top_k, by_row.top_p, by_row.min_p, vocabulary)
        return jnp.where(keep | ~is_sampled[:, None], scaled, -jnp.inf)

    return cond_any(filters & is_sampled, filtered, _as_it_is, scaled)


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def add_gumbel_noise(
    processed: Float[jax.Array, "R vocab"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    keys: Int[jax.Array, " R"],
    stream: Stream,
) -> Float[jax.Array, "R vocab"]:
    """Adds Gumbel noise to rows with a temperature above 0."""
    warm = (sampling.temperature > 0)[request, None]

    def noisy(processed: Scores) -> Scores:
        noise = gumbel(sampling.seed[request], keys, processed.shape[1], stream)
        return processed + jnp.where(warm, noise, 0)

    return cond_any(sampling.temperature > 0, noisy, _as_it_is, processed)


def add_shared_gumbel_noise(
    processed: Float[jax.Array, "B k vocab"],
    sampling: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
) -> Float[jax.Array, "B k vocab"]:
    """Same as `add_gumbel_noise`, with a key and a row of noise per request, or per node."""
    warm = (sampling.temperature > 0)[:, None, None]

    def noisy(processed: Float[jax.Array, "B k vocab"]) -> Float[jax.Array, "B k vocab"]:
        B, _, vocab = processed.shape
        seeds = jnp.repeat(sampling.seed, keys.size // B)
        noise = gumbel(seeds, keys.ravel(), vocab, stream).reshape(B, -1, vocab)
        return processed + jnp.where(warm, noise, 0)

    return cond_any(sampling.temperature > 0, noisy, _as_it_is, processed)


class SampledTokens(NamedTuple):
    """Tokens chosen by the target; same fields as in the specification."""

    ids: Int[jax.Array, " R"]
    is_finite: Bool[jax.Array, " R"]


def plain_choose(
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Chooses the target's token of each row: first argmax of processed logits plus noise.

    Args:
      logits: Whole logits, or this rank's shard.
    """
    scores = spread(logits, vocabulary)
    scores = processed(scores, seen, positions, sampling, request, allowed, vocabulary)
    noisy = add_gumbel_noise(scores, sampling, request, positions, TARGET_STREAM)
    return SampledTokens(best(noisy, vocabulary), is_finite(logits, vocabulary))


def kernel_choose(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Same as `plain_choose`."""
    given = (seen, positions, sampling, request, allowed)
    if is_parted(vocabulary, len(logits)):
        return choose_parts(kernels, logits, *given, vocabulary)
    chosen = kernels.sampling.choose(
        *(whole(logits, vocabulary), *given),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    return SampledTokens(*chosen)


def of_parts(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, "named ..."],
    sampling: Sampling,
    request: Int[jax.Array, "named ..."],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, "named ..."],
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary,
    **how: Any,
) -> tuple[Int[jax.Array, "R width"], Float[jax.Array, "R width"], Bool[jax.Array, " R"]]:
    """Merges the partial results of all shards by `kernels.vocab_parallel.merge_topk`.

    Args:
      logits, seen, positions, sampling, request, allowed, keys, columns: See `sampling.leave`.
      how: RNG stream, and `width`, `tau`, `nodes` and `leaves` of `sampling.leave`.
    """
    group, size = vocabulary.group, vocabulary.size
    rows_of = kernels.vocab_parallel.rows_with_filters
    rows = rows_of(sampling, request, len(logits), how["nodes"], size)
    every = all_gather.gathered_rows(group, logits, rows)
    first = first_of(vocabulary).astype(jnp.int32).reshape(1)
    part = kernels.sampling.VocabShard(size, group.count, first, every)
    left, *held = kernels.sampling.shard_partials(
        *(logits, seen, positions, sampling, request, allowed, keys, columns, part),
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
        **how,
    )
    left, totals = all_gather.all_gather(group, left), None
    same = {"ranks": group.count} | {name: how[name] for name in ("width", "tau", "nodes")}
    if how["tau"] is not None:
        of_groups = (left, *held, sampling.temperature, part.first)
        totals = kernels.vocab_parallel.sum_exp(*of_groups, share=vocabulary.share, **same)
        totals = all_gather.all_gather(group, totals)
    joined = (left, totals, sampling.temperature, columns)
    return kernels.vocab_parallel.merge_topk(*joined, vocab=size, **same)


def choose_parts(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary,
    leaves: Any = None,
) -> SampledTokens:
    """Same as `plain_choose`, with TP; `leaves` are the partial results of the LM-head epilogue."""
    given = (logits, seen, positions, sampling, request, allowed, positions, None, vocabulary)
    how = {"stream": TARGET_STREAM, "width": 1, "tau": None, "nodes": 0, "leaves": leaves}
    ids, _, is_finite = of_parts(kernels, *given, **how)
    return SampledTokens(ids[:, 0], is_finite)


choose = kernel_or_reference(kernel_choose, plain_choose)


def is_finite(
    logits: Float[jax.Array, "R share"], vocabulary: Vocabulary = ALL
) -> Bool[jax.Array, " R"]:
    """Returns True for rows with only finite logits."""
    return all_of(jnp.isfinite(logits).all(axis=1), vocabulary)


def best(
    perturbed: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Int[jax.Array, " R"]:
    """Returns the first argmax of each row; NaN counts as the maximum."""
    return best_of(perturbed, 1, vocabulary)[1][:, 0]


class RankedCandidates(NamedTuple):
    """Candidates for the children of nodes; same fields as in the specification."""

    ids: Int[jax.Array, "B k width"]
    weights: Float[jax.Array, "B k width"]
    processed: Float[jax.Array, "R vocab"] | None


def plain_rank(
    logits: Float[jax.Array, "B k share"],
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    sampling: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Ranks the children of k nodes of each request as the target will choose among them.

    With TP, the returned draft logits are this rank's shard of the target vocabulary.
    """
    (B, k, share), vocab = logits.shape, seen.counts.shape[1]
    request = jnp.repeat(jnp.arange(B), k)
    at = jnp.broadcast_to(positions.reshape(B, -1), (B, k)).ravel()
    tokens = over_tokens(spread(logits.reshape(B * k, share), vocabulary), columns, vocab)
    edited = _edited(tokens, seen, at, sampling, request, None)
    edited = edited if columns is None else edited[:, columns]
    scores = supported(edited, sampling, request, vocabulary)
    by_node = over_tokens(scores, columns, vocab).reshape(B, k, vocab)
    noisy = add_shared_gumbel_noise(by_node, sampling, keys, stream).reshape(B * k, vocab)
    noisy = noisy if columns is None else noisy[:, columns]
    values, ids = best_of(noisy, width, vocabulary)
    temperature = sampling.temperature[request]
    weights = draft_weights(noisy, values, temperature, DRAFT_TAU, vocabulary)
    ids = ids if columns is None else columns[ids]
    target = Vocabulary(vocab, vocabulary.group)
    kept = moved(scores, columns, vocabulary, target) if is_sampled else None
    return RankedCandidates(ids.reshape(B, k, width), weights.reshape(B, k, width), kept)


def kernel_rank(
    kernels: Kernels,
    logits: Float[jax.Array, "B k share"],
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    sampling: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Same as `plain_rank`, but the returned draft logits are not sharded.

    Logits are gathered for sampled drafts, or if the draft vocabulary has another size.
    """
    (B, k, share), target = logits.shape, seen.counts.shape[1]
    is_whole = is_sampled or (columns is None and vocabulary.size != target)
    if is_parted(vocabulary, B * k) and not is_whole:
        own = logits.reshape(B * k, share)
        given = (own, seen, positions, sampling, positions, None, keys, columns, vocabulary)
        how = {"stream": stream, "width": width, "tau": DRAFT_TAU, "nodes": k}
        ids, weights, _ = of_parts(kernels, *given, **how)
        return RankedCandidates(ids.reshape(B, k, width), weights.reshape(B, k, width), None)
    tokens = whole(logits, vocabulary)
    tokens = tokens if columns is not None else over_tokens(tokens, None, target)
    ranked = kernels.sampling.rank(
        *(tokens, seen, positions, sampling, keys, stream, width, is_sampled, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=B * k),
    )
    return RankedCandidates(*ranked)


rank = kernel_or_reference(kernel_rank, plain_rank)


def draft_weights(
    perturbed: Float[jax.Array, "R size"],
    some: Float[jax.Array, "R some"],
    temperature: Float[jax.Array, " R"],
    tau: float,
    vocabulary: Vocabulary = ALL,
) -> Float[jax.Array, "R some"]:
    """Computes log weights: the drafter's estimate that a token is the target's choice."""
    softness = jnp.where(temperature > 0, jnp.float32(tau), jnp.float32(1))[:, None]
    return log_probabilities(some / softness, norm(perturbed / softness, vocabulary))


def log_softmax(
    logits: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R vocab"]:
    """Computes the log probabilities of each row."""
    return log_probabilities(logits, norm(logits, vocabulary))


def probabilities(
    processed: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R vocab"]:
    """Computes the sampling distribution of a row with a temperature; 0 for excluded tokens."""
    highest, total = norm(processed, vocabulary)
    return jnp.exp(processed - highest[:, None]) / total[:, None]
