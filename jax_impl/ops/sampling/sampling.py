"""Sampling from logits, see `shared.spec.sampling`.

On a CPU, penalties, filters and noise that no row needs are skipped at run time, so one program
serves every mixture of rows. On a GPU `choose` and `rank` are kernels, see `jax_impl.ops`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import Kernels, kernel_or_plain, when_any
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
    def unasked(self) -> "Sampling":
        """Of rows that ask for nothing: their best token is the one with the highest logit."""
        ask = ("temperature", "presence", "frequency", "min_length", "bias_values")
        nothing = {name: jnp.zeros_like(getattr(self, name)) for name in ask}
        return self._replace(**nothing, repetition=jnp.ones_like(self.repetition))

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


def processed(
    logits: Float[jax.Array, "R vocab"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Float[jax.Array, "R vocab"]:
    """Everything between raw logits and the choice, but the noise; excluded tokens are -inf.

    Of several ranks, of the tokens of one, the others excluded.
    """
    logits = _edited(logits, seen, positions, sampling, request, allowed)
    return _supported(logits, sampling, request, vocabulary)


def _edited(
    logits: Float[jax.Array, "R vocab"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
) -> Float[jax.Array, "R vocab"]:
    """What is done to each token by itself, before the division by the temperature."""
    by_row, row = sampling.rows(request), jnp.arange(len(logits))[:, None]

    def with_penalties(logits: Scores) -> Scores:
        return penalized(logits, seen_rows(seen), by_row)

    logits = when_any(sampling.has_penalty, with_penalties, _as_it_is, logits)
    logits = logits.at[row, by_row.bias_ids].add(by_row.bias_values)
    bound = jnp.where(positions < by_row.min_length, -jnp.inf, jnp.inf)[:, None]
    logits = logits.at[row, by_row.stop_ids].min(jnp.broadcast_to(bound, by_row.stop_ids.shape))
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _supported(
    logits: Float[jax.Array, "R size"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    vocabulary: Vocabulary,
) -> Float[jax.Array, "R size"]:
    """Logits over the temperature; what is not of the support is excluded."""
    by_row = sampling.rows(request)
    is_sampled = by_row.temperature > 0
    scaled = logits / jnp.where(is_sampled, by_row.temperature, 1)[:, None]
    filters = (by_row.top_k < logits.shape[1]) | (by_row.top_p < 1) | (by_row.min_p > 0)

    def filtered(scaled: Scores) -> Scores:
        keep = support(scaled, by_row.top_k, by_row.top_p, by_row.min_p, vocabulary)
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
    logits: Float[jax.Array, "R share"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Chosen:
    """The target's token of each row: the first maximum of its processed logits and the noise.

    Args:
      logits: Whole, or a rank's part of them.
    """
    scores = spread(logits, vocabulary)
    scores = processed(scores, seen, positions, sampling, request, allowed, vocabulary)
    noisy = perturbed(scores, sampling, request, positions, TARGET_STREAM)
    return Chosen(best(noisy, vocabulary), is_finite(logits, vocabulary))


def kernel_choose(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> Chosen:
    """As `plain_choose`."""
    given = (seen, positions, sampling, request, allowed)
    if is_parted(vocabulary, len(logits)):
        return choose_parts(kernels, logits, *given, vocabulary)
    chosen = kernels.sampling.choose(
        *(whole(logits, vocabulary), *given),
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
    )
    return Chosen(*chosen)


def of_parts(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: Seen,
    positions: Int[jax.Array, " named"],
    sampling: Sampling,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    keys: Int[jax.Array, " named"],
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary,
    **how: Any,
) -> tuple[Int[jax.Array, "R width"], Float[jax.Array, "R width"], Bool[jax.Array, " R"]]:
    """What `kernels.vocab_parallel.join` makes of what all ranks' parts of the vocabulary leave.

    Args:
      logits, seen, positions, sampling, request, allowed, keys, columns: Of `sampling.leave`.
      how: The stream of the noise, and `width`, `tau`, `nodes` and `leaves` as there.
    """
    group, size = vocabulary.group, vocabulary.size
    rows = kernels.vocab_parallel.filtered(sampling, request, len(logits), how["nodes"], size)
    every = all_gather.gathered_rows(group, logits, rows)
    part = kernels.sampling.Part(
        size, group.count, first_of(vocabulary).astype(jnp.int32).reshape(1), every
    )
    left, *held = kernels.sampling.leave(
        *(logits, seen, positions, sampling, request, allowed, keys, columns, part),
        tiles=kernels.tiles.sampling.of(rows=len(logits)),
        **how,
    )
    left, totals = all_gather.gathered(group, left), None
    same = {"ranks": group.count} | {name: how[name] for name in ("width", "tau", "nodes")}
    if how["tau"] is not None:
        of_groups = (left, *held, sampling.temperature, part.first)
        totals = kernels.vocab_parallel.totals(*of_groups, share=vocabulary.share, **same)
        totals = all_gather.gathered(group, totals)
    joined = (left, totals, sampling.temperature, columns)
    return kernels.vocab_parallel.join(*joined, vocab=size, **same)


def choose_parts(
    kernels: Kernels,
    logits: Float[jax.Array, "R share"],
    seen: Seen,
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary,
    leaves: Any = None,
) -> Chosen:
    """As `plain_choose` of several ranks; `leaves` are of the head that has given the logits."""
    given = (logits, seen, positions, sampling, request, allowed, positions, None, vocabulary)
    how = {"stream": TARGET_STREAM, "width": 1, "tau": None, "nodes": 0, "leaves": leaves}
    ids, _, is_finite = of_parts(kernels, *given, **how)
    return Chosen(ids[:, 0], is_finite)


choose = kernel_or_plain(kernel_choose, plain_choose)


def is_finite(
    logits: Float[jax.Array, "R share"], vocabulary: Vocabulary = ALL
) -> Bool[jax.Array, " R"]:
    """Rows whose logits are finite, all of them."""
    return all_of(jnp.isfinite(logits).all(axis=1), vocabulary)


def best(
    perturbed: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Int[jax.Array, " R"]:
    """The first maximum of each row, NaN as the maximum included."""
    return best_of(perturbed, 1, vocabulary)[1][:, 0]


class Ranked(NamedTuple):
    """Candidates for the children of nodes; fields as in the specification."""

    ids: Int[jax.Array, "B k width"]
    weights: Float[jax.Array, "B k width"]
    processed: Float[jax.Array, "R vocab"] | None


def plain_rank(
    logits: Float[jax.Array, "B k share"],
    seen: Seen,
    positions: Int[jax.Array, " B"],
    sampling: Sampling,
    keys: Int[jax.Array, " B"],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> Ranked:
    """Ranks the children of k nodes of each request as the target will choose among them.

    What drafts are sampled from is, of several ranks, this one's part of the target's vocabulary.

    Args:
      logits: Whole, or a rank's part of a head's.
    """
    (B, k, share), vocab = logits.shape, seen.counts.shape[1]
    request = jnp.repeat(jnp.arange(B), k)
    tokens = over_tokens(spread(logits.reshape(B * k, share), vocabulary), columns, vocab)
    edited = _edited(tokens, seen, positions[request], sampling, request, None)
    edited = edited if columns is None else edited[:, columns]
    scores = _supported(edited, sampling, request, vocabulary)
    by_node = over_tokens(scores, columns, vocab).reshape(B, k, vocab)
    noisy = perturbed_alike(by_node, sampling, keys, stream).reshape(B * k, vocab)
    noisy = noisy if columns is None else noisy[:, columns]
    values, ids = best_of(noisy, width, vocabulary)
    warmth = sampling.temperature[request]
    weights = draft_weights(noisy, values, warmth, DRAFT_TAU, vocabulary)
    ids = ids if columns is None else columns[ids]
    target = Vocabulary(vocab, vocabulary.group)
    kept = moved(scores, columns, vocabulary, target) if is_sampled else None
    return Ranked(ids.reshape(B, k, width), weights.reshape(B, k, width), kept)


def kernel_rank(
    kernels: Kernels,
    logits: Float[jax.Array, "B k share"],
    seen: Seen,
    positions: Int[jax.Array, " B"],
    sampling: Sampling,
    keys: Int[jax.Array, " B"],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> Ranked:
    """As `plain_rank`; what drafts are sampled from is whole.

    Logits are gathered where a law is asked for or the drafter has a vocabulary of another size.
    """
    (B, k, share), target = logits.shape, seen.counts.shape[1]
    is_whole = is_sampled or (columns is None and vocabulary.size != target)
    if is_parted(vocabulary, B * k) and not is_whole:
        own = logits.reshape(B * k, share)
        given = (own, seen, positions, sampling, positions, None, keys, columns, vocabulary)
        how = {"stream": stream, "width": width, "tau": DRAFT_TAU, "nodes": k}
        ids, weights, _ = of_parts(kernels, *given, **how)
        return Ranked(ids.reshape(B, k, width), weights.reshape(B, k, width), None)
    tokens = whole(logits, vocabulary)
    if columns is None:
        tokens = over_tokens(tokens, None, target)
    ranked = kernels.sampling.rank(
        *(tokens, seen, positions, sampling, keys, stream, width, is_sampled, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=B * k),
    )
    return Ranked(*ranked)


rank = kernel_or_plain(kernel_rank, plain_rank)


def draft_weights(
    perturbed: Float[jax.Array, "R size"],
    some: Float[jax.Array, "R some"],
    temperature: Float[jax.Array, " R"],
    tau: float,
    vocabulary: Vocabulary = ALL,
) -> Float[jax.Array, "R some"]:
    """How likely the drafter takes some of the tokens for the target's choice, as a logarithm."""
    softness = jnp.where(temperature > 0, jnp.float32(tau), jnp.float32(1))[:, None]
    return log_probabilities(some / softness, norm(perturbed / softness, vocabulary))


def log_softmax(
    logits: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R vocab"]:
    """Natural logarithms of the probabilities of each row."""
    return log_probabilities(logits, norm(logits, vocabulary))


def probabilities(
    processed: Float[jax.Array, "R vocab"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, "R vocab"]:
    """What a row with a temperature samples from; 0 for what is excluded."""
    highest, total = norm(processed, vocabulary)
    return jnp.exp(processed - highest[:, None]) / total[:, None]
