"""Two-stage top-k: the best tokens of tiles, then of rows (Pallas, Triton backend)."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.sampling.gumbel_noise import MOST_NOISE, max_noise, noise_of_words
from kernels.pallas_gpu.sampling.logits_processing import (
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
    store_sorted,
    tokens_of,
    weight_of,
    words_at,
)


class TilePartials(NamedTuple):
    """Partial results of each row.

    Attributes:
      peaks, masses: Maxima and weights of groups, see `store_groups`.
      winners: Keys and ids of the best tokens of tiles.
      notes: See `topk_topp.NOTES`.
      scores: Processed logits of the target's tokens, if requested.
    """

    peaks: Any
    masses: Any
    winners: Any
    notes: Any
    scores: Any = None


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


def store_scores(scores_ref, x, ids, inputs, row, sizes):
    """Stores processed logits at the ids of the target's tokens."""
    inside, outside = ids < sizes.vocab, sizes.target_vocab
    at = jnp.where(
        inside, tokens_of(ids, row, inputs, sizes), outside
    )  # outside, for the interpreter
    pltriton.store(scores_ref.at[row, at], x, mask=inside)


def places(group, row, peaks_ref, masses_ref):
    """Returns the indices at which group sums are stored, and a mask of the groups that exist."""
    inside = group < peaks_ref.shape[1]
    at = jnp.where(inside, group, peaks_ref.shape[1])  # outside, for the interpreter
    return peaks_ref.at[row, at], masses_ref.at[row, at], inside


def is_last(notes_ref, row, word, interpret):
    """Returns whether all other programs of a row have finished before."""
    if not interpret:
        pltriton.debug_barrier()  # all stores of this program are in memory
    arrived = pltriton.atomic_add(notes_ref, (row, jnp.int32(word)), jnp.int32(1))
    return arrived == pl.num_programs(0) - 1


def choose_in_tiles(share, source, sharpness, partials, num_tiles, width, tau, groups):
    """Stores the best tokens of a program's tiles, with noise; returns whether it is the last."""
    notes_ref, row, programs = partials.notes, source.row, pl.num_programs(0)
    support = Support(
        threshold=notes_ref[row, 0],
        limit=notes_ref[row, 1],
        highest=score_of(notes_ref[row, 2]),
        smallest=source.inputs.min_p[source.params.request],
    )

    def step(number, best):
        tile = share + number * programs
        given = (tile, best, support, source, sharpness, partials, width, tau, groups)
        return jnp.maximum(best, _choose_in_tile(*given))

    best = key_of(support.highest - 3)  # the first token passes; noise is above -3
    steps = lax.div(num_tiles - share + programs - 1, jnp.int32(programs))
    lax.fori_loop(0, steps, step, best)
    return is_last(notes_ref, row, 6, source.interpret)


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


def _choose_in_tile(tile, best, support, source, sharpness, partials, width, tau, groups):
    """Stores a tile's best tokens that pass the filter, with noise, and its new group sums.

    Args:
      tile: Number of the tile.
      best: A key; without weights, tokens below it are skipped.
      support: Filter of the row.
      source: Source of the logits.
      sharpness: Factor of the logits in weights.
      partials: Group sums and the best tokens of tiles, which are replaced.
      width: Tokens per tile.
      tau: Softness of the weights of sampled tokens; None: no weights.
      groups: Groups of a tile.

    Returns:
      The best token's key.
    """
    row, threshold, sizes = source.row, support.threshold, source.sizes
    group = tile * groups + lax.iota(jnp.int32, groups)
    inside = group < partials.peaks.shape[1]
    peaks = pltriton.load(partials.peaks.at[row, group], mask=inside, other=LOWEST)
    likely = weight_of(score_of(peaks), support.highest, 1.0) >= support.smallest
    pairs, ids = ids_of(group)

    def without_any():
        return jnp.full(ids.shape, LOWEST, jnp.int32)

    def excluded():
        if partials.scores is not None:
            x = jnp.full(ids.shape, -jnp.inf, jnp.float32)
            store_scores(partials.scores, x, ids, source.inputs, row, sizes)
        return without_any()

    def with_noise():
        _, x = scores_of(ids, source.inputs, row, source.params, sizes)
        token_keys = key_of(x)
        passes = (token_keys > threshold) | ((token_keys == threshold) & (ids < support.limit))
        passes &= weight_of(x, support.highest, 1.0) >= support.smallest
        x = jnp.where(passes, x, -jnp.inf)
        if partials.scores is not None:
            store_scores(partials.scores, x, ids, source.inputs, row, sizes)
        words = words_at(source.params.noise, pairs, ids, row, source.inputs, sizes)

        def noisy():
            return jnp.where(ids < sizes.vocab, key_of(x + noise_of_words(words)), LOWEST)

        if tau is not None:
            return noisy()
        may_win = jnp.max(x + max_noise(words)) >= score_of(best)
        return lax.cond(may_win, noisy, without_any)

    if tau is None and partials.scores is None:
        # No noise can lift a token of these groups above the best one.
        likely &= score_of(peaks) + MOST_NOISE >= score_of(best)
    is_read = jnp.max(((peaks >= threshold) & likely).astype(jnp.int32)) > 0
    if width > 1:
        is_read |= tile == 0  # if fewer tokens pass than are requested, its excluded tokens follow
    keys = lax.cond(is_read, with_noise, excluded)
    if tau is not None:
        if not source.interpret:
            pltriton.debug_barrier()  # all threads have read the keys of the groups
        at = places(group, row, partials.peaks, partials.masses)
        store_groups(*at, score_of(keys), keys, sharpness)
    store_winners(partials.winners, row, tile, keys, ids, width)
    return jnp.max(keys)


def store_winners(winners_ref, row, tile, keys, ids, width):
    """Stores the best tokens of a tile."""

    def store(rank, *values):
        for part, value in enumerate(values):
            winners_ref[part, row, tile * width + rank] = value

    store_sorted(keys, ids, width, store)


def tokens_of_best(peaks, row, inputs, sizes, width):
    """Returns keys and ids of all tokens of a row's best groups, one group per ranked token."""
    place = lax.iota(jnp.int32, pl.next_power_of_2(width))
    group = lax.iota(jnp.int32, peaks.shape[0])
    key, winner = first_token(peaks, group)
    chosen = jnp.where(place == 0, winner, HIGHEST)
    for rank in range(1, width):
        key, winner = next_token(peaks, group, key, winner)
        chosen = jnp.where(place == rank, winner, chosen)
    is_one = (place < width) & (chosen < pl.cdiv(sizes.vocab, 2 * PAIRS))
    first = jnp.where(is_one, chosen, 0) * (2 * PAIRS)
    ids = first[:, None] + lax.iota(jnp.int32, 2 * PAIRS)[None, :]
    inside = is_one[:, None] & (ids < sizes.vocab)
    at = jnp.where(inside, ids, sizes.vocab)  # outside, for the interpreter
    raw = pltriton.load(inputs.logits.at[row, at], mask=inside, other=0.0)
    return jnp.where(inside, key_of(raw), LOWEST), ids


def store_token(best, row, rank, key, winner, highest, norm, sharpness, inputs, sizes, tau):
    """Stores one token of a row with its weight; with its key, in a vocabulary shard."""
    if sizes.share:
        best.left[row, rank] = key
        best.left[row, best.left.shape[1] // 2 + rank] = winner
        return
    best.ids[row, rank] = tokens_of(jnp.minimum(winner, sizes.vocab - 1), row, inputs, sizes)
    if tau is not None:
        best.weights[row, rank] = (score_of(key) - highest) * sharpness - norm


def store_bad(best, row, is_bad):
    """Stores whether some logits of a row are not finite."""
    if best.left is None:
        best.is_finite[row] = 1 - is_bad
    else:
        best.left[row, best.left.shape[1] - 1] = is_bad


def load_row(ref, at, other, volatile=False):
    """Loads a row into lanes padded to a power of two."""
    lane = lax.iota(jnp.int32, pl.next_power_of_2(ref.shape[-1]))
    load = functools.partial(pltriton.load, volatile=volatile)
    return load(ref.at[(*at, lane)], mask=lane < ref.shape[-1], other=other)
