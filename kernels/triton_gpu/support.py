"""The support of a row with filters, and choices within it: what one program does without a sort.

The border of a support is the smallest score that has fewer than `top_k` tokens and less than
`top_p` above it; it is found by halving. A program looks only into the groups whose best token lies
above a border that it tries, and no further than it must.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.noise import gumbel, log
from kernels.triton_gpu.scores import (
    HIGHEST,
    LOWEST,
    PAIRS,
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

_KEY_OF_NOTHING = tl.constexpr(-2139095041)  # of -inf
_TINY = tl.constexpr(1e-30)


@triton.jit
def find_support(peaks, masses, group, source, sizes: tl.constexpr):
    """Which tokens of a row stay; the groups that can hold them are listed in memory.

    Args:
      peaks, masses: Of all groups, see `store_groups`.
      group: Their numbers.
      source: Of the scores; with the memory of the list.
      sizes: Of the arrays.

    Returns:
      The border, and the id from which tokens at the border do not stay; the highest score, how
      likely a token must be beside it, and the number of groups.
    """
    rows, asked, row, wish, members_at = source
    smallest = tl.load(asked[3] + wish[0])
    highest = score_of(tl.max(peaks))
    bounds = _bounds(asked, wish[0], highest, total_of(peaks, masses, highest, 1.0), sizes)
    border = _border(peaks, group, source, bounds, sizes)
    least = tl.where(border > _KEY_OF_NOTHING, border, HIGHEST)  # without a border: no ties
    num_members = _list(members_at, peaks >= least, group)
    limit = _limit(border, num_members, source, bounds, sizes)
    may_stay = (peaks >= border) & (weight_of(score_of(peaks), highest, 1.0) >= smallest)
    # Where fewer stay than are asked for, the excluded tokens of the first group follow.
    num_members = _list(members_at, may_stay | (group == 0), group)
    return border, limit, highest, smallest, num_members


@triton.jit
def _bounds(asked, request, highest, total, sizes: tl.constexpr):
    """How many tokens and how much weight are too many above a border, and scores around it."""
    vocab = sizes[0]
    top_p, top_k = tl.load(asked[1] + request), tl.load(asked[2] + request)
    most = tl.where(top_k >= vocab, HIGHEST, tl.maximum(top_k, 1))
    # The first token stays whatever `top_p` says, so its bound lies above the weight before it.
    weight = tl.where(top_p < 1, tl.maximum(top_p, _TINY) * total, float("inf"))
    # So far below the highest score all the rest weighs less than what `top_p` leaves out.
    depth = log(vocab / tl.maximum((1 - top_p) * total, _TINY)) + 1
    high = key_of(highest)
    low = tl.where(top_p < 1, key_of(highest - tl.maximum(depth, 0.0)), _KEY_OF_NOTHING)
    is_off = (top_k >= vocab) & (top_p >= 1)
    high = tl.where(is_off, _KEY_OF_NOTHING, high)
    return most, weight, highest, tl.minimum(low, high), high


@triton.jit
def _border(peaks, group, source, bounds, sizes: tl.constexpr):
    """The key of the smallest score that has not too much above it."""
    most, weight, highest, low, high = bounds
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        num_members = _list(source[4], peaks > middle, group)
        count, above, ties = _tally(middle, sizes[0], num_members, source, bounds, sizes)
        is_below = (count >= most) | (above >= weight)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _limit(border, num_members, source, bounds, sizes: tl.constexpr):
    """The id from which tokens at the border do not stay, for want of room."""
    most, weight, highest, _, _ = bounds
    own = weight_of(score_of(border), highest, 1.0)
    count, above, ties = _tally(border, sizes[0], num_members, source, bounds, sizes)
    low, high = tl.full((), 0, tl.int32), tl.full((), sizes[0], tl.int32)
    has_room = (count <= most - ties) & (above + (ties - 1).to(tl.float32) * own < weight)
    low = tl.where(has_room, high, low)
    while low < high:
        middle = (low + high) >> 1
        count, above, earlier = _tally(border, middle, num_members, source, bounds, sizes)
        has_room = (count <= most - 1 - earlier) & (above + earlier.to(tl.float32) * own < weight)
        low = tl.where(has_room, middle + 1, low)
        high = tl.where(has_room, high, middle)
    return low


@triton.jit
def _list(members_at, is_member, group):
    """Lists the groups that are members; returns how many."""
    tl.debug_barrier()  # the list before this one has been read
    place = tl.cumsum(is_member.to(tl.int32), 0) - 1
    tl.store(members_at + place, group, mask=is_member)
    tl.debug_barrier()
    return tl.sum(is_member.to(tl.int32))


@triton.jit
def _members(chunk, num_members, source, sizes: tl.constexpr):
    """Pairs, ids, scores and keys of some listed groups; outside of the list keys are lowest."""
    rows, asked, row, wish, members_at = source
    place = chunk * sizes[7] + tl.arange(0, sizes[7])
    beyond = tl.cdiv(sizes[0], 2 * PAIRS)
    group = tl.load(members_at + place, mask=place < num_members, other=beyond, volatile=True)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, rows, asked, row, wish, sizes)
    return pairs, ids, x, tl.where(ids < sizes[0], key_of(x), LOWEST)


@triton.jit
def _tally(border, limit, num_members, source, bounds, sizes: tl.constexpr):
    """Counts and weighs the tokens above a border, until they are too many.

    Returns:
      Their count and their weight, and how many lie at the border, with an id below the limit.
    """
    most, weight, highest, _, _ = bounds
    count, ties, sum = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), no_sum()
    chunk, above = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    whole, high, low = sum
    while (chunk * sizes[7] < num_members) & (count < most) & (above < weight):
        pairs, ids, x, keys = _members(chunk, num_members, source, sizes)
        is_above = keys > border
        count += tl.sum(is_above.to(tl.int32))
        ties += tl.sum(((keys == border) & (ids < limit)).to(tl.int32))
        weights = tl.where(is_above, weight_of(x, highest, 1.0), 0.0)
        whole, high, low = add_halves((whole, high, low), weights)
        above = number_of((whole, high, low))
        chunk += 1
    return count, above, ties


@triton.jit
def _noisy(chunk, support, source, stream, sizes: tl.constexpr):
    """Ids, scores and keys of some groups of the support, with noise; what is excluded is -inf."""
    border, limit, highest, smallest, num_members = support
    pairs, ids, x, keys = _members(chunk, num_members, source, sizes)
    stays = (keys > border) | ((keys == border) & (ids < limit))
    stays &= weight_of(x, highest, 1.0) >= smallest
    noise = source[3][2]
    x = tl.where(stays, x + gumbel(noise[0], noise[1], stream, pairs), -float("inf"))
    return ids, x, tl.where(keys > LOWEST, key_of(x), LOWEST)


@triton.jit
def next_in_support(support, source, stream, key, winner, sizes: tl.constexpr):
    """As `next_token`, among all tokens of a row with noise."""
    best, first = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)
    for chunk in range(tl.cdiv(support[4], sizes[7])):
        ids, x, keys = _noisy(chunk, support, source, stream, sizes)
        theirs, candidate = next_token(keys, ids, key, winner)
        is_better = (theirs > best) | ((theirs == best) & (candidate < first))
        best = tl.where(is_better, theirs, best)
        first = tl.where(is_better, candidate, first)
    return best, first


@triton.jit
def mass_of_support(support, source, stream, highest, sharpness, sizes: tl.constexpr):
    """How likely the support is with its noise, beside a token with the highest score."""
    whole, high, low = no_sum()
    for chunk in range(tl.cdiv(support[4], sizes[7])):
        ids, x, keys = _noisy(chunk, support, source, stream, sizes)
        weights = tl.where(keys > LOWEST, weight_of(x, highest, sharpness), 0.0)
        whole, high, low = add_halves((whole, high, low), weights)
    return number_of((whole, high, low))
