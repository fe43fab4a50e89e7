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
from kernels.triton_gpu.noise import log, noise_of_words
from kernels.triton_gpu.scores import (
    HIGHEST,
    KEY_OF_NOTHING,
    LOWEST,
    PAIRS,
    first_token,
    has_bad,
    ids_of,
    key_of,
    next_token,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    total_of,
    wish_of,
    words_at,
)
from kernels.triton_gpu.support import NOTES, bounds_of, find_border, list_near
from kernels.triton_gpu.winners import choose_in_tile, store_first, store_scores, store_token

GROUP = 2 * PAIRS.value


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
) -> tuple[Int[Tensor, " R"], Bool[Tensor, " R"]]:
    """As `shared.spec.sampling.choose`.

    Args:
      logits, seen, positions, sampling, request, allowed: As in the specification.
      stream: Of the noise.
      tiles: How the work is cut.
    """
    ids, _, is_finite, _ = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        *(positions, stream, 1, False, None, None, 0, tiles),
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
        *(positions, stream, 1, True, None, None, 0, tiles),
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
        *(keys, stream, width, is_sampled, columns, tau, k, tiles),
    )
    return ids.view(B, k, width), weights.view(B, k, width), scores if is_sampled else None


def _ranked(
    logits: Float[Tensor, "R vocab"],
    seen: Any,
    positions: Int[Tensor, " named"],
    sampling: Any,
    request: Int[Tensor, " named"],
    allowed: Bool[Tensor, "R vocab"] | None,
    keys: Int[Tensor, " named"],
    stream: int,
    width: int,
    is_scored: bool,
    columns: Int[Tensor, " vocab"] | None,
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
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
    (R, vocab), how, new = logits.shape, sampling, logits.new_empty
    groups = triton.cdiv(vocab, GROUP)
    num_tiles = triton.cdiv(groups, tiles.groups)
    ints = {"dtype": torch.int32}
    peaks, masses, notes = new(R, groups, **ints), new(R, groups), new(R, NOTES.value, **ints)
    winners, bad = new(2, R, num_tiles, width, **ints), new(R, num_tiles, **ints)
    near = new(R, 2, tiles.listed, **ints)
    ids, weights, is_finite = new(R, width, **ints), new(R, width), new(R, dtype=torch.bool)
    scores = logits if not is_scored else new(R, seen.counts.shape[1])
    if is_scored and columns is not None:
        scores.fill_(-torch.inf)  # of tokens that the drafter does not have
    mask = logits if allowed is None else allowed
    path = seen.path if seen.path.shape[1] else seen.slots  # pointers that nothing reads
    on_path = seen.on_path if seen.path.shape[1] else seen.slots
    rows = (logits, request, positions, keys, seen.slots, seen.counts, path, on_path, mask)
    rows = (*rows, seen.slots if columns is None else columns)
    rows = tuple(
        x.contiguous() for x in rows
    )  # the path of a draft level is a part of a longer one
    asked = (
        *(how.temperature, how.top_p, how.top_k, how.min_p, how.seed),
        *(how.presence, how.frequency, how.repetition, how.min_length),
        *(how.stop_ids, how.bias_ids, how.bias_values),
    )
    fixed = {
        "sizes": _sizes(vocab, seen, how, allowed, nodes, columns),
        "enable_fp_fusion": False,  # XLA's Triton does not fuse: equal bits in Pallas
    }
    chosen = {"width": width, "tau": tau, "is_scored": is_scored}
    group_lanes = triton.next_power_of_2(groups)
    _tiles_kernel[(num_tiles, R)](
        *(rows, asked, stream, peaks, masses, winners, bad, notes, scores, R),
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    _border_kernel[(min(tiles.row_programs, triton.cdiv(groups, tiles.at_once)), R)](
        *(rows, asked, peaks, masses, near, notes),
        group_lanes=group_lanes,
        at_once=tiles.at_once,
        sampled=tiles.sampled,
        listed=tiles.listed,
        num_warps=tiles.row_warps,
        **fixed,
    )
    _rows_kernel[(min(tiles.programs, num_tiles), R)](
        *(rows, asked, stream, peaks, masses, winners, bad, notes),
        *(ids, weights, is_finite, scores, R),
        num_tiles=num_tiles,
        tile_lanes=triton.next_power_of_2(num_tiles * width),
        group_lanes=group_lanes,
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
        **chosen,
    )
    return ids, weights, is_finite, scores


def _sizes(
    vocab: int,
    seen: Any,
    sampling: Any,
    allowed: Tensor | None,
    nodes: int,
    columns: Tensor | None,
) -> tuple[int, ...]:
    """The sizes of the arrays, in the order in which `scores` reads them."""
    num_bias = sampling.bias_ids.shape[1]
    return (
        *(vocab, seen.path.shape[1], sampling.stop_ids.shape[1], num_bias),
        *(triton.next_power_of_2(max(num_bias, 1)), int(allowed is not None), nodes),
        *(int(columns is not None), seen.counts.shape[1]),
    )


@triton.jit
def _tiles_kernel(
    rows,
    asked,
    stream,
    peaks_at,
    masses_at,
    winners_at,
    bad_at,
    notes_at,
    scores_at,
    num_rows,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    """One program per tile and row: its best tokens, or what its groups hold before any noise."""
    tile, row = tl.program_id(0), tl.program_id(1)
    vocab: tl.constexpr = sizes[0]
    num_tiles, num_groups = tl.num_programs(0), tl.cdiv(vocab, 2 * PAIRS)
    wish = wish_of(rows, asked, row, sizes)
    request, slot, noise, temperature, is_filtered, has_penalty, is_short, biases = wish
    group = tile * groups + tl.arange(0, groups)
    pairs, ids = ids_of(group)
    raw, x = scores_of(ids, rows, asked, row, wish, sizes)
    tl.store(bad_at + row * num_tiles + tile, has_bad(raw).to(tl.int32))
    if tile == 0:
        note = tl.arange(0, NOTES)
        tl.store(notes_at + row * NOTES + note, note * 0)
    at = row * num_groups + group
    if is_filtered:
        keys = tl.where(ids < vocab, key_of(x), LOWEST)
        store_groups(peaks_at + at, masses_at + at, group < num_groups, x, keys, 1.0)
    else:
        if is_scored:
            store_scores(scores_at, x, ids, rows, row, sizes)
        if temperature > 0:
            x = x + noise_of_words(words_at(noise, stream, pairs, ids, rows, sizes))
        keys = tl.where(ids < vocab, key_of(x), LOWEST)
        if tau is not None:
            sharpness = sharpness_of(temperature, tau)
            store_groups(peaks_at + at, masses_at + at, group < num_groups, x, keys, sharpness)
        keys_at = winners_at + (row * num_tiles + tile) * width
        store_first(keys, ids, keys_at, keys_at + num_rows * num_tiles * width, width)


@triton.jit
def _border_kernel(
    rows,
    asked,
    peaks_at,
    masses_at,
    near_at,
    notes_at,
    group_lanes: tl.constexpr,
    at_once: tl.constexpr,
    sampled: tl.constexpr,
    listed: tl.constexpr,
    sizes: tl.constexpr,
):
    """One program per share of a row with a filter; the last to arrive finds the border."""
    share, row = tl.program_id(0), tl.program_id(1)
    wish = wish_of(rows, asked, row, sizes)
    request, slot, noise, temperature, is_filtered, has_penalty, is_short, biases = wish
    if is_filtered:
        num_groups = tl.cdiv(sizes[0], 2 * PAIRS)
        group = tl.arange(0, group_lanes)
        at, inside = row * num_groups + group, group < num_groups
        peaks = tl.load(peaks_at + at, mask=inside, other=LOWEST)
        masses = tl.load(masses_at + at, mask=inside, other=0.0)
        bounds = bounds_of(asked, request, peaks, masses, sizes)
        most, weight, highest, total, low, high = bounds
        source = rows, asked, row, wish
        memory = peaks_at + row * num_groups, near_at + row * (2 * listed), notes_at + row * NOTES
        if high > KEY_OF_NOTHING:
            low, high = guess(peaks, masses, bounds, source, sampled, sizes)
            is_flat = tl.sum((peaks >= low).to(tl.int32)) * 2 > num_groups
            list_near(low, high, highest, is_flat, share, source, memory, at_once, listed, sizes)
        tl.debug_barrier()  # all of this program's words are in memory
        if tl.atomic_add(memory[2] + 5, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            border, limit = find_border(low, high, bounds, source, memory, at_once, listed, sizes)
            tl.store(memory[2], border)
            tl.store(memory[2] + 1, limit)
            tl.store(memory[2] + 2, key_of(highest))


@triton.jit
def _rows_kernel(
    rows,
    asked,
    stream,
    peaks_at,
    masses_at,
    winners_at,
    bad_at,
    notes_at,
    ids_at,
    weights_at,
    finite_at,
    scores_at,
    num_rows,
    num_tiles: tl.constexpr,
    tile_lanes: tl.constexpr,
    group_lanes: tl.constexpr,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
    is_scored: tl.constexpr,
):
    """One program per share of a row: the best tokens of its tiles, where they have no noise yet.

    One of a row's programs joins the tiles, the last to arrive where all have something to do.
    """
    share, row = tl.program_id(0), tl.program_id(1)
    num_groups = tl.cdiv(sizes[0], 2 * PAIRS)
    wish = wish_of(rows, asked, row, sizes)
    request, slot, noise, temperature, is_filtered, has_penalty, is_short, biases = wish
    sharpness = 1.0 if tau is None else sharpness_of(temperature, tau)
    notes_at += row * NOTES
    peaks_at, masses_at = peaks_at + row * num_groups, masses_at + row * num_groups
    winners_at += row * num_tiles * width
    others = num_rows * num_tiles * width  # from the winners' keys to their ids
    is_last = share == 0
    if is_filtered:
        highest = score_of(tl.load(notes_at + 2))
        support = tl.load(notes_at), tl.load(notes_at + 1), highest, tl.load(asked[3] + request)
        source = rows, asked, row, wish
        best = key_of(highest - 3)  # the first token stays, and no noise lies below -3
        for tile in range(share, num_tiles, tl.num_programs(0)):
            into = (
                peaks_at,
                masses_at,
                winners_at + tile * width,
                winners_at + others + tile * width,
                scores_at,
            )
            key = choose_in_tile(
                tile,
                best,
                support,
                source,
                stream,
                sharpness,
                into,
                groups,
                sizes,
                width,
                tau,
                is_scored,
            )
            best = tl.maximum(best, key)
        tl.debug_barrier()  # all of this program's words are in memory
        arrived = tl.atomic_add(notes_at + 6, 1, sem="acq_rel")
        is_last = arrived == tl.num_programs(0) - 1
    if is_last:
        place = tl.arange(0, tile_lanes)
        bad = tl.load(bad_at + row * num_tiles + place, mask=place < num_tiles, other=0)
        tl.store(finite_at + row, tl.max(bad) == 0)
        inside = place < num_tiles * width
        # Volatile, past the cache of the multiprocessor: other programs have written them.
        keys = tl.load(winners_at + place, mask=inside, other=LOWEST, volatile=True)
        ids = tl.load(winners_at + others + place, mask=inside, other=HIGHEST, volatile=True)
        highest, norm = score_of(tl.max(keys)), 0.0
        if tau is not None:
            group = tl.arange(0, group_lanes)
            inside = group < num_groups
            peaks = tl.load(peaks_at + group, mask=inside, other=LOWEST, volatile=True)
            masses = tl.load(masses_at + group, mask=inside, other=0.0, volatile=True)
            norm = log(total_of(peaks, masses, highest, sharpness))
        out = ids_at + row * width, weights_at + row * width
        key, winner = first_token(keys, ids)
        store_token(out, 0, key, winner, highest, norm, sharpness, rows, sizes, tau)
        for rank in range(1, width):
            key, winner = next_token(keys, ids, key, winner)
            store_token(out, rank, key, winner, highest, norm, sharpness, rows, sizes, tau)
