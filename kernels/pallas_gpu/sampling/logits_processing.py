"""Logits processing: penalties, biases, token masks, exact sums (Pallas, Triton backend).

Logits are compared as ordered integers (`key_of`), NaN included. Weights are summed as integers.
Results therefore depend neither on the order of summation nor on the tiles.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int, Int32

from kernels.pallas_gpu.sampling.gumbel_noise import threefry, words_of

PAIRS = 32  # pairs of token ids in a group
LOWEST, HIGHEST = -(2**31), 2**31 - 1

_LOG2_E = 1.4426950408889634
KEY_OF_INFINITY = 0x7F800000
KEY_OF_NOTHING = -2139095041  # key of -inf
_KEY_OF_NAN = 0x7FC00000


class VocabShard(NamedTuple):
    """Vocabulary shard of a rank, for vocab-parallel logits.

    Attributes:
      vocab: Tokens of all ranks.
      ranks: Number of ranks. All shards have the same size; the last ones have fewer tokens.
      first: First token of this rank's shard.
      every: Logits of all ranks side by side, for rows with a filter; undefined for other rows.
    """

    vocab: int
    ranks: int
    first: Int32[jax.Array, "1"]
    every: Float[jax.Array, "R places"]


class SamplingInputs(NamedTuple):
    """Inputs of all sampling kernels: first per row, then per request.

    Attributes:
      every, first: See `VocabShard`.
      path, on_path, stop_ids, bias_ids, bias_values, mask, columns: Any array if there are none.
      stream: RNG stream of the noise.
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


class SamplingSizes(NamedTuple):
    """Sizes of the arrays, and flags for the optional ones.

    Attributes:
      ranks, share: Ranks that shard the vocabulary, and the size of a shard; 0: rows are full.
      columns_by_request: Each request has its own columns.
      positions_by_node: Each node of a request has its own position and key.
      has_partials: The LM head stored block partials, so rows with a temperature are searched like
        rows with a filter.
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
    has_partials: bool = False
    columns_by_request: bool = False
    positions_by_node: bool = False


class RowSampling(NamedTuple):
    """Sampling parameters of one row."""

    request: Any
    slot: Any
    noise: tuple[Any, Any]
    temperature: Any
    is_filtered: Any
    has_penalty: Any
    below_min_length: Any
    biases: Any


def inputs_of(
    logits: Float[jax.Array, "R vocab"],
    seen: Any,
    positions: Int[jax.Array, "named ..."],
    sampling: Any,
    request: Int[jax.Array, "named ..."],
    allowed: Bool[jax.Array, "R vocab"] | None,
    columns: Int[jax.Array, "*B vocab"] | None,
    keys: Int[jax.Array, "named ..."],
    stream: int | Int[jax.Array, ""],
    part: VocabShard | None,
) -> SamplingInputs:
    """Returns the arrays as the kernels read them; any array replaces a missing optional one."""
    has_path, has_bias = seen.path.shape[1] > 0, sampling.bias_ids.shape[1] > 0
    return SamplingInputs(
        logits=logits,
        every=logits if part is None else part.every,
        first=seen.slots if part is None else part.first,
        request=request,
        positions=positions.ravel(),
        keys=keys.ravel(),
        slots=seen.slots,
        counts=seen.counts,
        path=seen.path if has_path else seen.slots,
        on_path=seen.on_path.astype(jnp.int32) if has_path else seen.slots,
        mask=logits if allowed is None else allowed.astype(jnp.int8),
        columns=seen.slots if columns is None else columns.reshape(-1, columns.shape[-1]),
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
    positions: jax.Array,
    columns: jax.Array | None,
    has_partials: bool = False,
    ranks: int = 1,
    share: int = 0,
) -> SamplingSizes:
    """Returns the sizes of the arrays and the flags of the optional ones."""
    num_bias = sampling.bias_ids.shape[1]
    return SamplingSizes(
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
        has_partials=has_partials,
        columns_by_request=columns is not None and columns.ndim > 1,
        positions_by_node=positions.ndim > 1,
    )


def row_sampling(inputs, row, sizes):
    """Loads the sampling parameters of a row."""
    request = lax.div(row, sizes.nodes) if sizes.nodes else inputs.request[row]
    named = request if sizes.nodes and not sizes.positions_by_node else row
    temperature = inputs.temperature[request]
    is_filtered = (inputs.top_p[request] < 1) | (inputs.top_k[request] < sizes.vocab)
    is_filtered = (is_filtered | (inputs.min_p[request] > 0) | sizes.has_partials) & (
        temperature > 0
    )
    has_penalty = (inputs.presence[request] != 0) | (inputs.frequency[request] != 0)
    has_penalty |= inputs.repetition[request] != 1
    biases = jnp.int32(0)
    if sizes.num_bias:
        j = lax.iota(jnp.int32, sizes.bias_lanes)
        at = inputs.bias_values.at[request, j]
        values = pltriton.load(at, mask=j < sizes.num_bias, other=0.0)
        biases = jnp.max(jnp.where(values != 0, j + 1, 0))
    return RowSampling(
        request=request,
        slot=inputs.slots[row],
        noise=(inputs.seed[request], inputs.keys[named].astype(jnp.uint32)),
        temperature=temperature,
        is_filtered=is_filtered,
        has_penalty=has_penalty,
        below_min_length=inputs.positions[named] < inputs.min_length[request],
        biases=biases,
    )


def ids_of(group):
    """Returns the token ids of groups, [groups, pairs, 2], and the numbers of the pairs."""
    pairs = group[:, None, None] * PAIRS + lax.iota(jnp.int32, PAIRS)[None, :, None]
    return pairs, 2 * pairs + lax.iota(jnp.int32, 2)[None, None, :]


def candidate_mask(ids, inputs, params, sizes):
    """Returns a mask of the candidates: the rank's shard, or all tokens if the row has a filter."""
    inside = ids < sizes.vocab
    if sizes.share:
        first = jnp.where(params.is_filtered, 0, inputs.first[0])
        end = jnp.where(params.is_filtered, sizes.vocab, inputs.first[0] + sizes.share)
        inside &= (ids >= first) & (ids < end)
    return inside


def columns_at(ids, row, inputs, sizes):
    """Returns the reference to a row's columns, which all rows share or each request has."""
    request = lax.div(row, sizes.nodes) if sizes.columns_by_request else jnp.int32(0)
    return inputs.columns.at[request, ids]


def tokens_of(ids, row, inputs, sizes):
    """Maps ids of a draft vocabulary to the target's tokens."""
    if not sizes.has_columns:
        return ids
    return pltriton.load(columns_at(ids, row, inputs, sizes), mask=ids < sizes.vocab, other=0)


def words_at(noise, pairs, ids, row, inputs, sizes):
    """Returns the RNG words of ids; a pair of ids shares one counter."""
    stream = inputs.stream[0]
    if not sizes.has_columns:
        return words_of(*noise, stream, pairs)
    tokens = tokens_of(ids, row, inputs, sizes)
    counter = (tokens >> 1).astype(jnp.uint32)
    even, odd = threefry(*noise, counter, jnp.zeros_like(counter) + stream)
    return jnp.where((tokens & 1) == 0, even, odd)


def scores_of(ids, inputs, row, params, sizes):
    """Loads the raw logits of a row's tokens and processes them, up to the top-k / top-p filter."""
    inside, request = candidate_mask(ids, inputs, params, sizes), params.request

    def load(ref, ids):
        return pltriton.load(ref.at[row, jnp.where(inside, ids, 0)], mask=inside, other=0.0)

    if sizes.share:
        raw = lax.cond(
            params.is_filtered,
            lambda: load(inputs.every, ids),
            lambda: load(inputs.logits, ids - inputs.first[0]),
        )
    else:
        raw = pltriton.load(inputs.logits.at[row, ids], mask=inside, other=0.0)
    tokens = ids
    if sizes.has_columns:
        # Token counts and biases are loaded only for rows that use them.
        asks = params.has_penalty | params.below_min_length | (params.biases > 0)
        limit = asks.astype(jnp.int32) * sizes.vocab
        tokens = pltriton.load(columns_at(ids, row, inputs, sizes), mask=ids < limit, other=0)
    x = lax.cond(
        params.has_penalty,
        lambda: _penalized(raw, tokens, inside, inputs, row, params, sizes),
        lambda: raw,
    )

    def biased(j, x):
        return jnp.where(
            tokens == inputs.bias_ids[request, j], x + inputs.bias_values[request, j], x
        )

    def without_stop(j, x):
        return jnp.where(tokens == inputs.stop_ids[request, j], -jnp.inf, x)

    if sizes.num_bias:
        x = lax.fori_loop(0, params.biases, biased, x)
    num_stops = sizes.num_stops * params.below_min_length.astype(jnp.int32)
    x = lax.fori_loop(0, num_stops, without_stop, x)
    if sizes.has_mask:
        is_allowed = pltriton.load(inputs.mask.at[row, ids], mask=inside, other=0) != 0
        x = jnp.where(is_allowed, x, -jnp.inf)
    return raw, lax.cond(params.temperature > 0, lambda: x / params.temperature, lambda: x)


def _penalized(x, tokens, inside, inputs, row, params, sizes):
    seen = pltriton.load(inputs.counts.at[params.slot, tokens], mask=inside, other=0)

    def add(j, seen):
        return seen + jnp.where(tokens == inputs.path[row, j], 2 * inputs.on_path[row, j], 0)

    if sizes.num_path:
        seen = lax.fori_loop(0, sizes.num_path, add, seen)
    repetition = inputs.repetition[params.request]
    x = jnp.where(seen > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    counts = (seen >> 1).astype(jnp.float32)
    x = x - inputs.presence[params.request] * jnp.where(counts > 0, 1.0, 0.0)
    return x - inputs.frequency[params.request] * counts


def key_of(x):
    """Maps logits to integers in the same order: NaN is the largest, and both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    bits = jnp.where(x != x, _KEY_OF_NAN, bits)
    return bits ^ ((bits >> 31) & HIGHEST)


def score_of(key):
    """Maps a key back to its logit."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & HIGHEST), jnp.float32)


def has_bad(raw):
    """Returns whether some logit is not finite."""
    return jnp.max(lax.bitcast_convert_type(raw, jnp.int32) & HIGHEST) >= KEY_OF_INFINITY


def first_token(keys, ids):
    """Returns the token with the largest key; the smallest id among equal keys."""
    best = jnp.max(keys)
    return best, jnp.min(jnp.where(keys == best, ids, HIGHEST))


def next_token(keys, ids, key, winner):
    """Returns the token after a given one, by falling keys and then by rising ids."""
    follows = (keys < key) | ((keys == key) & (ids > winner))
    best = jnp.max(jnp.where(follows, keys, LOWEST))
    return best, jnp.min(jnp.where(follows & (keys == best), ids, HIGHEST))


def store_sorted(keys, ids, width, store):
    """Stores the best tokens in order: calls `store` with a position, a key and an id."""
    first = first_token(keys, ids)
    store(0, *first)

    def store_next(rank, last):
        following = next_token(keys, ids, *last)
        store(rank, *following)
        return following

    if width > 1:
        lax.fori_loop(1, width, store_next, first)


def sharpness_of(temperature, tau):
    """Returns the factor that multiplies logits before they become weights."""
    # Pallas lowers a select between two scalar constants wrongly, so this is arithmetic.
    return 1.0 + (temperature > 0).astype(jnp.float32) * (1.0 / tau - 1.0)


def weight_of(x, highest, sharpness):
    """Computes weights of logits relative to the highest one."""
    weight = jnp.exp2((x - highest) * (sharpness * _LOG2_E))
    return jnp.where(weight <= 1, weight, 0.0)  # 0 if the logit or the highest one is NaN


def store_groups(peaks_at, masses_at, inside, x, keys, sharpness):
    """Stores the largest key of each group and the group's weight relative to its best token."""
    peaks = keys.max(axis=2).max(axis=1)
    weights = weight_of(x, score_of(peaks)[:, None, None], sharpness)
    units = jnp.where(keys > LOWEST, jnp.floor(weights * 2.0**24 + 0.5), 0.0).astype(jnp.int32)
    masses = units.sum(axis=2).sum(axis=1).astype(jnp.float32) * 2.0**-24
    pltriton.store(peaks_at, peaks, mask=inside)
    pltriton.store(masses_at, masses, mask=inside)


def halves_of(terms):
    """Splits numbers up to 1 into units of 2^-15 and a remainder in units of 2^-30."""
    high = jnp.floor(terms * 2.0**15)
    low = jnp.floor((terms * 2.0**15 - high) * 2.0**15 + 0.5)
    return high.astype(jnp.int32), low.astype(jnp.int32)


def carried(whole, high, low):
    """Normalises a sum of three int32: whole part, then units of `halves_of`, below 2^15 each."""
    high += low >> 15
    return whole + (high >> 15), high & 32767, low & 32767


def add_halves(sum, terms):
    """Adds numbers up to 1 to a sum of three int32."""
    whole, high, low = sum
    more_high, more_low = halves_of(terms)
    return carried(whole, high + more_high.sum(), low + more_low.sum())


def number_of(sum):
    """Converts a sum of three int32 to a float."""
    whole, high, low = (word.astype(jnp.float32) for word in sum)
    return whole + (high * 2.0**-15 + low * 2.0**-30)


def no_sum():
    """Returns an empty sum of three int32."""
    return jnp.int32(0), jnp.int32(0), jnp.int32(0)


def terms_of(peaks, masses, highest, sharpness):
    """Computes group weights relative to the highest logit, divided by the tokens of a group."""
    terms = masses * weight_of(score_of(peaks), highest, sharpness) * (0.5 / PAIRS)
    return jnp.where(peaks > LOWEST, terms, 0.0)


def total_of(peaks, masses, highest, sharpness):
    """Computes the total weight of all groups relative to the highest logit."""
    terms = terms_of(peaks, masses, highest, sharpness)
    return number_of(add_halves(no_sum(), terms)) * (2 * PAIRS)
