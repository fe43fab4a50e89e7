"""The support of a row with filters, and choices within it: what one program does without a sort.

The border of a support is the smallest score that has fewer than `top_k` tokens and less than
`top_p` above it; it is found by halving. A program looks only into the groups whose best token lies
above a border that it tries, and no further than it must.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.noise import gumbel, log
from kernels.pallas_gpu.scores import (
    HIGHEST,
    LOWEST,
    PAIRS,
    Inputs,
    Sizes,
    Wish,
    add_halves,
    ids_of,
    key_of,
    next_token,
    no_sum,
    number_of,
    score_of,
    scores_of,
    total_of,
    weight_of,
)

_KEY_OF_NOTHING = -2139095041  # of -inf
_TINY = 1e-30


class Source(NamedTuple):
    """Where a row's scores come from.

    Attributes:
      members: Memory for a list of groups, which the row's own program alone writes and reads.
      interpret: One thread does all.
    """

    inputs: Inputs
    row: Any
    wish: Wish
    members: Any
    sizes: Sizes
    interpret: bool


class Bounds(NamedTuple):
    """How many tokens and how much weight are too many above a border, and scores around it."""

    most: Any
    weight: Any
    highest: Any
    low: Any
    high: Any


class Support(NamedTuple):
    """Which tokens of a row stay.

    Attributes:
      border: The key of the smallest score; of tokens that have it, those with an id below `limit`.
      highest: The highest score.
      smallest: How likely a token must be beside it.
      num_members: Listed groups, which hold all that stays.
    """

    border: Any
    limit: Any
    highest: Any
    smallest: Any
    num_members: Any


def find_support(peaks, masses, group, source):
    """Which tokens of a row stay; the groups that can hold them are listed in memory.

    Args:
      peaks, masses: Of all groups, see `store_groups`.
      group: Their numbers.
      source: Of the scores.
    """
    smallest = source.inputs.min_p[source.wish.request]
    highest = score_of(jnp.max(peaks))
    bounds = _bounds(source, highest, total_of(peaks, masses, highest, 1.0))
    border = _border(peaks, group, source, bounds)
    least = jnp.where(border > _KEY_OF_NOTHING, border, HIGHEST)  # without a border: no ties
    num_members = _list(source, peaks >= least, group)
    limit = _limit(border, num_members, source, bounds)
    may_stay = (peaks >= border) & (weight_of(score_of(peaks), highest, 1.0) >= smallest)
    # Where fewer stay than are asked for, the excluded tokens of the first group follow.
    num_members = _list(source, may_stay | (group == 0), group)
    return Support(border, limit, highest, smallest, num_members)


def _bounds(source, highest, total):
    """How much is too much, and scores between which the border lies."""
    vocab, request = source.sizes.vocab, source.wish.request
    top_p, top_k = source.inputs.top_p[request], source.inputs.top_k[request]
    most = jnp.where(top_k >= vocab, HIGHEST, jnp.maximum(top_k, 1))
    # The first token stays whatever `top_p` says, so its bound lies above the weight before it.
    weight = jnp.where(top_p < 1, jnp.maximum(top_p, _TINY) * total, jnp.inf)
    # So far below the highest score all the rest weighs less than what `top_p` leaves out.
    depth = log(vocab / jnp.maximum((1 - top_p) * total, _TINY)) + 1
    high = key_of(highest)
    low = jnp.where(top_p < 1, key_of(highest - jnp.maximum(depth, 0.0)), _KEY_OF_NOTHING)
    is_off = (top_k >= vocab) & (top_p >= 1)
    high = jnp.where(is_off, _KEY_OF_NOTHING, high)
    return Bounds(most, weight, highest, jnp.minimum(low, high), high)


def _border(peaks, group, source, bounds):
    """The key of the smallest score that has not too much above it."""

    def halve(span):
        low, high = span
        middle = (low & high) + ((low ^ high) >> 1)
        num_members = _list(source, peaks > middle, group)
        count, above, _ = _tally(middle, source.sizes.vocab, num_members, source, bounds)
        is_below = (count >= bounds.most) | (above >= bounds.weight)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    return lax.while_loop(lambda span: span[0] < span[1], halve, (bounds.low, bounds.high))[0]


def _limit(border, num_members, source, bounds):
    """The id from which tokens at the border do not stay, for want of room."""
    own = weight_of(score_of(border), bounds.highest, 1.0)
    vocab = jnp.int32(source.sizes.vocab)

    def has_room(tally, earlier):
        count, above, _ = tally
        enough = above + earlier.astype(jnp.float32) * own < bounds.weight
        return (count <= bounds.most - 1 - earlier) & enough

    tally = _tally(border, vocab, num_members, source, bounds)

    def halve(span):
        low, high = span
        middle = (low + high) >> 1
        earlier = _tally(border, middle, num_members, source, bounds)[2]
        fits = has_room(tally, earlier)
        return jnp.where(fits, middle + 1, low), jnp.where(fits, high, middle)

    low = jnp.where(has_room(tally, tally[2] - 1), vocab, 0)
    return lax.while_loop(lambda span: span[0] < span[1], halve, (low, vocab))[0]


def _list(source, is_member, group):
    """Lists the groups that are members; returns how many."""
    _barrier(source)  # the list before this one has been read
    flags = is_member.astype(jnp.int32)
    # A group that is no member gets a place outside, for the interpreter.
    place = jnp.where(is_member, lax.cumsum(flags, axis=0) - 1, source.members.shape[1])
    pltriton.store(source.members.at[source.row, place], group, mask=is_member)
    _barrier(source)
    return flags.sum()


def _barrier(source):
    if not source.interpret:
        pltriton.debug_barrier()


def _members(chunk, num_members, source):
    """Pairs, ids, scores and keys of some listed groups; outside of the list keys are lowest."""
    sizes = source.sizes
    place = chunk * sizes.at_once + lax.iota(jnp.int32, sizes.at_once)
    beyond = pl.cdiv(sizes.vocab, 2 * PAIRS)
    at = source.members.at[source.row, place]
    group = pltriton.load(at, mask=place < num_members, other=beyond, volatile=True)
    pairs, ids = ids_of(group)
    _, x = scores_of(ids, source.inputs, source.row, source.wish, sizes)
    return pairs, ids, x, jnp.where(ids < sizes.vocab, key_of(x), LOWEST)


def _tally(border, limit, num_members, source, bounds):
    """Counts and weighs the tokens above a border, until they are too many.

    Returns:
      Their count and their weight, and how many lie at the border, with an id below the limit.
    """

    def goes_on(tally):
        chunk, count, _, sum = tally
        is_left = chunk * source.sizes.at_once < num_members
        return is_left & (count < bounds.most) & (number_of(sum) < bounds.weight)

    def add(tally):
        chunk, count, ties, sum = tally
        _, ids, x, keys = _members(chunk, num_members, source)
        is_above = keys > border
        count += is_above.astype(jnp.int32).sum()
        ties += ((keys == border) & (ids < limit)).astype(jnp.int32).sum()
        weights = jnp.where(is_above, weight_of(x, bounds.highest, 1.0), 0.0)
        return chunk + 1, count, ties, add_halves(sum, weights)

    zero = jnp.int32(0)
    _, count, ties, sum = lax.while_loop(goes_on, add, (zero, zero, zero, no_sum()))
    return count, number_of(sum), ties


def _noisy(chunk, support, source):
    """Ids, scores and keys of some groups of the support, with noise; what is excluded is -inf."""
    pairs, ids, x, keys = _members(chunk, support.num_members, source)
    stays = (keys > support.border) | ((keys == support.border) & (ids < support.limit))
    stays &= weight_of(x, support.highest, 1.0) >= support.smallest
    noise = gumbel(*source.wish.noise, source.inputs.stream[0], pairs)
    x = jnp.where(stays, x + noise, -jnp.inf)
    return ids, x, jnp.where(keys > LOWEST, key_of(x), LOWEST)


def next_in_support(support, source, key, winner):
    """As `next_token`, among all tokens of a row with noise."""

    def better(chunk, found):
        best, first = found
        ids, _, keys = _noisy(chunk, support, source)
        theirs, candidate = next_token(keys, ids, key, winner)
        is_better = (theirs > best) | ((theirs == best) & (candidate < first))
        return jnp.where(is_better, theirs, best), jnp.where(is_better, candidate, first)

    start = jnp.int32(LOWEST), jnp.int32(HIGHEST)
    return lax.fori_loop(0, pl.cdiv(support.num_members, source.sizes.at_once), better, start)


def mass_of_support(support, source, highest, sharpness):
    """How likely the support is with its noise, beside a token with the highest score."""

    def add(chunk, sum):
        _, x, keys = _noisy(chunk, support, source)
        weights = jnp.where(keys > LOWEST, weight_of(x, highest, sharpness), 0.0)
        return add_halves(sum, weights)

    chunks = pl.cdiv(support.num_members, source.sizes.at_once)
    return number_of(lax.fori_loop(0, chunks, add, no_sum()))
