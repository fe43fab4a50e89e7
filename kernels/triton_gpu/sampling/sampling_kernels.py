"""Kernels of `sampling`: tiles, top-k / top-p threshold, and rows (Triton)."""

import triton
import triton.language as tl

from kernels.triton_gpu.sampling.gumbel_noise import log, noise_of_words
from kernels.triton_gpu.sampling.lm_head_epilogue import (
    ARGMAX_ONLY,
    LOGITS,
    best_of_partials,
    has_bad_partial,
    requested_outputs,
)
from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    candidate_mask,
    first_token,
    has_bad,
    ids_of,
    key_of,
    next_token,
    row_sampling,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    total_of,
    words_at,
)
from kernels.triton_gpu.sampling.threshold_bracket import bracket_threshold
from kernels.triton_gpu.sampling.topk import (
    Support,
    choose_in_tile,
    row_of,
    store_bad,
    store_first,
    store_scores,
    store_token,
    tokens_of_best,
)
from kernels.triton_gpu.sampling.topk_topp import (
    NOTES,
    RowScratch,
    ScoreSource,
    bounds_of,
    find_threshold,
    list_near,
)


@triton.jit
def tiles_kernel(
    inputs,
    partials,
    leaves,
    num_tiles: tl.constexpr,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
    num_leaves: tl.constexpr,
):
    """One program per tile and row: its best tokens, or the sums of its groups before any noise.

    If the LM head's block partials suffice, there is nothing to process, so there are fewer
    programs than tiles.
    """
    share, row = tl.program_id(0), tl.program_id(1)
    partials = row_of(partials, row, num_tiles, width, sizes)
    if share == 0:
        note = tl.arange(0, NOTES)
        tl.store(partials.notes + note, note * 0)
    if num_leaves == 0:
        _process_tile(share, row, inputs, partials, groups, sizes, width, tau, is_scored)
    elif requested_outputs(leaves, row, num_leaves) == LOGITS:
        for tile in range(share, num_tiles, tl.num_programs(0)):
            _process_tile(tile, row, inputs, partials, groups, sizes, width, tau, is_scored)


@triton.jit
def _process_tile(
    tile,
    row,
    inputs,
    partials,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    params = row_sampling(inputs, row, sizes)
    has_own = True
    if sizes.share > 0:
        first = tile * (groups * 2 * PAIRS) - inputs.first
        has_own = (first < sizes.share) & (first > -groups * 2 * PAIRS) | params.is_filtered
    if has_own:
        _process_own_tile(tile, row, params, inputs, partials, groups, sizes, width, tau, is_scored)
    else:
        tl.store(partials.bad + tile, 0)
        for rank in range(width):
            tl.store(partials.winners + tile * width + rank, LOWEST)
            tl.store(partials.winner_ids + tile * width + rank, HIGHEST)


@triton.jit
def _process_own_tile(
    tile,
    row,
    params,
    inputs,
    partials,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    group = tile * groups + tl.arange(0, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, params, sizes)
    tl.store(partials.bad + tile, has_bad(raw).to(tl.int32))
    places = (
        partials.peaks + group,
        partials.masses + group,
        group < tl.cdiv(sizes.vocab, 2 * PAIRS),
    )
    if params.is_filtered:
        keys = tl.where(ids < sizes.vocab, key_of(x), LOWEST)
        store_groups(*places, x, keys, 1.0)
    else:
        if is_scored:
            store_scores(partials, x, ids, row, inputs, sizes)
        if params.temperature > 0:
            x = x + noise_of_words(words_at(params.noise, pairs, ids, row, inputs, sizes))
        keys = tl.where(candidate_mask(ids, inputs, params, sizes), key_of(x), LOWEST)
        if tau is not None:
            store_groups(*places, x, keys, sharpness_of(params.temperature, tau))
        store_first(partials, tile, keys, ids, width)


@triton.jit
def threshold_kernel(
    inputs,
    partials,
    near_at,
    group_lanes: tl.constexpr,
    at_once: tl.constexpr,
    sampled: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """One program per split of a row with a filter; the last to finish finds the threshold."""
    share, row = tl.program_id(0), tl.program_id(1)
    source = ScoreSource(inputs, row, row_sampling(inputs, row, sizes))
    if source.params.is_filtered:
        num_groups = tl.cdiv(sizes.vocab, 2 * PAIRS)
        first, group = row * num_groups, tl.arange(0, group_lanes)
        peaks = tl.load(partials.peaks + first + group, mask=group < num_groups, other=LOWEST)
        masses = tl.load(partials.masses + first + group, mask=group < num_groups, other=0.0)
        bounds = bounds_of(peaks, masses, source, sizes)
        memory = RowScratch(
            peaks=partials.peaks + first,
            near=near_at + row * (2 * listed),
            notes=partials.notes + row * NOTES,
        )
        low, high = bounds.low, bounds.high
        if high > KEY_OF_NOTHING:
            low, high = bracket_threshold(peaks, masses, bounds, source, sampled, sizes)
            is_flat = tl.sum((peaks >= low).to(tl.int32)) * 2 > num_groups
            list_near(
                *(low, high, bounds.highest, is_flat, share, source, memory),
                *(at_once, listed, sizes),
            )
        tl.debug_barrier()  # all stores of this program are in memory
        if tl.atomic_add(memory.notes + 5, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            threshold, limit = find_threshold(
                low, high, bounds, source, memory, at_once, listed, sizes
            )
            tl.store(memory.notes, threshold)
            tl.store(memory.notes + 1, limit)
            tl.store(memory.notes + 2, key_of(bounds.highest))


@triton.jit
def rows_kernel(
    inputs,
    partials,
    leaves,
    best,
    num_tiles: tl.constexpr,
    tile_lanes: tl.constexpr,
    leaf_lanes: tl.constexpr,
    group_lanes: tl.constexpr,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
    num_leaves: tl.constexpr,
):
    """One program per split of a row: the best tokens of its tiles that have no noise yet.

    One of a row's programs reduces the tiles: the last to finish, if all have work.
    """
    share, row = tl.program_id(0), tl.program_id(1)
    partials, params = (
        row_of(partials, row, num_tiles, width, sizes),
        row_sampling(inputs, row, sizes),
    )
    sharpness = 1.0 if tau is None else sharpness_of(params.temperature, tau)
    is_last = share == 0
    if num_leaves > 0:
        asks = requested_outputs(leaves, row, num_leaves)
        if (asks != LOGITS) & is_last:
            store_bad(best, row, has_bad_partial(leaves, row, num_leaves, leaf_lanes), width, sizes)
        if (asks == ARGMAX_ONLY) & is_last:
            key, winner = best_of_partials(leaves, row, num_leaves, leaf_lanes)
            if sizes.share > 0:
                winner += inputs.first
            store_token(best, row, 0, key, winner, 0.0, 0.0, 1.0, inputs, width, sizes, None)
        if tau is None or sizes.share > 0:
            is_last = is_last & (asks != ARGMAX_ONLY)
        else:
            if (asks != LOGITS) & is_last:
                _rank_partials(
                    *(row, inputs, partials, leaves, best),
                    *(leaf_lanes, group_lanes, sizes, width, tau, num_leaves),
                )
            is_last = is_last & (asks == LOGITS)
    if params.is_filtered:
        support = Support(
            threshold=tl.load(partials.notes),
            limit=tl.load(partials.notes + 1),
            highest=score_of(tl.load(partials.notes + 2)),
            smallest=tl.load(inputs.min_p + params.request),
        )
        source = ScoreSource(inputs, row, params)
        first = key_of(support.highest - 3)  # the first token passes; noise is above -3
        for tile in range(share, num_tiles, tl.num_programs(0)):
            key = choose_in_tile(
                *(tile, first, support, source, sharpness, partials),
                *(groups, sizes, width, tau, is_scored),
            )
            first = tl.maximum(first, key)
        tl.debug_barrier()  # all stores of this program are in memory
        arrived = tl.atomic_add(partials.notes + 6, 1, sem="acq_rel")
        is_last = arrived == tl.num_programs(0) - 1
    if is_last:
        place = tl.arange(0, tile_lanes)
        if requested_outputs(leaves, row, num_leaves) == LOGITS:
            bad = tl.load(partials.bad + place, mask=place < num_tiles, other=0)
            store_bad(best, row, tl.max(bad), width, sizes)
        inside = place < num_tiles * width
        # Volatile, past the cache of the multiprocessor: other programs have written them.
        keys = tl.load(partials.winners + place, mask=inside, other=LOWEST, volatile=True)
        ids = tl.load(partials.winner_ids + place, mask=inside, other=HIGHEST, volatile=True)
        highest, norm = score_of(tl.max(keys)), 0.0
        if (tau is not None) and (sizes.share == 0):
            group = tl.arange(0, group_lanes)
            inside = group < tl.cdiv(sizes.vocab, 2 * PAIRS)
            peaks = tl.load(partials.peaks + group, mask=inside, other=LOWEST, volatile=True)
            masses = tl.load(partials.masses + group, mask=inside, other=0.0, volatile=True)
            norm = log(total_of(peaks, masses, highest, sharpness))
        key, winner = first_token(keys, ids)
        store_token(
            *(best, row, 0, key, winner, highest, norm, sharpness, inputs, width, sizes, tau)
        )
        for rank in range(1, width):
            key, winner = next_token(keys, ids, key, winner)
            store_token(
                *(best, row, rank, key, winner, highest, norm, sharpness, inputs),
                *(width, sizes, tau),
            )


@triton.jit
def _rank_partials(
    row,
    inputs,
    partials,
    leaves,
    best,
    leaf_lanes: tl.constexpr,
    group_lanes: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    num_leaves: tl.constexpr,
):
    """Stores the best tokens of a row without noise, from the groups with the largest maxima."""
    group = tl.arange(0, group_lanes)
    inside = group < tl.cdiv(sizes.vocab, 2 * PAIRS)
    peaks = tl.load(partials.peaks + group, mask=inside, other=LOWEST)
    masses = tl.load(partials.masses + group, mask=inside, other=0.0)
    highest = score_of(tl.max(peaks))
    norm = log(total_of(peaks, masses, highest, 1.0))
    if width == 1:
        key, winner = best_of_partials(leaves, row, num_leaves, leaf_lanes)
        store_token(best, row, 0, key, winner, highest, norm, 1.0, inputs, width, sizes, tau)
    else:
        keys, ids = tokens_of_best(peaks, group, row, inputs, sizes, width)
        key, winner = first_token(keys, ids)
        store_token(best, row, 0, key, winner, highest, norm, 1.0, inputs, width, sizes, tau)
        for rank in range(1, width):
            key, winner = next_token(keys, ids, key, winner)
            store_token(
                *(best, row, rank, key, winner, highest, norm, 1.0, inputs),
                *(width, sizes, tau),
            )
