"""What the kernels of sampling share: scores as the specification processes them, and their sums.

Scores are compared as whole numbers in their order (`key_of`), which NaN has a place in, and
weights are summed as whole numbers: no order and no tile decides anything.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.triton_gpu.sampling.gumbel_noise import threefry, words_of

PAIRS = tl.constexpr(32)  # of token ids in a group
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)

_LOG2_E = tl.constexpr(1.4426950408889634)
KEY_OF_INFINITY = tl.constexpr(0x7F800000)
KEY_OF_NOTHING = tl.constexpr(-2139095041)  # of -inf
_KEY_OF_NAN = tl.constexpr(0x7FC00000)


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
    first: int
    every: Float[Tensor, "R places"]


class Inputs(NamedTuple):
    """What all kernels read: first of the rows, then of the requests.

    Attributes:
      every, first: See `Part`.
      path, on_path, mask, columns: Where there are none, anything.
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
    noise: Any
    temperature: Any
    is_filtered: Any
    has_penalty: Any
    is_short: Any
    biases: Any


def inputs_of(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " named"],
    sampling: Any,
    request: Int[Tensor, " named"],
    allowed: Bool[Tensor, "R vocab"] | None,
    columns: Int[Tensor, " vocab"] | None,
    keys: Int[Tensor, " named"],
    stream: int,
    part: Part | None,
) -> Inputs:
    """The arrays as the kernels read them; where one has no columns, there is another."""
    has_path = seen.path.shape[1] > 0
    given = Inputs(
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
    # The path of a draft level is a part of a longer one.
    return Inputs(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))


def sizes_of(
    vocab: int,
    seen: Any,
    sampling: Any,
    allowed: Tensor | None,
    nodes: int,
    columns: Tensor | None,
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
        bias_lanes=triton.next_power_of_2(max(num_bias, 1)),
        has_mask=allowed is not None,
        nodes=nodes,
        has_columns=columns is not None,
        ranks=ranks,
        share=share,
        is_left=is_left,
    )


@triton.jit
def wish_of(inputs, row, sizes: tl.constexpr):
    """What a row asks for."""
    request = row // sizes.nodes if sizes.nodes > 0 else row
    named = request  # positions and keys are a request's, or a row's
    if sizes.nodes == 0:
        request, named = tl.load(inputs.request + row).to(tl.int32), row
    position = tl.load(inputs.positions + named)
    seed = tl.load(inputs.seed + request).to(tl.uint32, bitcast=True)
    temperature = tl.load(inputs.temperature + request)
    is_filtered = (tl.load(inputs.top_p + request) < 1) | (
        tl.load(inputs.top_k + request) < sizes.vocab
    )
    is_filtered = is_filtered | (tl.load(inputs.min_p + request) > 0) | sizes.is_left
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
    return Wish(
        request=request,
        slot=tl.load(inputs.slots + row).to(tl.int64),
        noise=(seed, tl.load(inputs.keys + named).to(tl.uint32)),
        temperature=temperature,
        is_filtered=is_filtered,
        has_penalty=has_penalty,
        is_short=position < tl.load(inputs.min_length + request),
        biases=biases,
    )


@triton.jit
def ids_of(group):
    """The token ids of groups, [groups, pairs, 2], and the numbers of the pairs."""
    pairs = group[:, None, None] * PAIRS + tl.arange(0, PAIRS)[None, :, None]
    return pairs, 2 * pairs + tl.arange(0, 2)[None, None, :]


@triton.jit
def is_own(ids, inputs, wish, sizes: tl.constexpr):
    """Which ids are tokens among which a row is chosen here: a rank's, where it has no filter."""
    inside = ids < sizes.vocab
    if sizes.share > 0:
        first = tl.where(wish.is_filtered, 0, inputs.first)
        end = tl.where(wish.is_filtered, sizes.vocab, inputs.first + sizes.share)
        inside &= (ids >= first) & (ids < end)
    return inside


@triton.jit
def tokens_of(ids, inputs, sizes: tl.constexpr):
    """The target's tokens, where a drafter numbers its own."""
    tokens = ids
    if sizes.has_columns:
        tokens = tl.load(inputs.columns + ids, mask=ids < sizes.vocab, other=0)
    return tokens


@triton.jit
def words_at(noise, pairs, ids, inputs, sizes: tl.constexpr):
    """The words of the noise of ids, which lie in pairs."""
    seed, position = noise
    if sizes.has_columns:
        tokens = tokens_of(ids, inputs, sizes)
        counter = (tokens >> 1).to(tl.uint32)
        even, odd = threefry(seed, position, counter, counter * 0 + inputs.stream)
        words = tl.where((tokens & 1) == 0, even, odd)
    else:
        words = words_of(seed, position, inputs.stream, pairs)
    return words


@triton.jit
def scores_of(ids, inputs, row, wish, sizes: tl.constexpr):
    """Raw logits of a row's tokens, and what `processed` makes of them before the support."""
    request = wish.request
    inside, start = is_own(ids, inputs, wish, sizes), row.to(tl.int64) * sizes.vocab
    if sizes.share == 0:
        raw = tl.load(inputs.logits + start + ids, mask=inside, other=0.0)
    elif wish.is_filtered:
        whole = row.to(tl.int64) * (sizes.ranks * sizes.share)
        raw = tl.load(inputs.every + whole + ids, mask=inside, other=0.0)
    else:
        own = row.to(tl.int64) * sizes.share - inputs.first
        raw = tl.load(inputs.logits + own + ids, mask=inside, other=0.0)
    x, tokens = raw, ids
    if sizes.has_columns:
        # Loaded where a row asks about tokens.
        asked_until = tl.where(wish.has_penalty | wish.is_short | (wish.biases > 0), sizes.vocab, 0)
        tokens = tl.load(inputs.columns + ids, mask=ids < asked_until, other=0)
    if wish.has_penalty:
        seen = tl.load(
            inputs.counts + wish.slot * sizes.target_vocab + tokens, mask=inside, other=0
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
    for j in range(wish.biases):
        value = tl.load(inputs.bias_values + request * sizes.num_bias + j)
        x = tl.where(
            tokens == tl.load(inputs.bias_ids + request * sizes.num_bias + j), x + value, x
        )
    if wish.is_short:
        for j in range(sizes.num_stops):
            is_stop = tokens == tl.load(inputs.stop_ids + request * sizes.num_stops + j)
            x = tl.where(is_stop, -float("inf"), x)
    if sizes.has_mask:
        is_allowed = tl.load(inputs.mask + start + ids, mask=inside, other=0).to(tl.int32) != 0
        x = tl.where(is_allowed, x, -float("inf"))
    if wish.temperature > 0:
        x = x / wish.temperature
    return raw, x


@triton.jit
def key_of(x):
    """Whole numbers in the order of the scores: NaN is the largest, and both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, _KEY_OF_NAN, bits)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def score_of(key):
    """The score that a key stands for."""
    return (key ^ ((key >> 31) & HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit
def has_bad(raw):
    """Whether some score is not finite."""
    return tl.max(raw.to(tl.int32, bitcast=True) & HIGHEST) >= KEY_OF_INFINITY


@triton.jit
def first_token(keys, ids):
    """The token with the largest key, of several the one with the smallest id."""
    best = tl.max(keys)
    return best, tl.min(tl.where(keys == best, ids, HIGHEST))


@triton.jit
def next_token(keys, ids, key, winner):
    """The token after one that is given, by falling keys and then by rising ids."""
    follows = (keys < key) | ((keys == key) & (ids > winner))
    best = tl.max(tl.where(follows, keys, LOWEST))
    return best, tl.min(tl.where(follows & (keys == best), ids, HIGHEST))


@triton.jit
def sharpness_of(temperature, tau: tl.constexpr):
    """By what scores are multiplied before they become weights."""
    return tl.where(temperature > 0, 1.0 / tau, 1.0)


@triton.jit
def weight_of(x, highest, sharpness):
    """How likely scores are beside the highest one."""
    weight = tl.exp2((x - highest) * (sharpness * _LOG2_E))
    return tl.where(weight <= 1, weight, 0.0)  # not where a score or the highest is no number


@triton.jit
def store_groups(peaks_at, masses_at, inside, x, keys, sharpness):
    """The largest key of each group, and how likely the group is beside its own best token."""
    peaks = tl.max(tl.max(keys, 2), 1)
    weights = weight_of(x, score_of(peaks)[:, None, None], sharpness)
    units = tl.where(keys > LOWEST, tl.floor(weights * 2.0**24 + 0.5), 0.0).to(tl.int32)
    tl.store(peaks_at, peaks, mask=inside)
    tl.store(masses_at, tl.sum(tl.sum(units, 2), 1).to(tl.float32) * 2.0**-24, mask=inside)


@triton.jit
def halves_of(terms):
    """Numbers up to 1 in units of 2^-15, and the rest of them in units of 2^-30."""
    high = tl.floor(terms * 2.0**15)
    low = tl.floor((terms * 2.0**15 - high) * 2.0**15 + 0.5)
    return high.to(tl.int32), low.to(tl.int32)


@triton.jit
def carried(whole, high, low):
    """A sum in three words: whole, and the units of `halves_of`, fewer than 2^15 of each."""
    high += low >> 15
    return whole + (high >> 15), high & 32767, low & 32767


@triton.jit
def add_halves(sum, terms):
    """Adds numbers up to 1 to a sum in three words."""
    whole, high, low = sum
    more_high, more_low = halves_of(terms)
    return carried(whole, high + tl.sum(more_high), low + tl.sum(more_low))


@triton.jit
def number_of(sum):
    """What a sum in three words stands for."""
    whole, high, low = sum
    return whole.to(tl.float32) + (high.to(tl.float32) * 2.0**-15 + low.to(tl.float32) * 2.0**-30)


@triton.jit
def sums_of(a, b, c, d):
    """Four sums, for which a program's warps wait for each other once and not four times."""
    ab, cd = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a, b, c, d


@triton.jit
def no_sum():
    """A sum of nothing, in three words."""
    zero = tl.full((), 0, tl.int32)
    return zero, zero, zero


@triton.jit
def terms_of(peaks, masses, highest, sharpness):
    """How likely groups are beside a token with the highest score, each over a group's tokens."""
    terms = masses * weight_of(score_of(peaks), highest, sharpness) * (0.5 / PAIRS)
    return tl.where(peaks > LOWEST, terms, 0.0)


@triton.jit
def total_of(peaks, masses, highest, sharpness):
    """How likely all groups are together beside a token with the highest score."""
    terms = terms_of(peaks, masses, highest, sharpness)
    return number_of(add_halves(no_sum(), terms)) * (2 * PAIRS)
