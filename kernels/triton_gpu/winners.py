"""The best tokens of tiles and of rows, in Triton; see `sampling`, whose kernels these make up."""

import triton
import triton.language as tl

from kernels.triton_gpu.noise import most_noise, noise_of_words
from kernels.triton_gpu.scores import (
    LOWEST,
    PAIRS,
    first_token,
    ids_of,
    key_of,
    next_token,
    score_of,
    scores_of,
    store_groups,
    tokens_of,
    weight_of,
    words_at,
)


@triton.jit
def store_scores(scores_at, x, ids, rows, row, sizes: tl.constexpr):
    """Stores processed scores in the places of the target's tokens."""
    at = scores_at + row.to(tl.int64) * sizes[8] + tokens_of(ids, rows, sizes)
    tl.store(at, x, mask=ids < sizes[0])


@triton.jit
def choose_in_tile(
    tile,
    best,
    support,
    source,
    stream,
    sharpness,
    into,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    """Stores a tile's best tokens of a support, with noise, and what its groups hold then.

    Args:
      tile: Number of it.
      best: A key; where weights are not asked for, tokens below it are not either.
      support: The border, and the id from which tokens at it do not stay; the highest score, and
        how likely a token must be beside it.
      source: Of the scores.
      sharpness: Of the weights.
      into: Where the keys and masses of groups lie, and what is found.
      is_scored: The scores of the support are stored, without noise.

    Returns:
      The best token's key.
    """
    border, limit, highest, smallest = support
    rows, asked, row, wish = source
    peaks_at, masses_at, keys_at, ids_at, scores_at = into
    noise = wish[2]
    group = tile * groups + tl.arange(0, groups)
    inside = group < tl.cdiv(sizes[0], 2 * PAIRS)
    peaks = tl.load(peaks_at + group, mask=inside, other=LOWEST)
    may_stay = (peaks >= border) & (weight_of(score_of(peaks), highest, 1.0) >= smallest)
    pairs, ids = ids_of(group)
    keys = tl.full((groups, PAIRS, 2), LOWEST, tl.int32)
    x = tl.full((groups, PAIRS, 2), -float("inf"), tl.float32)
    # Where fewer stay than are asked for, the excluded tokens of the first tile follow.
    if (tl.max(may_stay.to(tl.int32)) > 0) | ((width > 1) & (tile == 0)):
        raw, x = scores_of(ids, rows, asked, row, wish, sizes)
        own = key_of(x)
        stays = (own > border) | ((own == border) & (ids < limit))
        if smallest > 0:
            stays &= weight_of(x, highest, 1.0) >= smallest
        x = tl.where(stays, x, -float("inf"))
        words = words_at(noise, stream, pairs, ids, rows, sizes)
        may_win = tau is not None
        if tau is None:
            may_win = tl.max(x + most_noise(words)) >= score_of(best)
        if may_win:
            keys = tl.where(ids < sizes[0], key_of(x + noise_of_words(words)), LOWEST)
    if is_scored:
        store_scores(scores_at, x, ids, rows, row, sizes)
    if tau is not None:
        tl.debug_barrier()  # the keys of groups have been read
        store_groups(
            *(peaks_at + group, masses_at + group, inside), score_of(keys), keys, sharpness
        )
    return store_first(keys, ids, keys_at, ids_at, width)


@triton.jit
def store_first(keys, ids, keys_at, ids_at, width: tl.constexpr):
    """Stores the best tokens of a tile; gives the first one's key."""
    first, winner = first_token(keys, ids)
    tl.store(keys_at, first)
    tl.store(ids_at, winner)
    key = first
    for rank in range(1, width):
        key, winner = next_token(keys, ids, key, winner)
        tl.store(keys_at + rank, key)
        tl.store(ids_at + rank, winner)
    return first


@triton.jit
def store_token(
    out, rank, key, winner, best, norm, sharpness, rows, sizes: tl.constexpr, tau: tl.constexpr
):
    """Stores one token of a row, and its weight."""
    tl.store(out[0] + rank, tokens_of(tl.minimum(winner, sizes[0] - 1), rows, sizes))
    if tau is not None:
        tl.store(out[1] + rank, (score_of(key) - best) * sharpness - norm)
