"""Top-k / top-p threshold (pivot) of a row, without a sort (Triton).

The threshold is the smallest logit with fewer than `top_k` tokens and less than `top_p` above it.
Programs that share a row bracket it (`threshold_bracket`), sum the weights above both ends, and
list the few tokens in between. The last program to finish checks the bracket and bisects the list.
If the bracket was wrong or the list too long, it searches all tokens instead, so a wrong bracket
costs time only.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.sampling.gumbel_noise import log
from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    add_halves,
    carried,
    halves_of,
    key_of,
    no_sum,
    number_of,
    score_of,
    scores_of,
    sums_of,
    total_of,
    weight_of,
)

NOTES = tl.constexpr(8)
"""Scratch words of a row, shared by its programs.

First the number of tokens above the bracket and their weight in three words, the number of listed
tokens, and the programs that have finished in each of two kernels. Later, in place of the first:
the threshold, the id from which tokens at the threshold fail, and the key of the highest logit.
"""

_TINY = tl.constexpr(1e-30)


class ScoreSource(NamedTuple):
    """Source of a row's logits."""

    inputs: Any
    row: Any
    params: Any


class RowScratch(NamedTuple):
    """Scratch memory shared by the programs of a row.

    Attributes:
      peaks: Largest keys of groups.
      near: Keys and ids of tokens near the threshold.
      notes: See `NOTES`.
    """

    peaks: Any
    near: Any
    notes: Any


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


@triton.jit
def bounds_of(peaks, masses, source, sizes: tl.constexpr):
    """Computes the bounds of a row; `peaks` and `masses` are of all groups, see `store_groups`."""
    vocab, request, inputs = sizes.vocab, source.params.request, source.inputs
    highest = score_of(tl.max(peaks))
    total = total_of(peaks, masses, highest, 1.0)
    top_p, top_k = tl.load(inputs.top_p + request), tl.load(inputs.top_k + request)
    most = tl.where(top_k >= vocab, HIGHEST, tl.maximum(top_k, 1))
    # The first token passes for any `top_p`, so its bound is above the weight before it.
    weight = tl.where(top_p < 1, tl.maximum(top_p, _TINY) * total, float("inf"))
    # At this depth below the highest logit, the remaining tokens weigh less than 1 - `top_p`.
    depth = log(vocab / tl.maximum((1 - top_p) * total, _TINY)) + 1
    high = key_of(highest)
    low = tl.where(top_p < 1, key_of(highest - tl.maximum(depth, 0.0)), KEY_OF_NOTHING)
    is_off = (top_k >= vocab) & (top_p >= 1)
    high = tl.where(is_off, KEY_OF_NOTHING, high)
    return Bounds(most, weight, highest, total, tl.minimum(low, high), high)


@triton.jit
def list_near(
    low,
    high,
    highest,
    is_flat,
    share,
    source,
    memory,
    at_once: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """Lists a program's tokens between two keys and sums the weights above; any order is fine.

    Args:
      low, high: The two keys.
      highest: Highest logit.
      is_flat: Most groups have a token at or above the lower key, so none is checked in advance.
      share: Index of the program within the row.
      source: Source of the logits.
      memory: The row's largest keys of groups, its list of keys and ids, and its notes.
      at_once: Groups per step.
      listed: Capacity of the list in tokens.
      sizes: Sizes of the arrays.
    """
    notes_at, list_at = memory.notes, memory.near
    lanes: tl.constexpr = at_once * 2 * PAIRS
    count, units = tl.zeros((lanes,), tl.int32), tl.zeros((lanes,), tl.int32)
    rest, start = tl.zeros((lanes,), tl.int32), tl.full((), 0, tl.int32)
    is_alone = tl.num_programs(0) == 1
    for chunk in range(share, tl.cdiv(sizes.vocab, lanes), tl.num_programs(0)):
        peak = low
        if not is_flat:
            peak = _peak_of(chunk, memory.peaks, at_once, sizes)
        if peak >= low:
            ids = chunk * lanes + tl.arange(0, lanes)
            raw, x = scores_of(ids, source.inputs, source.row, source.params, sizes)
            keys = tl.where(ids < sizes.vocab, key_of(x), LOWEST)
            is_above = keys > high
            more, more_rest = halves_of(tl.where(is_above, weight_of(x, highest, 1.0), 0.0))
            count, units, rest = count + is_above.to(tl.int32), units + more, rest + more_rest
            is_near = (keys >= low) & (keys <= high) & (keys > KEY_OF_NOTHING)
            num_near = tl.sum(is_near.to(tl.int32))
            if num_near > 0:
                if not is_alone:
                    start = tl.atomic_add(notes_at + 4, num_near, sem="relaxed")
                place = start + tl.cumsum(is_near.to(tl.int32), 0) - 1
                has_room = is_near & (place < listed)
                tl.store(list_at + place, keys, mask=has_room)
                tl.store(list_at + listed + place, ids, mask=has_room)
                start += num_near
    if is_alone:
        tl.store(notes_at + 4, start)
    count, whole, high_units, low_units = sums_of(
        count, units >> 15, (units & 32767) + (rest >> 15), rest & 32767
    )
    whole, high_units, low_units = carried(whole, high_units, low_units)
    tl.atomic_add(notes_at, count, sem="relaxed")
    tl.atomic_add(notes_at + 1, whole, sem="relaxed")
    tl.atomic_add(notes_at + 2, high_units, sem="relaxed")
    tl.atomic_add(notes_at + 3, low_units, sem="relaxed")


@triton.jit
def _peak_of(chunk, peaks_at, at_once: tl.constexpr, sizes: tl.constexpr):
    """Returns the largest key of some groups."""
    group = chunk * at_once + tl.arange(0, at_once)
    inside = group < tl.cdiv(sizes.vocab, 2 * PAIRS)
    return tl.max(tl.load(peaks_at + group, mask=inside, other=LOWEST))


@triton.jit
def find_threshold(
    low,
    high,
    bounds,
    source,
    memory,
    at_once: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """Returns the key of the threshold, and the id from which tokens at the threshold fail.

    Args:
      low, high: The bracket; all tokens inside are listed.
      bounds: Result of `bounds_of`.
      source, memory, at_once, listed, sizes: See `list_near`.
    """
    notes_at, list_at = memory.notes, memory.near
    counted = tl.load(notes_at, volatile=True)
    whole, units = tl.load(notes_at + 1, volatile=True), tl.load(notes_at + 2, volatile=True)
    whole, units, rest = carried(whole, units, tl.load(notes_at + 3, volatile=True))
    num_listed = tl.load(notes_at + 4, volatile=True)
    place = tl.arange(0, listed)
    keys = tl.load(list_at + place, mask=place < num_listed, other=LOWEST, volatile=True)
    more, more_rest = halves_of(weight_of(score_of(keys), bounds.highest, 1.0))
    has_room = num_listed <= listed
    known = CandidateList(has_room, counted, (whole, units, rest), keys, more, more_rest)
    count, above, _ = _tally(
        high, sizes.vocab, known, bounds, source, memory, at_once, listed, sizes
    )
    is_right = has_room & (
        (high == bounds.high) | ((count < bounds.most) & (above < bounds.weight))
    )
    count, above, _ = _tally(low - 1, 0, known, bounds, source, memory, at_once, listed, sizes)
    is_right &= (low == bounds.low) | (count >= bounds.most) | (above >= bounds.weight)
    known = CandidateList(is_right, counted, (whole, units, rest), keys, more, more_rest)
    low, high = tl.where(is_right, low, bounds.low), tl.where(is_right, high, bounds.high)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        count, above, _ = _tally(middle, 0, known, bounds, source, memory, at_once, listed, sizes)
        is_below = (count >= bounds.most) | (above >= bounds.weight)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low, _limit(low, known, bounds, source, memory, at_once, listed, sizes)


@triton.jit
def _limit(
    threshold,
    known,
    bounds,
    source,
    memory,
    at_once: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """Returns the id from which tokens at the threshold exceed `top_k` or `top_p`."""
    most, weight = bounds.most, bounds.weight
    border_weight = weight_of(score_of(threshold), bounds.highest, 1.0)
    count, above, ties = _tally(
        threshold, sizes.vocab, known, bounds, source, memory, at_once, listed, sizes
    )
    low, high = tl.full((), 0, tl.int32), tl.full((), sizes.vocab, tl.int32)
    has_room = (count <= most - ties) & (above + (ties - 1).to(tl.float32) * border_weight < weight)
    low = tl.where(has_room, high, low)
    while low < high:
        middle = (low + high) >> 1
        count, above, earlier = _tally(
            threshold, middle, known, bounds, source, memory, at_once, listed, sizes
        )
        earlier = tl.where(middle > 0, earlier, 0)  # at limit 0 all ties are counted
        has_room = (count <= most - 1 - earlier) & (
            above + earlier.to(tl.float32) * border_weight < weight
        )
        low = tl.where(has_room, middle + 1, low)
        high = tl.where(has_room, high, middle)
    return low


@triton.jit
def _tally(
    threshold,
    limit,
    known,
    bounds,
    source,
    memory,
    at_once: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """Counts the tokens above a threshold and sums their weights, until a bound is exceeded.

    Args:
      threshold, limit: Key of the threshold, and an id bound of its tokens.
      known: Tokens near the threshold, of the row.
      bounds: Result of `bounds_of`.
      source, memory, at_once, listed, sizes: See `list_near`.

    Returns:
      Their count and their weight, and the number of tokens at the threshold with an id below the
      limit.
    """
    if known.is_listed:
        is_above, is_tie = known.keys > threshold, known.keys == threshold
        if (limit > 0) & (limit < sizes.vocab):
            place = tl.arange(0, listed)
            is_tie &= (
                tl.load(memory.near + listed + place, mask=is_tie, other=0, volatile=True) < limit
            )
        count, more, more_rest, ties = sums_of(
            is_above.to(tl.int32),
            tl.where(is_above, known.units, 0),
            tl.where(is_above, known.rest, 0),
            is_tie.to(tl.int32),
        )
        whole, units, rest = known.sum
        count += known.count
        whole, units, rest = carried(whole, units + more, rest + more_rest)
        above = number_of((whole, units, rest))
    else:
        count, above, ties = _tally_all(threshold, limit, bounds, source, memory, at_once, sizes)
    return count, above, ties


@triton.jit
def _tally_all(
    threshold, limit, bounds, source, memory, at_once: tl.constexpr, sizes: tl.constexpr
):
    """Same as `_tally`, from the logits of groups with tokens at the threshold or above."""
    lanes: tl.constexpr = at_once * 2 * PAIRS
    count, ties, chunk = (
        tl.full((), 0, tl.int32),
        tl.full((), 0, tl.int32),
        tl.full((), 0, tl.int32),
    )
    whole, units, rest = no_sum()
    above = tl.full((), 0.0, tl.float32)
    while (chunk * lanes < sizes.vocab) & (count < bounds.most) & (above < bounds.weight):
        if _peak_of(chunk, memory.peaks, at_once, sizes) >= threshold:
            ids = chunk * lanes + tl.arange(0, lanes)
            raw, x = scores_of(ids, source.inputs, source.row, source.params, sizes)
            keys = tl.where(ids < sizes.vocab, key_of(x), LOWEST)
            is_above = keys > threshold
            count += tl.sum(is_above.to(tl.int32))
            ties += tl.sum(((keys == threshold) & (ids < limit)).to(tl.int32))
            weights = tl.where(is_above, weight_of(x, bounds.highest, 1.0), 0.0)
            whole, units, rest = add_halves((whole, units, rest), weights)
            above = number_of((whole, units, rest))
        chunk += 1
    return count, above, ties
