"""From logits to the chosen token; as `shared.spec.sampling`.

What no row of a step needs - penalties, filters, noise - is skipped by data (`lax.cond`), so one
compiled program serves all mixtures of rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, UInt32

from jax_impl.ops import draft_tree

TARGET_STREAM = 0
ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 1, 2, 3

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_BLOCK = 128


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

    def rows(self, index: Int[jax.Array, " R"]) -> "Sampling":
        """The parameters of the rows that `index` names, which may repeat."""
        return Sampling(*(field[index] for field in self))

    @property
    def has_penalty(self) -> Bool[jax.Array, ""]:
        """Whether any row looks at what was seen before."""
        return ((self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)).any()


def threefry2x32(
    key: tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]],
    counter: tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]],
) -> tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]]:
    """Threefry-2x32 with 20 rounds: two words from a key and a counter of two words each."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x0, x1 = jnp.broadcast_arrays(counter[0] + keys[0], counter[1] + keys[1])
    for group in range(5):
        for rotation in _ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + jnp.uint32(group + 1))
    return x0, x1


def uniform_of_words(words: UInt32[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Numbers above 0 and below 1 from uniform 32-bit words."""
    uniform = words.astype(jnp.float32) * jnp.float32(2**-32) + jnp.float32(2**-33)
    return jnp.minimum(uniform, jnp.float32(1 - 2**-24))


def noise_of_words(words: UInt32[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Gumbel noise from uniform 32-bit words; finite for all of them."""
    return -jnp.log(-jnp.log1p(-uniform_of_words(words)))


def uniforms(
    seeds: UInt32[jax.Array, " R"], positions: Int[jax.Array, " R"], levels: int
) -> Float[jax.Array, "R levels"]:
    """The number that decides on the draft of each level; `positions` are the newest tokens'."""
    counter = jnp.arange(levels, dtype=jnp.uint32)[None, :]
    key = (seeds[:, None], positions.astype(jnp.uint32)[:, None])
    words, _ = threefry2x32(key, (counter, jnp.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def draft_noise(
    seeds: UInt32[jax.Array, " R"], positions: Int[jax.Array, " R"], levels: int, vocab: int
) -> Float[jax.Array, "R levels vocab"]:
    """The noise of each level's drafts under the rejection rule; `positions` as in `uniforms`."""
    streams = jnp.tile(jnp.arange(levels, dtype=jnp.uint32) + DRAFT_STREAM, len(seeds))
    rows = (jnp.repeat(seeds, levels), jnp.repeat(positions, levels))
    return gumbel(*rows, vocab, streams[:, None]).reshape(len(seeds), levels, vocab)


def gumbel(
    seeds: UInt32[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    vocab: int,
    stream: int | UInt32[jax.Array, "R 1"],
) -> Float[jax.Array, "R vocab"]:
    """The noise of every token id at one position of each row, by one stream or one of each row."""
    counter = jnp.arange(-(-vocab // 2), dtype=jnp.uint32)[None, :]
    key = (seeds[:, None], positions.astype(jnp.uint32)[:, None])
    words = threefry2x32(key, (counter, jnp.asarray(stream, jnp.uint32)))
    return noise_of_words(jnp.stack(words, axis=-1).reshape(len(seeds), -1)[:, :vocab])


def gumbel_levels(
    sampling: Sampling, first_positions: Int[jax.Array, " B"], levels: int, vocab: int
) -> Float[jax.Array, "B levels vocab"]:
    """The target's noise at `levels` positions in a row; zeros where no row samples.

    One row of noise serves a depth: all nodes of that depth and the drafter's level share it, so a
    step makes all of its noise at once.
    """
    B = len(first_positions)

    def make() -> Float[jax.Array, "B levels vocab"]:
        positions = (first_positions[:, None] + jnp.arange(levels)).reshape(-1)
        seeds = jnp.repeat(sampling.seed, levels)
        return gumbel(seeds, positions, vocab, TARGET_STREAM).reshape(B, levels, vocab)

    none = jnp.zeros((B, levels, vocab), jnp.float32)
    return lax.cond((sampling.temperature > 0).any(), make, lambda: none)


def path_seen(
    seen: Int[jax.Array, "B vocab"],
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
) -> Int[jax.Array, "B N vocab"]:
    """What `seen` would be after each node of a tree."""
    B, N = tokens.shape
    on_path = draft_tree.ancestors(parents).at[:, :, 0].set(False).reshape(B * N, N)
    before, paths = jnp.repeat(seen, N, axis=0), jnp.repeat(tokens, N, axis=0)
    return seen_along(before, paths, on_path).reshape(B, N, -1)


def seen_along(
    seen: Int[jax.Array, "R vocab"],
    tokens: Int[jax.Array, "R path"],
    is_real: Bool[jax.Array, "R path"],
) -> Int[jax.Array, "R vocab"]:
    """What `seen` would be after the real ones of some output tokens."""
    rows = jnp.arange(len(tokens))[:, None]
    return seen.at[rows, tokens].add(2 * is_real.astype(jnp.int32))


def counted(
    seen: Int[jax.Array, "B vocab"],
    request: Int[jax.Array, " R"],
    tokens: Int[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    is_counted: Bool[jax.Array, " R"],
    prompt_length: Int[jax.Array, " B"],
) -> Int[jax.Array, "B vocab"]:
    """Adds tokens to what was seen: an output counts each time, the prompt's mark is a maximum."""
    is_output = positions >= prompt_length[request]
    seen = seen.at[request, tokens].add(2 * (is_counted & is_output).astype(jnp.int32))
    marks = jnp.zeros(seen.shape, jnp.int32)
    return seen | marks.at[request, tokens].max((is_counted & ~is_output).astype(jnp.int32))


def penalized(
    logits: Float[jax.Array, "R vocab"], seen: Int[jax.Array, "R vocab"], sampling: Sampling
) -> Float[jax.Array, "R vocab"]:
    """Applies repetition, then presence and frequency."""
    repetition = sampling.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    counts = seen // 2
    logits = logits - sampling.presence[:, None] * (counts > 0)
    return logits - sampling.frequency[:, None] * counts.astype(jnp.float32)


def support(
    logits: Float[jax.Array, "R vocab"],
    top_k: Int[jax.Array, " R"],
    top_p: Float[jax.Array, " R"],
    min_p: Float[jax.Array, " R"],
) -> Bool[jax.Array, "R vocab"]:
    """The tokens that may be chosen, each filter measured on the full distribution."""
    vocab = logits.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    negated, order = lax.sort((-logits, ids), dimension=1, num_keys=1, is_stable=True)
    ranked = jnp.exp(log_softmax(-negated))
    before = _running_sum(ranked) - ranked
    rank = jnp.arange(vocab)[None, :]
    stays = (rank < top_k[:, None]) | (top_k >= vocab)[:, None]
    stays &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    stays &= (ranked >= min_p[:, None] * ranked[:, :1]) | (min_p <= 0)[:, None]
    stays |= rank == 0
    rows = jnp.arange(len(logits))[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(stays, unique_indices=True)


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
    seen: Int[jax.Array, "R vocab"],
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    allowed: Bool[jax.Array, "R vocab"] | None,
) -> Float[jax.Array, "R vocab"]:
    """Everything between raw logits and the choice, but the noise; excluded tokens are -inf."""
    return processed_after(logits, lambda: seen, positions, sampling, allowed)


def processed_after(
    logits: Float[jax.Array, "R vocab"],
    seen: Callable[[], Int[jax.Array, "R vocab"]],
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    allowed: Bool[jax.Array, "R vocab"] | None,
) -> Float[jax.Array, "R vocab"]:
    """As `processed`; `seen` is computed only in steps where a row has a penalty."""

    def with_penalties() -> Float[jax.Array, "R vocab"]:
        return penalized(logits, seen(), sampling)

    logits = lax.cond(sampling.has_penalty, with_penalties, lambda: logits)
    row = jnp.arange(len(logits))[:, None]
    logits = logits.at[row, sampling.bias_ids].add(sampling.bias_values)
    too_short = (positions < sampling.min_length)[:, None]
    bound = jnp.where(too_short, -jnp.inf, jnp.inf)
    logits = logits.at[row, sampling.stop_ids].min(jnp.broadcast_to(bound, sampling.stop_ids.shape))
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    sampled = sampling.temperature > 0
    scaled = logits / jnp.where(sampled, sampling.temperature, 1)[:, None]
    filters = (sampling.top_k < logits.shape[1]) | (sampling.top_p < 1) | (sampling.min_p > 0)

    def filtered() -> Float[jax.Array, "R vocab"]:
        keep = support(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
        return jnp.where(keep | ~sampled[:, None], scaled, -jnp.inf)

    return lax.cond((filters & sampled).any(), filtered, lambda: scaled)


def perturbed(
    processed: Float[jax.Array, "R vocab"],
    noise: Float[jax.Array, "R vocab"],
    temperature: Float[jax.Array, " R"],
) -> Float[jax.Array, "R vocab"]:
    """Adds the noise to rows with a temperature above 0."""
    return processed + jnp.where((temperature > 0)[:, None], noise, 0)


def choose(
    processed: Float[jax.Array, "R vocab"],
    noise: Float[jax.Array, "R vocab"],
    temperature: Float[jax.Array, " R"],
) -> Int[jax.Array, " R"]:
    """The token of each row: the first maximum after the noise."""
    return _first_maximum(perturbed(processed, noise, temperature))


def _first_maximum(x: Float[jax.Array, "R vocab"]) -> Int[jax.Array, " R"]:
    """As `jnp.argmax`, NaN as the maximum included; that one takes nine times as long on a CPU."""
    is_maximum = (x == x.max(axis=1, keepdims=True)) | jnp.isnan(x)
    return jnp.where(is_maximum, jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[1]).min(axis=1)


def draft_weights(
    perturbed: Float[jax.Array, "R vocab"], temperature: Float[jax.Array, " R"], tau: float
) -> Float[jax.Array, "R vocab"]:
    """How likely the drafter takes each token for the target's choice, as a logarithm."""
    softness = jnp.where(temperature > 0, jnp.float32(tau), jnp.float32(1))
    return log_softmax(perturbed / softness[:, None])


def top_candidates(perturbed: Float[jax.Array, "R vocab"], k: int) -> Int[jax.Array, "R k"]:
    """The ids of the k largest values, best first; equal ones by the lower id."""
    if k == 1:
        return _first_maximum(perturbed)[:, None]
    return lax.top_k(perturbed, k)[1].astype(jnp.int32)


def log_softmax(logits: Float[jax.Array, "R vocab"]) -> Float[jax.Array, "R vocab"]:
    """Natural logarithms of the probabilities of each row."""
    return jax.nn.log_softmax(logits, axis=1)


def probabilities(processed: Float[jax.Array, "R vocab"]) -> Float[jax.Array, "R vocab"]:
    """What a row with a temperature samples from; 0 for what is excluded."""
    return jax.nn.softmax(processed, axis=1)


def logprobs(
    logits: Float[jax.Array, "R vocab"], ids: Int[jax.Array, " R"]
) -> Float[jax.Array, " R"]:
    """The log-probability of one token of each row under the raw logits."""
    return jnp.take_along_axis(log_softmax(logits), ids[:, None], axis=1)[:, 0]


def top_logprobs(
    logits: Float[jax.Array, "R vocab"], k: int
) -> tuple[Int[jax.Array, "R k"], Float[jax.Array, "R k"]]:
    """The k most likely tokens of each row under the raw logits, and their log-probabilities."""
    ids = top_candidates(logits, k)
    return ids, jnp.take_along_axis(log_softmax(logits), ids, axis=1)
