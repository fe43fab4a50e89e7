"""The choice of tokens from logits, in Triton.

Three kernels. The first looks at tiles of the vocabulary, all at once: it finds the best tokens of
a tile or, where a row has a filter, what its groups of tokens hold. The second finds the border of
the support of rows with a filter (`support`). The third finds the best tokens of their tiles, and
joins the tiles of all rows. What a row does not ask for it does not pay for.

Scores are compared as whole numbers in their order (`key_of`), and sums are of whole numbers, so
the results depend on no order and no tile. What must stay equal in the Pallas twin is listed in
`kernels/__init__.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.tiles import SamplingTiles
from kernels.triton_gpu.guess import guess
from kernels.triton_gpu.leaves import (
    NOTHING,
    SCORES,
    Leaves,
    asked_of,
    best_left,
    is_left_bad,
)
from kernels.triton_gpu.noise import log, noise_of_words
from kernels.triton_gpu.scores import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    first_token,
    has_bad,
    ids_of,
    inputs_of,
    key_of,
    next_token,
    score_of,
    scores_of,
    sharpness_of,
    sizes_of,
    store_groups,
    tokens_of,
    total_of,
    wish_of,
    words_at,
)
from kernels.triton_gpu.support import NOTES, Memory, Source, bounds_of, find_border, list_near
from kernels.triton_gpu.winners import (
    Best,
    Partials,
    Support,
    choose_in_tile,
    row_of,
    store_first,
    store_scores,
    store_token,
)

GROUP = 2 * PAIRS.value
SHARED = 4
"""Beside what a head has left a row has so many times more programs that look at tiles than those
that its tiles have where it has a filter."""


def choose(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    stream: int,
    tiles: SamplingTiles,
    leaves: Leaves | None = None,
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"]]:
    """As `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: As in the specification.
      stream: Of the noise.
      tiles: How the work is cut.
      leaves: What the product with the head has left of rows whose logits are not there.
    """
    ids, _, is_finite, _ = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=positions,
        stream=stream,
        width=1,
        is_scored=False,
        columns=None,
        tau=None,
        nodes=0,
        tiles=tiles,
        leaves=leaves,
    )
    return ids[:, 0], is_finite


def score(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    stream: int,
    tiles: SamplingTiles,
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"], Float[Tensor, "R vocab"]]:
    """As `choose`, and `shared.spec.sampling.processed` of the same arguments."""
    ids, _, is_finite, scores = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        keys=positions,
        stream=stream,
        width=1,
        is_scored=True,
        columns=None,
        tau=None,
        nodes=0,
        tiles=tiles,
    )
    return ids[:, 0], is_finite, scores


def rank(
    logits: Float[Tensor, "B k vocab"],
    seen: Any,
    positions: Int[Tensor, " B"],
    sampling: Any,
    keys: Int[Tensor, " B"],
    stream: int,
    width: int,
    is_sampled: bool,
    columns: Int[Tensor, " vocab"] | None,
    *,
    tau: float,
    tiles: SamplingTiles,
) -> tuple[
    Int[Tensor, "B k width"], Float[Tensor, "B k width"], Float[Tensor, "R target_vocab"] | None
]:
    """As `shared.spec.sampling.rank`.

    Args:
      logits, seen, positions, sampling, keys, stream, width, is_sampled, columns: As in the
        specification.
      tau: Softness of the weights where there is noise.
      tiles: How the work is cut.
    """
    B, k, _ = logits.shape
    ids, weights, _, scores = _ranked(
        *(logits.flatten(0, 1), seen, positions, sampling, positions, None),
        keys=keys,
        stream=stream,
        width=width,
        is_scored=is_sampled,
        columns=columns,
        tau=tau,
        nodes=k,
        tiles=tiles,
    )
    return ids.view(B, k, width), weights.view(B, k, width), scores if is_sampled else None


def _ranked(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " named"],
    sampling: Any,
    request: Int[Tensor, " named"],
    allowed: Bool[Tensor, "R vocab"] | None,
    *,
    keys: Int[Tensor, " named"],
    stream: int,
    width: int,
    is_scored: bool,
    columns: Int[Tensor, " vocab"] | None,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
    leaves: Leaves | None = None,
) -> tuple[
    Int[Tensor, "R width"],
    Float[Tensor, "R width"],
    Bool[Tensor, " R"],
    Float[Tensor, "R target_vocab"],
]:
    """The best tokens of each row, their weights, whether its logits are finite, and its scores.

    Args:
      is_scored: The scores are asked for; else nothing is written there.
      tau: None: there are no weights.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
    """
    (R, vocab), params, new = logits.shape, sampling, logits.new_empty
    groups = triton.cdiv(vocab, GROUP)
    num_tiles = triton.cdiv(groups, tiles.groups)
    ints: dict[str, Any] = {"dtype": torch.int32}
    scores = logits if not is_scored else new(R, seen.counts.shape[1])
    if is_scored and columns is not None:
        scores.fill_(-torch.inf)  # of tokens that the drafter does not have
    partials = Partials(
        peaks=new(R, groups, **ints) if leaves is None else leaves.peaks,
        masses=new(R, groups) if leaves is None else leaves.masses,
        winners=new(R, num_tiles, width, **ints),
        winner_ids=new(R, num_tiles, width, **ints),
        bad=new(R, num_tiles, **ints),
        notes=new(R, NOTES.value, **ints),
        scores=scores,
    )
    best = Best(
        ids=new(R, width, **ints), weights=new(R, width), is_finite=new(R, dtype=torch.bool)
    )
    inputs = inputs_of(logits, seen, positions, params, request, allowed, columns, keys, stream)
    num_leaves = 0 if leaves is None else leaves.keys.shape[1]
    given = Leaves(*[partials.bad] * len(Leaves._fields)) if leaves is None else leaves
    fixed = {
        "sizes": sizes_of(vocab, seen, params, allowed, nodes, columns, leaves is not None),
        "enable_fp_fusion": False,  # XLA's Triton does not fuse: equal bits in Pallas
    }
    chosen = {"width": width, "tau": tau, "is_scored": is_scored, "num_leaves": num_leaves}
    group_lanes = triton.next_power_of_2(groups)
    # Of rows whose scores a head has left out no tile is looked at.
    at_once = num_tiles if leaves is None else min(num_tiles, SHARED * tiles.programs)
    _tiles_kernel[(at_once, R)](
        *(inputs, partials, given),
        num_tiles=num_tiles,
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    _border_kernel[(min(tiles.row_programs, triton.cdiv(groups, tiles.at_once)), R)](
        *(inputs, partials, new(R, 2, tiles.listed, **ints)),
        group_lanes=group_lanes,
        at_once=tiles.at_once,
        sampled=tiles.sampled,
        listed=tiles.listed,
        num_warps=tiles.row_warps,
        **fixed,
    )
    _rows_kernel[(min(tiles.programs, num_tiles), R)](
        *(inputs, partials, given, best),
        num_tiles=num_tiles,
        tile_lanes=triton.next_power_of_2(num_tiles * width),
        leaf_lanes=triton.next_power_of_2(num_leaves),
        group_lanes=group_lanes,
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    return *best, scores


@triton.jit
def _tiles_kernel(
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
    """One program per tile and row: its best tokens, or what its groups hold before any noise.

    Where the head has left what a row asks for, there is nothing to look at, and programs are fewer
    than tiles.
    """
    share, row = tl.program_id(0), tl.program_id(1)
    partials = row_of(partials, row, num_tiles, width, sizes)
    if share == 0:
        note = tl.arange(0, NOTES)
        tl.store(partials.notes + note, note * 0)
    if num_leaves == 0:
        _look_at(share, row, inputs, partials, groups, sizes, width, tau, is_scored)
    elif asked_of(leaves, row, num_leaves) == SCORES:
        for tile in range(share, num_tiles, tl.num_programs(0)):
            _look_at(tile, row, inputs, partials, groups, sizes, width, tau, is_scored)


@triton.jit
def _look_at(
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
    wish = wish_of(inputs, row, sizes)
    group = tile * groups + tl.arange(0, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, inputs, row, wish, sizes)
    tl.store(partials.bad + tile, has_bad(raw).to(tl.int32))
    places = (
        partials.peaks + group,
        partials.masses + group,
        group < tl.cdiv(sizes.vocab, 2 * PAIRS),
    )
    if wish.is_filtered:
        keys = tl.where(ids < sizes.vocab, key_of(x), LOWEST)
        store_groups(*places, x, keys, 1.0)
    else:
        if is_scored:
            store_scores(partials, x, ids, inputs, sizes)
        if wish.temperature > 0:
            x = x + noise_of_words(words_at(wish.noise, pairs, ids, inputs, sizes))
        keys = tl.where(ids < sizes.vocab, key_of(x), LOWEST)
        if tau is not None:
            store_groups(*places, x, keys, sharpness_of(wish.temperature, tau))
        store_first(partials, tile, keys, ids, width)


@triton.jit
def _border_kernel(
    inputs,
    partials,
    near_at,
    group_lanes: tl.constexpr,
    at_once: tl.constexpr,
    sampled: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """One program per share of a row with a filter; the last to arrive finds the border."""
    share, row = tl.program_id(0), tl.program_id(1)
    source = Source(inputs, row, wish_of(inputs, row, sizes))
    if source.wish.is_filtered:
        num_groups = tl.cdiv(sizes.vocab, 2 * PAIRS)
        first, group = row * num_groups, tl.arange(0, group_lanes)
        peaks = tl.load(partials.peaks + first + group, mask=group < num_groups, other=LOWEST)
        masses = tl.load(partials.masses + first + group, mask=group < num_groups, other=0.0)
        bounds = bounds_of(peaks, masses, source, sizes)
        memory = Memory(
            peaks=partials.peaks + first,
            near=near_at + row * (2 * listed),
            notes=partials.notes + row * NOTES,
        )
        low, high = bounds.low, bounds.high
        if high > KEY_OF_NOTHING:
            low, high = guess(peaks, masses, bounds, source, sampled, sizes)
            is_flat = tl.sum((peaks >= low).to(tl.int32)) * 2 > num_groups
            list_near(
                *(low, high, bounds.highest, is_flat, share, source, memory),
                *(at_once, listed, sizes),
            )
        tl.debug_barrier()  # all of this program's words are in memory
        if tl.atomic_add(memory.notes + 5, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            border, limit = find_border(low, high, bounds, source, memory, at_once, listed, sizes)
            tl.store(memory.notes, border)
            tl.store(memory.notes + 1, limit)
            tl.store(memory.notes + 2, key_of(bounds.highest))


@triton.jit
def _rows_kernel(
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
    """One program per share of a row: the best tokens of its tiles, where they have no noise yet.

    One of a row's programs joins the tiles, the last to arrive where all have something to do.
    """
    share, row = tl.program_id(0), tl.program_id(1)
    partials, wish = row_of(partials, row, num_tiles, width, sizes), wish_of(inputs, row, sizes)
    sharpness = 1.0 if tau is None else sharpness_of(wish.temperature, tau)
    is_last = share == 0
    if num_leaves > 0:
        asks = asked_of(leaves, row, num_leaves)
        if (asks != SCORES) & is_last:
            is_bad = is_left_bad(leaves, row, num_leaves, leaf_lanes)
            tl.store(best.is_finite + row, is_bad == 0)
        if (asks == NOTHING) & is_last:
            winner = best_left(leaves, row, num_leaves, leaf_lanes)
            tl.store(best.ids + row, tokens_of(winner, inputs, sizes))
        is_last = is_last & (asks != NOTHING)
    if wish.is_filtered:
        support = Support(
            border=tl.load(partials.notes),
            limit=tl.load(partials.notes + 1),
            highest=score_of(tl.load(partials.notes + 2)),
            smallest=tl.load(inputs.min_p + wish.request),
        )
        source = Source(inputs, row, wish)
        first = key_of(support.highest - 3)  # the first token stays, and no noise lies below -3
        for tile in range(share, num_tiles, tl.num_programs(0)):
            key = choose_in_tile(
                *(tile, first, support, source, sharpness, partials),
                *(groups, sizes, width, tau, is_scored),
            )
            first = tl.maximum(first, key)
        tl.debug_barrier()  # all of this program's words are in memory
        arrived = tl.atomic_add(partials.notes + 6, 1, sem="acq_rel")
        is_last = arrived == tl.num_programs(0) - 1
    if is_last:
        place = tl.arange(0, tile_lanes)
        if asked_of(leaves, row, num_leaves) == SCORES:
            bad = tl.load(partials.bad + place, mask=place < num_tiles, other=0)
            tl.store(best.is_finite + row, tl.max(bad) == 0)
        inside = place < num_tiles * width
        # Volatile, past the cache of the multiprocessor: other programs have written them.
        keys = tl.load(partials.winners + place, mask=inside, other=LOWEST, volatile=True)
        ids = tl.load(partials.winner_ids + place, mask=inside, other=HIGHEST, volatile=True)
        highest, norm = score_of(tl.max(keys)), 0.0
        if tau is not None:
            group = tl.arange(0, group_lanes)
            inside = group < tl.cdiv(sizes.vocab, 2 * PAIRS)
            peaks = tl.load(partials.peaks + group, mask=inside, other=LOWEST, volatile=True)
            masses = tl.load(partials.masses + group, mask=inside, other=0.0, volatile=True)
            norm = log(total_of(peaks, masses, highest, sharpness))
        at = row * width
        key, winner = first_token(keys, ids)
        store_token(best, at, key, winner, highest, norm, sharpness, inputs, sizes, tau)
        for rank in range(1, width):
            key, winner = next_token(keys, ids, key, winner)
            store_token(best, at + rank, key, winner, highest, norm, sharpness, inputs, sizes, tau)
