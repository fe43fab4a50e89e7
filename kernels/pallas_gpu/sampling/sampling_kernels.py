"""Kernels of `sampling`: tiles, top-k / top-p threshold, and rows (Pallas, Triton backend)."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.pallas_gpu.sampling.gumbel_noise import log, noise_of_words
from kernels.pallas_gpu.sampling.lm_head_epilogue import (
    ARGMAX_ONLY,
    LOGITS,
    BlockPartials,
    best_of_partials,
    has_bad_partial,
    requested_outputs,
)
from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    SamplingInputs,
    candidate_mask,
    has_bad,
    ids_of,
    key_of,
    row_sampling,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    store_sorted,
    total_of,
    words_at,
)
from kernels.pallas_gpu.sampling.threshold_bracket import bracket_threshold
from kernels.pallas_gpu.sampling.topk import (
    TilePartials,
    choose_in_tiles,
    is_last,
    load_row,
    places,
    store_bad,
    store_scores,
    store_token,
    store_winners,
    tokens_of_best,
)
from kernels.pallas_gpu.sampling.topk_topp import (
    NOTES,
    RowScratch,
    ScoreSource,
    bounds_of,
    find_threshold,
    list_near,
)

NUM_INPUTS = len(SamplingInputs._fields)


def tiles_kernel(*refs, num_left, **how):
    """One program per tile and row: its best tokens, or the sums of its groups before any noise.

    If the LM head's block partials suffice, there is nothing to process, so there are fewer
    programs than tiles.
    """
    inputs, leaves = SamplingInputs(*refs[:NUM_INPUTS]), _block_partials(refs, num_left)
    num_partials = 5 if how["is_scored"] else 4
    *outputs, bad_ref = refs[-num_partials - 1 :]
    share, row, programs = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    partials = TilePartials(*outputs)

    @pl.when(share == 0)
    def _():
        partials.notes[row, :] = jnp.zeros((NOTES,), jnp.int32)

    def process_tile(number, _):
        tile = share + number * programs
        _process_tile(tile, row, inputs, partials, bad_ref, **how)

    if leaves is None:
        process_tile(0, None)
        return
    of_program = lax.div(bad_ref.shape[1] - share + programs - 1, jnp.int32(programs))
    needs_logits = jnp.asarray(requested_outputs(leaves, row) == LOGITS, jnp.int32)
    lax.fori_loop(0, of_program * needs_logits, process_tile, None)


def _block_partials(refs, num_left):
    return BlockPartials(*refs[NUM_INPUTS : NUM_INPUTS + num_left]) if num_left else None


def _process_tile(tile, row, inputs, partials, bad_ref, *, groups, sizes, width, tau, is_scored):
    params = row_sampling(inputs, row, sizes)
    how = {"groups": groups, "sizes": sizes, "width": width, "tau": tau, "is_scored": is_scored}
    look = functools.partial(_process_own_tile, tile, row, params, inputs, partials, bad_ref, **how)
    if not sizes.share:
        look()
        return
    first = tile * (groups * 2 * PAIRS) - inputs.first[0]
    has_own = (first < sizes.share) & (first > -groups * 2 * PAIRS) | params.is_filtered
    pl.when(has_own)(look)

    @pl.when(~has_own)
    def _():
        bad_ref[row, tile] = 0
        for rank in range(width):
            for part, value in enumerate((LOWEST, HIGHEST)):
                partials.winners[part, row, tile * width + rank] = value


def _process_own_tile(
    tile, row, params, inputs, partials, bad_ref, *, groups, sizes, width, tau, is_scored
):
    group = tile * groups + lax.iota(jnp.int32, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, params, sizes)
    bad_ref[row, tile] = has_bad(raw).astype(jnp.int32)
    at = places(group, row, partials.peaks, partials.masses)

    @pl.when(params.is_filtered)
    def _():
        store_groups(*at, x, jnp.where(ids < sizes.vocab, key_of(x), LOWEST), 1.0)

    @pl.when(~params.is_filtered)
    def _():
        named = (pairs, ids, row, inputs, sizes)
        noisy = lax.cond(
            params.temperature > 0,
            lambda: x + noise_of_words(words_at(params.noise, *named)),
            lambda: x,
        )
        keys = jnp.where(candidate_mask(ids, inputs, params, sizes), key_of(noisy), LOWEST)
        if tau is not None:
            store_groups(*at, noisy, keys, sharpness_of(params.temperature, tau))
        if is_scored:
            store_scores(partials.scores, x, ids, inputs, row, sizes)
        store_winners(partials.winners, row, tile, keys, ids, width)


def threshold_kernel(*refs, sizes, tiles, interpret):
    """One program per split of a row with a filter; the last to finish finds the threshold."""
    inputs = SamplingInputs(*refs[:-5])
    _, peaks_ref, masses_ref, notes_ref, near_ref = refs[-5:]
    share, row = pl.program_id(0), pl.program_id(1)
    params = row_sampling(inputs, row, sizes)

    @pl.when(params.is_filtered)
    def _():
        peaks, masses = load_row(peaks_ref, (row,), LOWEST), load_row(masses_ref, (row,), 0.0)
        source = ScoreSource(inputs, row, params, sizes, interpret)
        memory = RowScratch(peaks_ref, near_ref, notes_ref, tiles.at_once)
        bounds = bounds_of(peaks, masses, source)

        def share_work():
            low, high = bracket_threshold(peaks, masses, bounds, source, tiles.sampled)
            is_flat = (peaks >= low).astype(jnp.int32).sum() * 2 > peaks_ref.shape[1]
            list_near(low, high, bounds.highest, is_flat, share, source, memory)
            return low, high

        is_on = bounds.high > KEY_OF_NOTHING
        low, high = lax.cond(is_on, share_work, lambda: (bounds.low, bounds.high))

        @pl.when(is_last(notes_ref, row, 5, interpret))
        def _():
            threshold, limit = find_threshold(low, high, bounds, source, memory)
            notes_ref[row, 0], notes_ref[row, 1] = threshold, limit
            notes_ref[row, 2] = key_of(bounds.highest)


def rows_kernel(*refs, interpret, sizes, width, tau, groups, is_scored, num_left):
    """One program per split of a row: the best tokens of its tiles that have no noise yet.

    One of a row's programs reduces the tiles: the last to finish, if all have work.
    """
    inputs, num_partials = SamplingInputs(*refs[:NUM_INPUTS]), 5 if is_scored else 4
    bad_ref, best, *outputs = refs[NUM_INPUTS + num_left + num_partials :]
    partials = TilePartials(*outputs)
    share, row = pl.program_id(0), pl.program_id(1)
    params = row_sampling(inputs, row, sizes)
    sharpness = 1.0 if tau is None else sharpness_of(params.temperature, tau)
    num_tiles = bad_ref.shape[1]

    def choose():
        source = ScoreSource(inputs, row, params, sizes, interpret)
        return choose_in_tiles(share, source, sharpness, partials, num_tiles, width, tau, groups)

    reduces = lax.cond(params.is_filtered, choose, lambda: share == 0)
    leaves = _block_partials(refs, num_left)
    asks = requested_outputs(leaves, row)
    if leaves is not None:

        @pl.when(reduces & (asks != LOGITS))
        def _():
            store_bad(best, row, has_bad_partial(leaves, row))

        @pl.when(reduces & (asks == ARGMAX_ONLY))
        def _():
            key, winner = best_of_partials(leaves, row)
            winner += inputs.first[0] if sizes.share else 0
            store_token(best, row, 0, key, winner, 0.0, 0.0, 1.0, inputs, sizes, None)

        if tau is None or sizes.share:
            reduces &= asks != ARGMAX_ONLY
        else:

            @pl.when(reduces & (asks != LOGITS))
            def _():
                _rank_partials(row, inputs, partials, leaves, best, sizes, width, tau)

            reduces &= asks == LOGITS

    @pl.when(reduces)
    def _():
        @pl.when(asks == LOGITS)
        def _():
            store_bad(best, row, jnp.max(load_row(bad_ref, (row,), 0)))

        # Volatile loads bypass the L1 cache: other programs have written the values.
        load = functools.partial(load_row, volatile=not interpret)
        keys, ids = (
            load(partials.winners, (0, row), LOWEST),
            load(partials.winners, (1, row), HIGHEST),
        )
        highest, norm = score_of(jnp.max(keys)), 0.0
        if tau is not None and not sizes.share:
            peaks, masses = (
                load(partials.peaks, (row,), LOWEST),
                load(partials.masses, (row,), 0.0),
            )
            norm = log(total_of(peaks, masses, highest, sharpness))

        def store(rank, key, winner):
            of_row = (highest, norm, sharpness, inputs, sizes, tau)
            store_token(best, row, rank, key, winner, *of_row)

        store_sorted(keys, ids, width, store)


def _rank_partials(row, inputs, partials, leaves, best, sizes, width, tau):
    """Stores the best tokens of a row without noise, from the groups with the largest maxima."""
    peaks = load_row(partials.peaks, (row,), LOWEST)
    masses = load_row(partials.masses, (row,), 0.0)
    highest = score_of(jnp.max(peaks))
    of_row = (highest, log(total_of(peaks, masses, highest, 1.0)), 1.0, inputs, sizes, tau)

    def store(rank, key, winner):
        store_token(best, row, rank, key, winner, *of_row)

    if width == 1:
        store(0, *best_of_partials(leaves, row))
    else:
        store_sorted(*tokens_of_best(peaks, row, inputs, sizes, width), width, store)
