"""Logits processing: penalties, biases, token masks, exact sums (Triton).

Logits are compared as ordered integers (`key_of`), NaN included. Weights are summed as integers.
Results therefore depend neither on the order of summation nor on the tiles.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.triton_gpu.sampling.gumbel_noise import threefry, words_of

PAIRS = tl.constexpr(32)  # pairs of token ids in a group
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)

_LOG2_E = tl.constexpr(1.4426950408889634)
KEY_OF_INFINITY = tl.constexpr(0x7F800000)
KEY_OF_NOTHING = tl.constexpr(-2139095041)  # key of -inf
_KEY_OF_NAN = tl.constexpr(0x7FC00000)


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
    first: int
    every: Float[Tensor, "R places"]


class SamplingInputs(NamedTuple):
    """Inputs of all sampling kernels: first per row, then per request.

    Attributes:
      every, first: See `VocabShard`.
      path, on_path, mask, columns: Any array if there are none.
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
    noise: Any
    temperature: Any
    is_filtered: Any
    has_penalty: Any
    below_min_length: Any
    biases: Any


def inputs_of(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, "named ..."],
    sampling: Any,
    request: Int[Tensor, "named ..."],
    allowed: Bool[Tensor, "R vocab"] | None,
    columns: Int[Tensor, "*B vocab"] | None,
    keys: Int[Tensor, "named ..."],
    stream: int,
    part: VocabShard | None,
) -> SamplingInputs:
    """Returns the arrays as the kernels read them; any array replaces a missing optional one."""
    has_path = seen.path.shape[1] > 0
    given = SamplingInputs(
        logits=logits,
        every=logits if part is None else part.every,
        first=0 if part is None else part.first,
        request=request,
        positions=positions,
        keys=keys,
        slots=seen.slots,
        counts=seen.counts,
        path=seen.path if has_path else seen.slots,
        on_path=seen.on_path if has_path else seen.slots,
        mask=logits if allowed is None else allowed,
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
        stop_ids=sampling.stop_ids,
        bias_ids=sampling.bias_ids,
        bias_values=sampling.bias_values,
        stream=stream,
    )
    # The path of a draft level is a slice of a longer one.
    return SamplingInputs(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))


def sizes_of(
    vocab: int,
    seen: Any,
    sampling: Any,
    allowed: Tensor | None,
    nodes: int,
    positions: Tensor,
    columns: Tensor | None,
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
        bias_lanes=triton.next_power_of_2(max(num_bias, 1)),
        has_mask=allowed is not None,
        nodes=nodes,
        has_columns=columns is not None,
        ranks=ranks,
        share=share,
        has_partials=has_partials,
        columns_by_request=columns is not None and columns.ndim > 1,
        positions_by_node=positions.ndim > 1,
    )


@triton.jit
def row_sampling(inputs, row, sizes: tl.constexpr):
    """Loads the sampling parameters of a row."""
    request = row // sizes.nodes if sizes.nodes > 0 else row
    named = row if sizes.positions_by_node else request
    if sizes.nodes == 0:
        request, named = tl.load(inputs.request + row).to(tl.int32), row
    position = tl.load(inputs.positions + named)
    seed = tl.load(inputs.seed + request).to(tl.uint32, bitcast=True)
    temperature = tl.load(inputs.temperature + request)
    is_filtered = (tl.load(inputs.top_p + request) < 1) | (
        tl.load(inputs.top_k + request) < sizes.vocab
    )
    is_filtered = is_filtered | (tl.load(inputs.min_p + request) > 0) | sizes.has_partials
    is_filtered &= temperature > 0
    has_penalty = (tl.load(inputs.presence + request) != 0) | (
        tl.load(inputs.frequency + request) != 0
    )
    has_penalty |= tl.load(inputs.repetition + request) != 1
    biases = row * 0
    if sizes.num_bias > 0:
        j = tl.arange(0, sizes.bias_lanes)
        values = tl.load(
            inputs.bias_values + request * sizes.num_bias + j, mask=j < sizes.num_bias, other=0.0
        )
        biases = tl.max(tl.where(values != 0, j + 1, 0))
    return RowSampling(
        request=request,
        slot=tl.load(inputs.slots + row).to(tl.int64),
        noise=(seed, tl.load(inputs.keys + named).to(tl.uint32)),
        temperature=temperature,
        is_filtered=is_filtered,
        has_penalty=has_penalty,
        below_min_length=position < tl.load(inputs.min_length + request),
        biases=biases,
    )


@triton.jit
def ids_of(group):
    """Returns the token ids of groups, [groups, pairs, 2], and the numbers of the pairs."""
    pairs = group[:, None, None] * PAIRS + tl.arange(0, PAIRS)[None, :, None]
    return pairs, 2 * pairs + tl.arange(0, 2)[None, None, :]


@triton.jit
def candidate_mask(ids, inputs, params, sizes: tl.constexpr):
    """Returns a mask of the candidates: the rank's shard, or all tokens if the row has a filter."""
    inside = ids < sizes.vocab
    if sizes.share > 0:
        first = tl.where(params.is_filtered, 0, inputs.first)
        end = tl.where(params.is_filtered, sizes.vocab, inputs.first + sizes.share)
        inside &= (ids >= first) & (ids < end)
    return inside


@triton.jit
def columns_of(row, inputs, sizes: tl.constexpr):
    """Returns the columns of a row, which all rows share or each request has."""
    columns = inputs.columns
    if sizes.columns_by_request:
        columns += row // sizes.nodes * sizes.vocab
    return columns


@triton.jit
def tokens_of(ids, row, inputs, sizes: tl.constexpr):
    """Maps ids of a draft vocabulary to the target's tokens."""
    tokens = ids
    if sizes.has_columns:
        tokens = tl.load(columns_of(row, inputs, sizes) + ids, mask=ids < sizes.vocab, other=0)
    return tokens


@triton.jit
def words_at(noise, pairs, ids, row, inputs, sizes: tl.constexpr):
    """Returns the RNG words of ids; a pair of ids shares one counter."""
    seed, position = noise
    if sizes.has_columns:
        tokens = tokens_of(ids, row, inputs, sizes)
        counter = (tokens >> 1).to(tl.uint32)
        even, odd = threefry(seed, position, counter, counter * 0 + inputs.stream)
        words = tl.where((tokens & 1) == 0, even, odd)
    else:
        words = words_of(seed, position, inputs.stream, pairs)
    return words


@triton.jit
def scores_of(ids, inputs, row, params, sizes: tl.constexpr):
    """Loads the raw logits of a row's tokens and processes them, up to the top-k / top-p filter."""
    request = params.request
    inside, start = candidate_mask(ids, inputs, params, sizes), row.to(tl.int64) * sizes.vocab
    if sizes.share == 0:
        raw = tl.load(inputs.logits + start + ids, mask=inside, other=0.0)
    elif params.is_filtered:
        whole = row.to(tl.int64) * (sizes.ranks * sizes.share)
        raw = tl.load(inputs.every + whole + ids, mask=inside, other=0.0)
    else:
        own = row.to(tl.int64) * sizes.share - inputs.first
        raw = tl.load(inputs.logits + own + ids, mask=inside, other=0.0)
    x, tokens = raw, ids
    if sizes.has_columns:
        # Token counts and biases are loaded only for rows that use them.
        limit = tl.where(
            params.has_penalty | params.below_min_length | (params.biases > 0), sizes.vocab, 0
        )
        tokens = tl.load(columns_of(row, inputs, sizes) + ids, mask=ids < limit, other=0)
    if params.has_penalty:
        seen = tl.load(
            inputs.counts + params.slot * sizes.target_vocab + tokens, mask=inside, other=0
        )
        for j in range(sizes.num_path):
            token = tl.load(inputs.path + row * sizes.num_path + j)
            is_before = tl.load(inputs.on_path + row * sizes.num_path + j).to(tl.int32)
            seen += tl.where(tokens == token, 2 * is_before, 0)
        repetition = tl.load(inputs.repetition + request)
        x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        counts = (seen >> 1).to(tl.float32)
        x = x - tl.load(inputs.presence + request) * tl.where(counts > 0, 1.0, 0.0)
        x = x - tl.load(inputs.frequency + request) * counts
    for j in range(params.biases):
        value = tl.load(inputs.bias_values + request * sizes.num_bias + j)
        x = tl.where(
            tokens == tl.load(inputs.bias_ids + request * sizes.num_bias + j), x + value, x
        )
    if params.below_min_length:
        for j in range(sizes.num_stops):
            is_stop = tokens == tl.load(inputs.stop_ids + request * sizes.num_stops + j)
            x = tl.where(is_stop, -float("inf"), x)
    if sizes.has_mask:
        is_allowed = tl.load(inputs.mask + start + ids, mask=inside, other=0).to(tl.int32) != 0
        x = tl.where(is_allowed, x, -float("inf"))
    if params.temperature > 0:
        x = x / params.temperature
    return raw, x


@triton.jit
def key_of(x):
    """Maps logits to integers in the same order: NaN is the largest, and both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, _KEY_OF_NAN, bits)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def score_of(key):
    """Maps a key back to its logit."""
    return (key ^ ((key >> 31) & HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit
def has_bad(raw):
    """Returns whether some logit is not finite."""
    return tl.max(raw.to(tl.int32, bitcast=True) & HIGHEST) >= KEY_OF_INFINITY


@triton.jit
def first_token(keys, ids):
    """Returns the token with the largest key; the smallest id among equal keys."""
    best = tl.max(keys)
    return best, tl.min(tl.where(keys == best, ids, HIGHEST))


@triton.jit
def next_token(keys, ids, key, winner):
    """Returns the token after a given one, by falling keys and then by rising ids."""
    follows = (keys < key) | ((keys == key) & (ids > winner))
    best = tl.max(tl.where(follows, keys, LOWEST))
    return best, tl.min(tl.where(follows & (keys == best), ids, HIGHEST))


@triton.jit
def sharpness_of(temperature, tau: tl.constexpr):
    """Returns the factor that multiplies logits before they become weights."""
    return tl.where(temperature > 0, 1.0 / tau, 1.0)


@triton.jit
def weight_of(x, highest, sharpness):
    """Computes weights of logits relative to the highest one."""
    weight = tl.exp2((x - highest) * (sharpness * _LOG2_E))
    return tl.where(weight <= 1, weight, 0.0)  # 0 if the logit or the highest one is NaN


@triton.jit
def store_groups(peaks_at, masses_at, inside, x, keys, sharpness):
    """Stores the largest key of each group and the group's weight relative to its best token."""
    peaks = tl.max(tl.max(keys, 2), 1)
    weights = weight_of(x, score_of(peaks)[:, None, None], sharpness)
    units = tl.where(keys > LOWEST, tl.floor(weights * 2.0**24 + 0.5), 0.0).to(tl.int32)
    tl.store(peaks_at, peaks, mask=inside)
    tl.store(masses_at, tl.sum(tl.sum(units, 2), 1).to(tl.float32) * 2.0**-24, mask=inside)


@triton.jit
def halves_of(terms):
    """Splits numbers up to 1 into units of 2^-15 and a remainder in units of 2^-30."""
    high = tl.floor(terms * 2.0**15)
    low = tl.floor((terms * 2.0**15 - high) * 2.0**15 + 0.5)
    return high.to(tl.int32), low.to(tl.int32)


@triton.jit
def carried(whole, high, low):
    """Normalises a sum of three int32: whole part, then units of `halves_of`, below 2^15 each."""
    high += low >> 15
    return whole + (high >> 15), high & 32767, low & 32767


@triton.jit
def add_halves(sum, terms):
    """Adds numbers up to 1 to a sum of three int32."""
    whole, high, low = sum
    more_high, more_low = halves_of(terms)
    return carried(whole, high + tl.sum(more_high), low + tl.sum(more_low))


@triton.jit
def number_of(sum):
    """Converts a sum of three int32 to a float."""
    whole, high, low = sum
    return whole.to(tl.float32) + (high.to(tl.float32) * 2.0**-15 + low.to(tl.float32) * 2.0**-30)


@triton.jit
def sums_of(a, b, c, d):
    """Computes four sums with one synchronisation of the program's warps."""
    ab, cd = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a, b, c, d


@triton.jit
def no_sum():
    """Returns an empty sum of three int32."""
    zero = tl.full((), 0, tl.int32)
    return zero, zero, zero


@triton.jit
def terms_of(peaks, masses, highest, sharpness):
    """Computes group weights relative to the highest logit, divided by the tokens of a group."""
    terms = masses * weight_of(score_of(peaks), highest, sharpness) * (0.5 / PAIRS)
    return tl.where(peaks > LOWEST, terms, 0.0)


@triton.jit
def total_of(peaks, masses, highest, sharpness):
    """Computes the total weight of all groups relative to the highest logit."""
    terms = terms_of(peaks, masses, highest, sharpness)
    return number_of(add_halves(no_sum(), terms)) * (2 * PAIRS)
