"""Two-stage top-k: the best tokens of tiles, then of rows (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.sampling.gumbel_noise import MOST_NOISE, max_noise, noise_of_words
from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
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
from kernels.triton_gpu.sampling.topk_topp import NOTES


class TilePartials(NamedTuple):
    """Partial results of each row.

    Attributes:
      peaks, masses: Maxima and weights of groups, see `store_groups`.
      winners, winner_ids: Keys and ids of the best tokens of tiles.
      bad: Whether some logits of tiles are not finite.
      notes: See `topk_topp.NOTES`.
      scores: Processed logits of the target's tokens, if requested.
    """

    peaks: Any
    masses: Any
    winners: Any
    winner_ids: Any
    bad: Any
    notes: Any
    scores: Any


class TopK(NamedTuple):
    """Best tokens of each row, their weights, and whether the row's logits are finite.

    Attributes:
      left: Candidates of a vocabulary shard, in place of the other fields: see
        `vocab_parallel.merge_topk`.
    """

    ids: Any
    weights: Any
    is_finite: Any
    left: Any


class Support(NamedTuple):
    """Filter of a row: the tokens that pass top-k, top-p and min-p.

    Attributes:
      threshold: Key of the smallest logit that passes; of tokens with this key, ids below `limit`
        pass.
      highest: Highest logit.
      smallest: Smallest weight that passes, relative to the highest logit.
    """

    threshold: Any
    limit: Any
    highest: Any
    smallest: Any


@triton.jit
def row_of(partials, row, num_tiles, width: tl.constexpr, sizes: tl.constexpr):
    """Returns the partial results of one row."""
    first_group = row * tl.cdiv(sizes.vocab, 2 * PAIRS)
    first = row * num_tiles * width
    return TilePartials(
        peaks=partials.peaks + first_group,
        masses=partials.masses + first_group,
        winners=partials.winners + first,
        winner_ids=partials.winner_ids + first,
        bad=partials.bad + row * num_tiles,
        notes=partials.notes + row * NOTES,
        scores=partials.scores + row.to(tl.int64) * sizes.target_vocab,
    )


@triton.jit
def store_scores(partials, x, ids, row, inputs, sizes: tl.constexpr):
    """Stores processed logits of a row at the ids of the target's tokens."""
    tl.store(partials.scores + tokens_of(ids, row, inputs, sizes), x, mask=ids < sizes.vocab)


@triton.jit
def choose_in_tile(
    tile,
    best,
    support,
    source,
    sharpness,
    partials,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    """Stores a tile's best tokens that pass the filter, with noise, and its new group sums.

    Args:
      tile: Number of the tile.
      best: A key; without weights, tokens below it are skipped.
      support: Filter of the row.
      source: Source of the logits.
      sharpness: Factor of the logits in weights.
      partials: Group sums of the row and the best tokens of its tiles, which are replaced.
      is_scored: Filtered logits are stored, without noise.
      width: Tokens per tile.
      tau: Softness of the weights of sampled tokens; None: no weights.
      groups: Groups of a tile.
      sizes: Sizes of the arrays.

    Returns:
      The best token's key.
    """
    inputs, threshold, highest = source.inputs, support.threshold, support.highest
    group = tile * groups + tl.arange(0, groups)
    inside = group < tl.cdiv(sizes.vocab, 2 * PAIRS)
    peaks = tl.load(partials.peaks + group, mask=inside, other=LOWEST)
    may_pass = (peaks >= threshold) & (weight_of(score_of(peaks), highest, 1.0) >= support.smallest)
    if tau is None and not is_scored:  # no noise lifts other groups above the best token
        may_pass &= score_of(peaks) + MOST_NOISE >= score_of(best)
    pairs, ids = ids_of(group)
    keys = tl.full((groups, PAIRS, 2), LOWEST, tl.int32)
    x = tl.full((groups, PAIRS, 2), -float("inf"), tl.float32)
    # If fewer tokens pass than are requested, the excluded tokens of the first tile follow.
    if (tl.max(may_pass.to(tl.int32)) > 0) | ((width > 1) & (tile == 0)):
        raw, x = scores_of(ids, inputs, source.row, source.params, sizes)
        token_keys = key_of(x)
        passes = (token_keys > threshold) | ((token_keys == threshold) & (ids < support.limit))
        if support.smallest > 0:
            passes &= weight_of(x, highest, 1.0) >= support.smallest
        x = tl.where(passes, x, -float("inf"))
        words = words_at(source.params.noise, pairs, ids, source.row, inputs, sizes)
        may_win = tau is not None
        if tau is None:
            may_win = tl.max(x + max_noise(words)) >= score_of(best)
        if may_win:
            keys = tl.where(ids < sizes.vocab, key_of(x + noise_of_words(words)), LOWEST)
    if is_scored:
        store_scores(partials, x, ids, source.row, inputs, sizes)
    if tau is not None:
        tl.debug_barrier()  # all threads have read the keys of the groups
        places = partials.peaks + group, partials.masses + group, inside
        store_groups(*places, score_of(keys), keys, sharpness)
    return store_first(partials, tile, keys, ids, width)


@triton.jit
def store_first(partials, tile, keys, ids, width: tl.constexpr):
    """Stores the best tokens of a tile of a row; returns the key of the first."""
    keys_at, ids_at = partials.winners + tile * width, partials.winner_ids + tile * width
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
def tokens_of_best(peaks, group, row, inputs, sizes: tl.constexpr, width: tl.constexpr):
    """Returns keys and ids of all tokens of a row's best groups, one group per ranked token."""
    place, spread = tl.arange(0, _power(width)), tl.arange(0, 2 * PAIRS)
    key, winner = first_token(peaks, group)
    chosen = tl.where(place == 0, winner, HIGHEST)
    for rank in range(1, width):
        key, winner = next_token(peaks, group, key, winner)
        chosen = tl.where(place == rank, winner, chosen)
    is_one = (place < width) & (chosen < tl.cdiv(sizes.vocab, 2 * PAIRS))
    ids = tl.where(is_one, chosen, 0)[:, None] * (2 * PAIRS) + spread[None, :]
    inside = is_one[:, None] & (ids < sizes.vocab)
    at = inputs.logits + row.to(tl.int64) * sizes.vocab + ids
    return tl.where(inside, key_of(tl.load(at, mask=inside, other=0.0)), LOWEST), ids


@triton.constexpr_function
def _power(count):
    """Returns the next power of two that is not below a count."""
    return triton.next_power_of_2(count)


@triton.jit
def store_token(
    best,
    row,
    rank,
    key,
    winner,
    highest,
    norm,
    sharpness,
    inputs,
    width: tl.constexpr,
    sizes: tl.constexpr,
    tau: tl.constexpr,
):
    """Stores one token of a row with its weight; with its key, in a vocabulary shard."""
    if sizes.share > 0:
        at = best.left + row * (2 * width + 1) + rank
        tl.store(at, key)
        tl.store(at + width, winner)
    else:
        at = row * width + rank
        tl.store(best.ids + at, tokens_of(tl.minimum(winner, sizes.vocab - 1), row, inputs, sizes))
        if tau is not None:
            tl.store(best.weights + at, (score_of(key) - highest) * sharpness - norm)


@triton.jit
def store_bad(best, row, is_bad, width: tl.constexpr, sizes: tl.constexpr):
    """Stores whether some logits of a row are not finite."""
    if sizes.share > 0:
        tl.store(best.left + row * (2 * width + 1) + 2 * width, is_bad)
    else:
        tl.store(best.is_finite + row, is_bad == 0)
