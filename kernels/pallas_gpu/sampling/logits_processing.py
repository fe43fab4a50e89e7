"""What the kernels of sampling share: scores as the specification processes them, and their sums.

Scores are compared as whole numbers in their order (`key_of`), which NaN has a place in, and
weights are summed as whole numbers: no order and no tile decides anything.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int, Int32

from kernels.pallas_gpu.sampling.gumbel_noise import threefry, words_of

PAIRS = 32  # of token ids in a group
LOWEST, HIGHEST = -(2**31), 2**31 - 1

_LOG2_E = 1.4426950408889634
KEY_OF_INFINITY = 0x7F800000
KEY_OF_NOTHING = -2139095041  # of -inf
_KEY_OF_NAN = 0x7FC00000


class Part(NamedTuple):
    """What a rank has of a vocabulary that ranks score between them.

    Attributes:
      vocab: Tokens of all ranks.
      ranks: How many there are; each has places for as many tokens, the last ones fewer tokens.
      first: The first token of this rank's places.
      every: The scores of rows with a filter, of all ranks side by side; undefined of other rows.
    """

    vocab: int
    ranks: int
    first: Int32[jax.Array, "1"]
    every: Float[jax.Array, "R places"]


class Inputs(NamedTuple):
    """What all kernels read: first of the rows, then of the requests.

    Attributes:
      every, first: See `Part`.
      path, on_path, stop_ids, bias_ids, bias_values, mask, columns: Where there are none, anything.
      stream: Of the noise.
    """

    logits: Any
    every: Any
    first: Any
    request: Any
    positions: Any
    keys: Any
    slots: Any
    counts: Any
    path: Any
    on_path: Any
    mask: Any
    columns: Any
    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    seed: Any
    presence: Any
    frequency: Any
    repetition: Any
    min_length: Any
    stop_ids: Any
    bias_ids: Any
    bias_values: Any
    stream: Any


class Sizes(NamedTuple):
    """Sizes of the arrays, and which there are.

    Attributes:
      ranks, share: That have the vocabulary between them, and places of each; 0: rows are whole.
      is_left: A head has left something, so that rows with a temperature are searched as those
        with a filter are.
    """

    vocab: int
    target_vocab: int
    num_path: int
    num_stops: int
    num_bias: int
    bias_lanes: int
    has_mask: bool
    nodes: int
    has_columns: bool
    ranks: int
    share: int
    is_left: bool = False


class Wish(NamedTuple):
    """What a row asks for."""

    request: Any
    slot: Any
    noise: tuple[Any, Any]
    temperature: Any
    is_filtered: Any
    has_penalty: Any
    is_short: Any
    biases: Any


def inputs_of(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, " named"],
    sampling: Any,
    request: Int[jax.Array, " named"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    columns: Int[jax.Array, " vocab"] | None,
    keys: Int[jax.Array, " named"],
    stream: int | Int[jax.Array, ""],
    part: Part | None,
) -> Inputs:
    """The arrays as the kernels read them; where one has no columns, there is another."""
    has_path, has_bias = seen.path.shape[1] > 0, sampling.bias_ids.shape[1] > 0
    return Inputs(
        logits=logits,
        every=logits if part is None else part.every,
        first=seen.slots if part is None else part.first,
        request=request,
        positions=positions,
        keys=keys,
        slots=seen.slots,
        counts=seen.counts,
        path=seen.path if has_path else seen.slots,
        on_path=seen.on_path.astype(jnp.int32) if has_path else seen.slots,
        mask=logits if allowed is None else allowed.astype(jnp.int8),
        columns=seen.slots if columns is None else columns,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence=sampling.presence,
        frequency=sampling.frequency,
        repetition=sampling.repetition,
        min_length=sampling.min_length,
        stop_ids=sampling.stop_ids if sampling.stop_ids.shape[1] else sampling.top_k,
        bias_ids=sampling.bias_ids if has_bias else sampling.top_k,
        bias_values=sampling.bias_values if has_bias else sampling.top_p,
        stream=jnp.asarray(stream).astype(jnp.uint32).reshape(1),
    )


def sizes_of(
    vocab: int,
    seen: Any,
    sampling: Any,
    allowed: jax.Array | None,
    nodes: int,
    columns: jax.Array | None,
    is_left: bool = False,
    ranks: int = 1,
    share: int = 0,
) -> Sizes:
    """Their sizes, and which there are."""
    num_bias = sampling.bias_ids.shape[1]
    return Sizes(
        vocab=vocab,
        target_vocab=seen.counts.shape[1],
        num_path=seen.path.shape[1],
        num_stops=sampling.stop_ids.shape[1],
        num_bias=num_bias,
        bias_lanes=pl.next_power_of_2(max(num_bias, 1)),
        has_mask=allowed is not None,
        nodes=nodes,
        has_columns=columns is not None,
        ranks=ranks,
        share=share,
        is_left=is_left,
    )


def wish_of(inputs, row, sizes):
    """What a row asks for."""
    request = lax.div(row, sizes.nodes) if sizes.nodes else inputs.request[row]
    named = request if sizes.nodes else row  # positions and keys are a request's, or a row's
    temperature = inputs.temperature[request]
    is_filtered = (inputs.top_p[request] < 1) | (inputs.top_k[request] < sizes.vocab)
    is_filtered = (is_filtered | (inputs.min_p[request] > 0) | sizes.is_left) & (temperature > 0)
    has_penalty = (inputs.presence[request] != 0) | (inputs.frequency[request] != 0)
    has_penalty |= inputs.repetition[request] != 1
    biases = jnp.int32(0)
    if sizes.num_bias:
        j = lax.iota(jnp.int32, sizes.bias_lanes)
        at = inputs.bias_values.at[request, j]
        values = pltriton.load(at, mask=j < sizes.num_bias, other=0.0)
        biases = jnp.max(jnp.where(values != 0, j + 1, 0))
    return Wish(
        request=request,
        slot=inputs.slots[row],
        noise=(inputs.seed[request], inputs.keys[named].astype(jnp.uint32)),
        temperature=temperature,
        is_filtered=is_filtered,
        has_penalty=has_penalty,
        is_short=inputs.positions[named] < inputs.min_length[request],
        biases=biases,
    )


def ids_of(group):
    """The token ids of groups, [groups, pairs, 2], and the numbers of the pairs."""
    pairs = group[:, None, None] * PAIRS + lax.iota(jnp.int32, PAIRS)[None, :, None]
    return pairs, 2 * pairs + lax.iota(jnp.int32, 2)[None, None, :]


def is_own(ids, inputs, wish, sizes):
    """Which ids are tokens among which a row is chosen here: a rank's, where it has no filter."""
    inside = ids < sizes.vocab
    if sizes.share:
        first = jnp.where(wish.is_filtered, 0, inputs.first[0])
        end = jnp.where(wish.is_filtered, sizes.vocab, inputs.first[0] + sizes.share)
        inside &= (ids >= first) & (ids < end)
    return inside


def tokens_of(ids, inputs, sizes):
    """The target's tokens, where a drafter numbers its own."""
    if not sizes.has_columns:
        return ids
    return pltriton.load(inputs.columns.at[ids], mask=ids < sizes.vocab, other=0)


def words_at(noise, pairs, ids, inputs, sizes):
    """The words of the noise of ids, which lie in pairs."""
    stream = inputs.stream[0]
    if not sizes.has_columns:
        return words_of(*noise, stream, pairs)
    tokens = tokens_of(ids, inputs, sizes)
    counter = (tokens >> 1).astype(jnp.uint32)
    even, odd = threefry(*noise, counter, jnp.zeros_like(counter) + stream)
    return jnp.where((tokens & 1) == 0, even, odd)


def scores_of(ids, inputs, row, wish, sizes):
    """Raw logits of a row's tokens, and what `processed` makes of them before the support."""
    inside, request = is_own(ids, inputs, wish, sizes), wish.request

    def load(ref, ids):
        return pltriton.load(ref.at[row, jnp.where(inside, ids, 0)], mask=inside, other=0.0)

    if sizes.share:
        raw = lax.cond(
            wish.is_filtered,
            lambda: load(inputs.every, ids),
            lambda: load(inputs.logits, ids - inputs.first[0]),
        )
    else:
        raw = pltriton.load(inputs.logits.at[row, ids], mask=inside, other=0.0)
    tokens = ids
    if sizes.has_columns:
        # Loaded where a row asks about tokens.
        asks = wish.has_penalty | wish.is_short | (wish.biases > 0)
        asked_until = asks.astype(jnp.int32) * sizes.vocab
        tokens = pltriton.load(inputs.columns.at[ids], mask=ids < asked_until, other=0)
    x = lax.cond(
        wish.has_penalty,
        lambda: _penalized(raw, tokens, inside, inputs, row, wish, sizes),
        lambda: raw,
    )

    def biased(j, x):
        return jnp.where(
            tokens == inputs.bias_ids[request, j], x + inputs.bias_values[request, j], x
        )

    def without_stop(j, x):
        return jnp.where(tokens == inputs.stop_ids[request, j], -jnp.inf, x)

    if sizes.num_bias:
        x = lax.fori_loop(0, wish.biases, biased, x)
    num_stops = sizes.num_stops * wish.is_short.astype(jnp.int32)
    x = lax.fori_loop(0, num_stops, without_stop, x)
    if sizes.has_mask:
        is_allowed = pltriton.load(inputs.mask.at[row, ids], mask=inside, other=0) != 0
        x = jnp.where(is_allowed, x, -jnp.inf)
    return raw, lax.cond(wish.temperature > 0, lambda: x / wish.temperature, lambda: x)


def _penalized(x, tokens, inside, inputs, row, wish, sizes):
    seen = pltriton.load(inputs.counts.at[wish.slot, tokens], mask=inside, other=0)

    def add(j, seen):
        return seen + jnp.where(tokens == inputs.path[row, j], 2 * inputs.on_path[row, j], 0)

    if sizes.num_path:
        seen = lax.fori_loop(0, sizes.num_path, add, seen)
    repetition = inputs.repetition[wish.request]
    x = jnp.where(seen > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    counts = (seen >> 1).astype(jnp.float32)
    x = x - inputs.presence[wish.request] * jnp.where(counts > 0, 1.0, 0.0)
    return x - inputs.frequency[wish.request] * counts


def key_of(x):
    """Whole numbers in the order of the scores: NaN is the largest, and both zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    bits = jnp.where(x != x, _KEY_OF_NAN, bits)
    return bits ^ ((bits >> 31) & HIGHEST)


def score_of(key):
    """The score that a key stands for."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & HIGHEST), jnp.float32)


def has_bad(raw):
    """Whether some score is not finite."""
    return jnp.max(lax.bitcast_convert_type(raw, jnp.int32) & HIGHEST) >= KEY_OF_INFINITY


def first_token(keys, ids):
    """The token with the largest key, of several the one with the smallest id."""
    best = jnp.max(keys)
    return best, jnp.min(jnp.where(keys == best, ids, HIGHEST))


def next_token(keys, ids, key, winner):
    """The token after one that is given, by falling keys and then by rising ids."""
    follows = (keys < key) | ((keys == key) & (ids > winner))
    best = jnp.max(jnp.where(follows, keys, LOWEST))
    return best, jnp.min(jnp.where(follows & (keys == best), ids, HIGHEST))


def in_order(keys, ids, width, store):
    """Stores the best tokens by their ranks: `store` takes a rank, a key and an id."""
    first = first_token(keys, ids)
    store(0, *first)

    def store_next(rank, last):
        following = next_token(keys, ids, *last)
        store(rank, *following)
        return following

    if width > 1:
        lax.fori_loop(1, width, store_next, first)


def sharpness_of(temperature, tau):
    """By what scores are multiplied before they become weights."""
    # Scalars are not chosen between two constants: Pallas lowers that wrongly.
    return 1.0 + (temperature > 0).astype(jnp.float32) * (1.0 / tau - 1.0)


def weight_of(x, highest, sharpness):
    """How likely scores are beside the highest one."""
    weight = jnp.exp2((x - highest) * (sharpness * _LOG2_E))
    return jnp.where(weight <= 1, weight, 0.0)  # not where a score or the highest is no number


def store_groups(peaks_at, masses_at, inside, x, keys, sharpness):
    """The largest key of each group, and how likely the group is beside its own best token."""
    peaks = keys.max(axis=2).max(axis=1)
    weights = weight_of(x, score_of(peaks)[:, None, None], sharpness)
    units = jnp.where(keys > LOWEST, jnp.floor(weights * 2.0**24 + 0.5), 0.0).astype(jnp.int32)
    masses = units.sum(axis=2).sum(axis=1).astype(jnp.float32) * 2.0**-24
    pltriton.store(peaks_at, peaks, mask=inside)
    pltriton.store(masses_at, masses, mask=inside)


def halves_of(terms):
    """Numbers up to 1 in units of 2^-15, and the rest of them in units of 2^-30."""
    high = jnp.floor(terms * 2.0**15)
    low = jnp.floor((terms * 2.0**15 - high) * 2.0**15 + 0.5)
    return high.astype(jnp.int32), low.astype(jnp.int32)


def carried(whole, high, low):
    """A sum in three words: whole, and the units of `halves_of`, fewer than 2^15 of each."""
    high += low >> 15
    return whole + (high >> 15), high & 32767, low & 32767


def add_halves(sum, terms):
    """Adds numbers up to 1 to a sum in three words."""
    whole, high, low = sum
    more_high, more_low = halves_of(terms)
    return carried(whole, high + more_high.sum(), low + more_low.sum())


def number_of(sum):
    """What a sum in three words stands for."""
    whole, high, low = (word.astype(jnp.float32) for word in sum)
    return whole + (high * 2.0**-15 + low * 2.0**-30)


def no_sum():
    """A sum of nothing, in three words."""
    return jnp.int32(0), jnp.int32(0), jnp.int32(0)


def terms_of(peaks, masses, highest, sharpness):
    """How likely groups are beside a token with the highest score, each over a group's tokens."""
    terms = masses * weight_of(score_of(peaks), highest, sharpness) * (0.5 / PAIRS)
    return jnp.where(peaks > LOWEST, terms, 0.0)


def total_of(peaks, masses, highest, sharpness):
    """How likely all groups are together beside a token with the highest score."""
    terms = terms_of(peaks, masses, highest, sharpness)
    return number_of(add_halves(no_sum(), terms)) * (2 * PAIRS)
