"""The best tokens of tiles and of rows, for Pallas; see `sampling`, whose kernels these make up."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.sampling.gumbel_noise import MOST_NOISE, most_noise, noise_of_words
from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    LOWEST,
    PAIRS,
    first_token,
    ids_of,
    in_order,
    key_of,
    next_token,
    score_of,
    scores_of,
    store_groups,
    tokens_of,
    weight_of,
    words_at,
)


class Partials(NamedTuple):
    """What the kernels find of each row.

    Attributes:
      peaks, masses: Of groups, see `store_groups`.
      winners: Keys and ids of the best tokens of tiles.
      notes: See `support`.
      scores: Processed, of the target's tokens, if they are asked for.
    """

    peaks: Any
    masses: Any
    winners: Any
    notes: Any
    scores: Any = None


class Best(NamedTuple):
    """Of each row: its best tokens, their weights, and whether its logits are finite.

    Attributes:
      left: Of a rank's part, instead of the others: see `vocabulary.join`.
    """

    ids: Any
    weights: Any
    is_finite: Any
    left: Any


def store_scores(scores_ref, x, ids, inputs, row, sizes):
    """Stores processed scores in the places of the target's tokens."""
    inside, outside = ids < sizes.vocab, sizes.target_vocab
    at = jnp.where(inside, tokens_of(ids, inputs, sizes), outside)  # for the interpreter
    pltriton.store(scores_ref.at[row, at], x, mask=inside)


def places(group, row, peaks_ref, masses_ref):
    """Where what groups hold is stored, and which of them there are."""
    inside = group < peaks_ref.shape[1]
    at = jnp.where(inside, group, peaks_ref.shape[1])  # outside for the interpreter
    return peaks_ref.at[row, at], masses_ref.at[row, at], inside


def is_last(notes_ref, row, word, interpret):
    """Whether all other programs of a row have arrived before."""
    if not interpret:
        pltriton.debug_barrier()  # all of this program's words are in memory
    arrived = pltriton.atomic_add(notes_ref, (row, jnp.int32(word)), jnp.int32(1))
    return arrived == pl.num_programs(0) - 1


def choose_in_tiles(share, source, sharpness, partials, num_tiles, width, tau, groups):
    """Stores the best tokens of a program's tiles, with noise; whether it is the last to arrive."""
    notes_ref, row, programs = partials.notes, source.row, pl.num_programs(0)
    support = Support(
        border=notes_ref[row, 0],
        limit=notes_ref[row, 1],
        highest=score_of(notes_ref[row, 2]),
        smallest=source.inputs.min_p[source.wish.request],
    )

    def step(number, best):
        tile = share + number * programs
        given = (tile, best, support, source, sharpness, partials, width, tau, groups)
        return jnp.maximum(best, _choose_in_tile(*given))

    best = key_of(support.highest - 3)  # the first token stays, and no noise lies below -3
    steps = lax.div(num_tiles - share + programs - 1, jnp.int32(programs))
    lax.fori_loop(0, steps, step, best)
    return is_last(notes_ref, row, 6, source.interpret)


class Support(NamedTuple):
    """Which tokens of a row stay.

    Attributes:
      border: The key of the smallest score; of tokens that have it, those with an id below `limit`.
      highest: The highest score.
      smallest: How likely a token must be beside it.
    """

    border: Any
    limit: Any
    highest: Any
    smallest: Any


def _choose_in_tile(tile, best, support, source, sharpness, partials, width, tau, groups):
    """Stores a tile's best tokens of a support, with noise, and what its groups hold then.

    Args:
      tile: Number of it.
      best: A key; where weights are not asked for, tokens below it are not either.
      support: Of the row.
      source: Of the scores.
      sharpness: Of the weights.
      partials: What groups hold and the best tokens of tiles, to be replaced.

    Returns:
      The best token's key.
    """
    row, border, sizes = source.row, support.border, source.sizes
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
        _, x = scores_of(ids, source.inputs, row, source.wish, sizes)
        token_keys = key_of(x)
        stays = (token_keys > border) | ((token_keys == border) & (ids < support.limit))
        stays &= weight_of(x, support.highest, 1.0) >= support.smallest
        x = jnp.where(stays, x, -jnp.inf)
        if partials.scores is not None:
            store_scores(partials.scores, x, ids, source.inputs, row, sizes)
        words = words_at(source.wish.noise, pairs, ids, source.inputs, sizes)

        def noisy():
            return jnp.where(ids < sizes.vocab, key_of(x + noise_of_words(words)), LOWEST)

        if tau is not None:
            return noisy()
        may_win = jnp.max(x + most_noise(words)) >= score_of(best)
        return lax.cond(may_win, noisy, without_any)

    if tau is None and partials.scores is None:
        # No noise takes a token of a group past the best one.
        likely &= score_of(peaks) + MOST_NOISE >= score_of(best)
    is_read = jnp.max(((peaks >= border) & likely).astype(jnp.int32)) > 0
    if width > 1:
        is_read |= tile == 0  # where fewer stay than are asked for, its excluded tokens follow
    keys = lax.cond(is_read, with_noise, excluded)
    if tau is not None:
        if not source.interpret:
            pltriton.debug_barrier()  # the keys of groups have been read
        at = places(group, row, partials.peaks, partials.masses)
        store_groups(*at, score_of(keys), keys, sharpness)
    store_winners(partials.winners, row, tile, keys, ids, width)
    return jnp.max(keys)


def store_winners(winners_ref, row, tile, keys, ids, width):
    """Stores the best tokens of a tile."""

    def store(rank, *values):
        for part, value in enumerate(values):
            winners_ref[part, row, tile * width + rank] = value

    in_order(keys, ids, width, store)


def tokens_of_best(peaks, row, inputs, sizes, width):
    """Keys and ids of all tokens of a row's best groups, as many as are ranked."""
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
    at = jnp.where(inside, ids, sizes.vocab)  # outside for the interpreter
    raw = pltriton.load(inputs.logits.at[row, at], mask=inside, other=0.0)
    return jnp.where(inside, key_of(raw), LOWEST), ids


def store_token(best, row, rank, key, winner, highest, norm, sharpness, inputs, sizes, tau):
    """Stores one token of a row, and its weight; or its key, where others have better ones."""
    if sizes.share:
        best.left[row, rank] = key
        best.left[row, best.left.shape[1] // 2 + rank] = winner
        return
    best.ids[row, rank] = tokens_of(jnp.minimum(winner, sizes.vocab - 1), inputs, sizes)
    if tau is not None:
        best.weights[row, rank] = (score_of(key) - highest) * sharpness - norm


def store_bad(best, row, is_bad):
    """Stores whether some logits of a row are not finite."""
    if best.left is None:
        best.is_finite[row] = 1 - is_bad
    else:
        best.left[row, best.left.shape[1] - 1] = is_bad


def load_row(ref, at, other, volatile=False):
    """A row in a power of two of lanes."""
    lane = lax.iota(jnp.int32, pl.next_power_of_2(ref.shape[-1]))
    load = functools.partial(pltriton.load, volatile=volatile)
    return load(ref.at[(*at, lane)], mask=lane < ref.shape[-1], other=other)
