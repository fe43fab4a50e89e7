"""The choice of tokens from logits, in Triton.

Two kernels. The first looks at tiles of the vocabulary, all at once: it finds the best tokens of a
tile or, where a row has a filter, what its groups of tokens hold. The second has a program a row:
it joins the tiles or, where a row has a filter, searches for the border of the row's support in the
groups that can hold it, and chooses among them. What a row does not ask for it does not pay for.

Scores are compared as whole numbers in their order (`_key`), and sums are of whole numbers, so the
results depend on no order and no tile. What must stay equal in the Pallas twin is listed in
`kernels/__init__.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.tiles import SamplingTiles
from kernels.triton_gpu.noise import gumbel, log
from kernels.triton_gpu.scores import (
    HIGHEST,
    LOWEST,
    PAIRS,
    before_all,
    ids_of,
    key_of,
    next_token,
    score_of,
    scores_of,
    sharpness_of,
    store_groups,
    total_of,
    wish_of,
)
from kernels.triton_gpu.support import find_support, mass_of_support, next_in_support

GROUP = 2 * PAIRS.value
MOST_WIDTH = 8


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
    ids, _, is_finite = _ranked(
        *(logits, seen, positions, sampling, request, allowed),
        *(positions, stream, 1, None, 0, tiles),
    )
    return ids[:, 0], is_finite


def rank(
    logits: Float[Tensor, "B k vocab"],
    seen: Any,
    positions: Int[Tensor, " B"],
    sampling: Any,
    keys: Int[Tensor, " B"],
    stream: int,
    width: int,
    *,
    tau: float,
    tiles: SamplingTiles,
) -> tuple[Int[Tensor, "B k width"], Float[Tensor, "B k width"]]:
    """The ids and weights of `shared.spec.sampling.rank`, of at most `MOST_WIDTH` children.

    Args:
      logits, seen, positions, sampling, keys, stream, width: As in the specification.
      tau: Softness of the weights where there is noise.
      tiles: How the work is cut.
    """
    B, k, _ = logits.shape
    ids, weights, _ = _ranked(
        *(logits.flatten(0, 1), seen, positions, sampling, positions, None),
        *(keys, stream, width, tau, k, tiles),
    )
    return ids.view(B, k, width), weights.view(B, k, width)


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
    tau: float | None,
    nodes: int,
    tiles: SamplingTiles,
) -> tuple[Int[Tensor, "R width"], Float[Tensor, "R width"], Bool[Tensor, " R"]]:
    """The best tokens of each row, their weights, and whether its logits are finite.

    Args:
      tau: None: there are no weights.
      nodes: Rows of a request, whose positions and keys are its own; 0: `request` names it.
    """
    (R, vocab), how, new = logits.shape, sampling, logits.new_empty
    groups = triton.cdiv(vocab, GROUP)
    num_tiles = triton.cdiv(groups, tiles.groups)
    ints = {"dtype": torch.int32}
    peaks, masses, members = new(R, groups, **ints), new(R, groups), new(R, groups, **ints)
    winners, bad = new(2, R, num_tiles, width, **ints), new(R, num_tiles, **ints)
    ids, weights, is_finite = new(R, width, **ints), new(R, width), new(R, dtype=torch.bool)
    mask = logits if allowed is None else allowed
    path = seen.path if seen.path.shape[1] else seen.slots  # pointers that nothing reads
    on_path = seen.on_path if seen.path.shape[1] else seen.slots
    rows = (logits, request, positions, keys, seen.slots, seen.counts, path, on_path, mask)
    rows = tuple(
        x.contiguous() for x in rows
    )  # the path of a draft level is a part of a longer one
    asked = (
        *(how.temperature, how.top_p, how.top_k, how.min_p, how.seed),
        *(how.presence, how.frequency, how.repetition, how.min_length),
        *(how.stop_ids, how.bias_ids, how.bias_values),
    )
    fixed = {
        "sizes": _sizes(vocab, seen, how, allowed, nodes, tiles.at_once),
        "width": width,
        "tau": tau,
        "enable_fp_fusion": False,  # XLA's Triton does not fuse: equal bits in Pallas
    }
    _tiles_kernel[(num_tiles, R)](
        *(rows, asked, stream, peaks, masses, winners, bad, R),
        groups=tiles.groups,
        num_warps=tiles.warps,
        **fixed,
    )
    _rows_kernel[(R,)](
        *(rows, asked, stream, peaks, masses, winners, bad, members, ids, weights, is_finite, R),
        num_tiles=num_tiles,
        tile_lanes=triton.next_power_of_2(num_tiles * width),
        group_lanes=triton.next_power_of_2(groups),
        num_warps=tiles.row_warps,
        **fixed,
    )
    return ids, weights, is_finite


def _sizes(
    vocab: int, seen: Any, sampling: Any, allowed: Tensor | None, nodes: int, at_once: int
) -> tuple[int, ...]:
    """The sizes of the arrays, in the order in which `scores` reads them."""
    num_bias = sampling.bias_ids.shape[1]
    return (
        *(vocab, seen.path.shape[1], sampling.stop_ids.shape[1], num_bias),
        *(triton.next_power_of_2(max(num_bias, 1)), int(allowed is not None), nodes, at_once),
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
    num_rows,
    groups: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
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
    tl.store(bad_at + row * num_tiles + tile, tl.max(tl.where(tl.abs(raw) < float("inf"), 0, 1)))
    at = row * num_groups + group
    if is_filtered:
        keys = tl.where(ids < vocab, key_of(x), LOWEST)
        store_groups(peaks_at + at, masses_at + at, group < num_groups, x, keys, 1.0)
    else:
        if temperature > 0:
            x = x + gumbel(noise[0], noise[1], stream, pairs)
        keys = tl.where(ids < vocab, key_of(x), LOWEST)
        if tau is not None:
            sharpness = sharpness_of(temperature, tau)
            store_groups(peaks_at + at, masses_at + at, group < num_groups, x, keys, sharpness)
        key, winner = before_all()
        place = (row * num_tiles + tile) * width
        for rank in range(width):
            key, winner = next_token(keys, ids, key, winner)
            tl.store(winners_at + place + rank, key)
            tl.store(winners_at + num_rows * num_tiles * width + place + rank, winner)


@triton.jit
def _rows_kernel(
    rows,
    asked,
    stream,
    peaks_at,
    masses_at,
    winners_at,
    bad_at,
    members_at,
    ids_at,
    weights_at,
    finite_at,
    num_rows,
    num_tiles: tl.constexpr,
    tile_lanes: tl.constexpr,
    group_lanes: tl.constexpr,
    sizes: tl.constexpr,
    width: tl.constexpr,
    tau: tl.constexpr,
):
    """One program per row: its best tokens, from those of the tiles or from its support."""
    vocab: tl.constexpr = sizes[0]
    row, num_groups = tl.program_id(0), tl.cdiv(vocab, 2 * PAIRS)
    wish = wish_of(rows, asked, row, sizes)
    request, slot, noise, temperature, is_filtered, has_penalty, is_short, biases = wish
    place = tl.arange(0, tile_lanes)
    bad = tl.load(bad_at + row * num_tiles + place, mask=place < num_tiles, other=0)
    tl.store(finite_at + row, tl.max(bad) == 0)
    group = tl.arange(0, group_lanes)
    at, last = row * num_groups + group, num_groups
    if tau is None:
        last = tl.where(is_filtered, num_groups, 0)
    peaks = tl.load(peaks_at + at, mask=group < last, other=LOWEST)
    masses = tl.load(masses_at + at, mask=peaks > LOWEST, other=0.0)
    sharpness = 1.0 if tau is None else sharpness_of(temperature, tau)
    out = ids_at + row * width, weights_at + row * width
    key, winner = before_all()
    if is_filtered:
        source = (rows, asked, row, wish, members_at + row * num_groups)
        support = find_support(peaks, masses, group, source, sizes)
        key, winner = next_in_support(support, source, stream, key, winner, sizes)
        best, norm = score_of(key), 0.0
        if tau is not None:
            norm = log(mass_of_support(support, source, stream, best, sharpness, sizes))
        _store(out, 0, key, winner, best, norm, sharpness, vocab, tau)
        for rank in range(1, width):
            key, winner = next_in_support(support, source, stream, key, winner, sizes)
            _store(out, rank, key, winner, best, norm, sharpness, vocab, tau)
    else:
        mine, inside = row * num_tiles * width + place, place < num_tiles * width
        keys = tl.load(winners_at + mine, mask=inside, other=LOWEST)
        theirs = mine + num_rows * num_tiles * width
        ids = tl.load(winners_at + theirs, mask=inside, other=HIGHEST)
        best, norm = score_of(tl.max(keys)), 0.0
        if tau is not None:
            norm = log(total_of(peaks, masses, best, sharpness))
        for rank in range(width):
            key, winner = next_token(keys, ids, key, winner)
            _store(out, rank, key, winner, best, norm, sharpness, vocab, tau)


@triton.jit
def _store(out, rank, key, winner, best, norm, sharpness, vocab: tl.constexpr, tau: tl.constexpr):
    """Stores one token of a row, and its weight."""
    tl.store(out[0] + rank, tl.minimum(winner, vocab - 1))
    if tau is not None:
        tl.store(out[1] + rank, (score_of(key) - best) * sharpness - norm)
