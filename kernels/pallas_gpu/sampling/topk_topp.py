"""Top-k / top-p threshold (pivot) of a row, without a sort (Pallas, Triton backend).

The threshold is the smallest logit with fewer than `top_k` tokens and less than `top_p` above it.
Programs that share a row bracket it (`threshold_bracket`), sum the weights above both ends, and
list the few tokens in between. The last program to finish checks the bracket and bisects the list.
If the bracket was wrong or the list too long, it searches all tokens instead, so a wrong bracket
costs time only.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.sampling.gumbel_noise import log
from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    RowSampling,
    SamplingInputs,
    SamplingSizes,
    add_halves,
    carried,
    halves_of,
    key_of,
    no_sum,
    number_of,
    score_of,
    scores_of,
    total_of,
    weight_of,
)

NOTES = 8
"""Scratch words of a row, shared by its programs.

First the number of tokens above the bracket and their weight in three words, the number of listed
tokens, and the programs that have finished in each of two kernels. Later, in place of the first:
the threshold, the id from which tokens at the threshold fail, and the key of the highest logit.
"""

_TINY = 1e-30


class ScoreSource(NamedTuple):
    """Source of a row's logits.

    Attributes:
      interpret: One thread does all the work.
    """

    inputs: SamplingInputs
    row: Any
    params: RowSampling
    sizes: SamplingSizes
    interpret: bool


class RowScratch(NamedTuple):
    """Scratch memory shared by the programs of a row.

    Attributes:
      peaks: Largest keys of groups.
      near: Keys and ids of tokens near the threshold.
      notes: See `NOTES`.
      at_once: Groups per step.
    """

    peaks: Any
    near: Any
    notes: Any
    at_once: int


class Bounds(NamedTuple):
    """Limits of the tokens and the weight above a threshold, and keys around it.

    Attributes:
      highest, total: Highest logit, and the weight of all tokens relative to it.
      low, high: Lowest and highest key that the threshold can have.
    """

    most: Any
    weight: Any
    highest: Any
    total: Any
    low: Any
    high: Any


class CandidateList(NamedTuple):
    """Tokens near the threshold, as found by a row's programs.

    Attributes:
      is_listed: Whether the list contains every token in the bracket.
      count, sum: Number of tokens above the list, and their weight.
      keys, units, rest: Keys of the listed tokens, and their weights.
    """

    is_listed: Any
    count: Any
    sum: Any
    keys: Any
    units: Any
    rest: Any


def bounds_of(peaks, masses, source):
    """Computes the bounds of a row; `peaks` and `masses` are of all groups, see `store_groups`."""
    vocab, request = source.sizes.vocab, source.params.request
    highest = score_of(jnp.max(peaks))
    total = total_of(peaks, masses, highest, 1.0)
    top_p, top_k = source.inputs.top_p[request], source.inputs.top_k[request]
    most = jnp.where(top_k >= vocab, HIGHEST, jnp.maximum(top_k, 1))
    # The first token passes for any `top_p`, so its bound is above the weight before it.
    weight = jnp.where(top_p < 1, jnp.maximum(top_p, _TINY) * total, jnp.inf)
    # At this depth below the highest logit, the remaining tokens weigh less than 1 - `top_p`.
    depth = log(vocab / jnp.maximum((1 - top_p) * total, _TINY)) + 1
    high = key_of(highest)
    low = jnp.where(top_p < 1, key_of(highest - jnp.maximum(depth, 0.0)), KEY_OF_NOTHING)
    is_off = (top_k >= vocab) & (top_p >= 1)
    high = jnp.where(is_off, KEY_OF_NOTHING, high)
    return Bounds(most, weight, highest, total, jnp.minimum(low, high), high)


def list_near(low, high, highest, is_flat, share, source, memory):
    """Lists a program's tokens between two keys and sums the weights above; any order is fine.

    Args:
      low, high: The two keys.
      highest: Highest logit.
      is_flat: Most groups have a token at or above the lower key, so none is checked in advance.
      share: Index of the program within the row.
      source: Source of the logits.
      memory: Scratch memory of the row.
    """
    lanes, programs = memory.at_once * 2 * PAIRS, pl.num_programs(0)
    vocab, row, listed = source.sizes.vocab, source.row, memory.near.shape[2]

    def add(chunk, sums):
        count, units, rest, start = sums
        ids, x, keys = _scores(chunk, lanes, source)
        is_above = keys > high
        weights = jnp.where(is_above, weight_of(x, highest, 1.0), 0.0)
        more, more_rest = halves_of(weights)
        is_near = ((keys >= low) & (keys <= high) & (keys > KEY_OF_NOTHING)).astype(jnp.int32)
        num_near = is_near.sum()

        def store():
            first = start
            if programs > 1:
                first = pltriton.atomic_add(memory.notes, (row, jnp.int32(4)), num_near)
            place = first + lax.cumsum(is_near, axis=0) - 1
            has_room = (is_near > 0) & (place < listed)
            place = jnp.where(has_room, place, listed)  # outside the array, for the interpreter
            pltriton.store(memory.near.at[row, 0, place], keys, mask=has_room)
            pltriton.store(memory.near.at[row, 1, place], ids, mask=has_room)
            return start + num_near

        start = lax.cond(num_near > 0, store, lambda: start)
        return count + is_above.astype(jnp.int32), units + more, rest + more_rest, start

    def step(number, sums):
        chunk = share + number * programs
        peak = lax.cond(is_flat, lambda: low, lambda: _peak_of(chunk, source, memory))
        return lax.cond(peak >= low, lambda: add(chunk, sums), lambda: sums)

    none = jnp.zeros((lanes,), jnp.int32)
    steps = lax.div(pl.cdiv(vocab, lanes) - share + programs - 1, jnp.int32(programs))
    count, units, rest, start = lax.fori_loop(0, steps, step, (none, none, none, jnp.int32(0)))
    if programs == 1:
        memory.notes[row, 4] = start
    high_units = (units & 32767).sum() + (rest >> 15).sum()
    weight = carried((units >> 15).sum(), high_units, (rest & 32767).sum())
    for number, word in enumerate((count.sum(), *weight)):
        pltriton.atomic_add(memory.notes, (row, jnp.int32(number)), word)


def _scores(chunk, lanes, source):
    """Loads ids, logits and keys of some tokens."""
    ids = chunk * lanes + lax.iota(jnp.int32, lanes)
    _, x = scores_of(ids, source.inputs, source.row, source.params, source.sizes)
    return ids, x, jnp.where(ids < source.sizes.vocab, key_of(x), LOWEST)


def _peak_of(chunk, source, memory):
    """Returns the largest key of some groups."""
    group = chunk * memory.at_once + lax.iota(jnp.int32, memory.at_once)
    at = memory.peaks.at[source.row, group]
    return jnp.max(pltriton.load(at, mask=group < memory.peaks.shape[1], other=LOWEST))


def find_threshold(low, high, bounds, source, memory):
    """Returns the key of the threshold, and the id from which tokens at the threshold fail.

    Args:
      low, high: The bracket; all tokens inside are listed.
      bounds: Result of `bounds_of`.
      source: Source of the logits.
      memory: Scratch memory of the row.
    """
    # Volatile loads bypass the L1 cache: other programs have written the values.
    load, row = partial(pltriton.load, volatile=not source.interpret), source.row
    count, *weight, num_listed = (load(memory.notes.at[row, jnp.int32(j)]) for j in range(5))
    place = lax.iota(jnp.int32, memory.near.shape[2])
    keys = load(memory.near.at[row, 0, place], mask=place < num_listed, other=LOWEST)
    halves = halves_of(weight_of(score_of(keys), bounds.highest, 1.0))
    has_room = num_listed <= len(place)
    known = CandidateList(has_room, count, carried(*weight), keys, *halves)
    tally = partial(_tally, bounds=bounds, source=source, memory=memory)

    def is_too_low(threshold, known):
        count, above, _ = tally(threshold, None, known)
        return (count >= bounds.most) | (above >= bounds.weight)

    is_right = has_room & ((high == bounds.high) | ~is_too_low(high, known))
    is_right &= (low == bounds.low) | is_too_low(low - 1, known)
    known = known._replace(is_listed=is_right)

    def halve(span):
        low, high = span
        middle = (low & high) + ((low ^ high) >> 1)
        is_below = is_too_low(middle, known)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    low, high = jnp.where(is_right, low, bounds.low), jnp.where(is_right, high, bounds.high)
    threshold = lax.while_loop(lambda span: span[0] < span[1], halve, (low, high))[0]
    return threshold, _limit(threshold, bounds, source, partial(tally, known=known))


def _limit(threshold, bounds, source, tally):
    """Returns the id from which tokens at the threshold exceed `top_k` or `top_p`."""
    border_weight = weight_of(score_of(threshold), bounds.highest, 1.0)
    vocab = jnp.int32(source.sizes.vocab)
    count, above, ties = tally(threshold, None)

    def has_room(earlier):
        enough = above + earlier.astype(jnp.float32) * border_weight < bounds.weight
        return (count <= bounds.most - 1 - earlier) & enough

    def halve(span):
        low, high = span
        middle = (low + high) >> 1
        fits = has_room(tally(threshold, middle)[2])
        return jnp.where(fits, middle + 1, low), jnp.where(fits, high, middle)

    low = jnp.where(has_room(ties - 1), vocab, 0)
    return lax.while_loop(lambda span: span[0] < span[1], halve, (low, vocab))[0]


def _tally(threshold, limit, known, bounds, source, memory):
    """Counts the tokens above a threshold and sums their weights, until a bound is exceeded.

    Returns:
      Their count and their weight, and the number of tokens at the threshold with an id below the
      limit, if there is a limit.
    """

    def of_list():
        is_above, is_tie = known.keys > threshold, known.keys == threshold
        whole, units, rest = known.sum
        units += jnp.where(is_above, known.units, 0).sum()
        rest += jnp.where(is_above, known.rest, 0).sum()

        if limit is not None:
            place = lax.iota(jnp.int32, memory.near.shape[2])
            at = memory.near.at[source.row, 1, place]
            ids = pltriton.load(at, mask=is_tie, other=0, volatile=not source.interpret)
            is_tie &= ids < limit
        count = known.count + is_above.astype(jnp.int32).sum()
        return count, number_of(carried(whole, units, rest)), is_tie.astype(jnp.int32).sum()

    def of_all():
        return _tally_all(threshold, limit, bounds, source, memory)

    return lax.cond(known.is_listed, of_list, of_all)


def _tally_all(threshold, limit, bounds, source, memory):
    """Same as `_tally`, from the logits of groups with tokens at the threshold or above."""
    lanes = memory.at_once * 2 * PAIRS

    def goes_on(tally):
        chunk, count, _, sum = tally
        has_partials = chunk * lanes < source.sizes.vocab
        return has_partials & (count < bounds.most) & (number_of(sum) < bounds.weight)

    def add(chunk, count, ties, sum):
        ids, x, keys = _scores(chunk, lanes, source)
        is_above = keys > threshold
        count += is_above.astype(jnp.int32).sum()
        is_tie = (keys == threshold) & (ids < (source.sizes.vocab if limit is None else limit))
        ties += is_tie.astype(jnp.int32).sum()
        weights = jnp.where(is_above, weight_of(x, bounds.highest, 1.0), 0.0)
        return count, ties, add_halves(sum, weights)

    def step(tally):
        chunk, *sums = tally
        is_read = _peak_of(chunk, source, memory) >= threshold
        return chunk + 1, *lax.cond(is_read, add, lambda _, *sums: sums, chunk, *sums)

    zero = jnp.int32(0)
    _, count, ties, sum = lax.while_loop(goes_on, step, (zero, zero, zero, no_sum()))
    return count, number_of(sum), ties
