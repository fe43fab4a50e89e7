"""Vocab-parallel sampling: merges the candidates of all vocabulary shards (Triton).

A row's best tokens are the best of all ranks' candidates. Its sum of exponentials is the integer
sum of the ranks' sums. For rows with a filter all logits are gathered, because no rank alone can
compute the threshold.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, in_words, number_of
from kernels.triton_gpu.collectives.flag_protocol import (
    BLOCK_UNITS,
    BLOCK_WARPS,
    MOST_BLOCKS,
    PeerLayout,
    max_polls_of,
    set_flags,
    wait_flag,
)
from kernels.triton_gpu.sampling.gumbel_noise import log
from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
    LOWEST,
    PAIRS,
    add_halves,
    carried,
    first_token,
    next_token,
    no_sum,
    score_of,
    sharpness_of,
    terms_of,
)
from kernels.triton_gpu.sampling.logits_processing import number_of as sum_of

GROUP = 2 * PAIRS.value


def rows_with_filters(
    sampling: Any, request: Int[Tensor, "named ..."], rows: int, nodes: int, vocab: int
) -> Int32[Tensor, " R_and_1"]:
    """Returns the rows with a filter, in order; the last entry is their number.

    Args:
      sampling, request: Same as in `sampling.choose`.
      rows: Number of all rows.
      nodes: Rows per request; 0: `request` maps rows to requests.
      vocab: Tokens of all ranks.
    """
    found = request.new_empty(rows + 1, dtype=torch.int32)
    filters = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    filters = [x.contiguous() for x in filters]
    _filtered_kernel[(1,)](
        *(request, *filters, found, rows, vocab),
        nodes=nodes,
        lanes=triton.next_power_of_2(rows),
        num_warps=4,
    )
    return found


@triton.jit
def _filtered_kernel(
    request_at,
    temperature_at,
    top_p_at,
    top_k_at,
    min_p_at,
    found_at,
    num_rows,
    vocab,
    nodes: tl.constexpr,
    lanes: tl.constexpr,
):
    row = tl.arange(0, lanes)
    is_row = row < num_rows
    request = row // nodes if nodes > 0 else tl.load(request_at + row, mask=is_row, other=0)
    is_sampled = tl.load(temperature_at + request, mask=is_row, other=0.0) > 0
    is_cut = tl.load(top_p_at + request, mask=is_row, other=1.0) < 1
    is_cut |= tl.load(top_k_at + request, mask=is_row, other=vocab) < vocab
    is_cut |= tl.load(min_p_at + request, mask=is_row, other=0.0) > 0
    is_one = is_row & is_sampled & is_cut
    place = tl.cumsum(is_one.to(tl.int32), 0) - 1
    tl.store(found_at + place, row, mask=is_one)
    tl.store(found_at + num_rows, tl.sum(is_one.to(tl.int32)))


def gathered_rows(
    values: Float[Tensor, "R share"],
    rows: Int32[Tensor, " R_and_1"],
    gathers: Sequence[AllGatherArgs],
) -> Float[Tensor, "R places"]:
    """All-gathers the columns of all ranks for some rows; other rows are undefined.

    Args:
      values: This rank's columns, in float32.
      rows: Rows to gather, from `rows_with_filters`, the same on all ranks.
      gathers: All-gathers of the step, among which the rows are divided.

    Raises:
      ValueError: A call exceeds the capacity of the symmetric buffer.
    """
    (R, share), boxes = values.shape, gathers[0].boxes
    most = triton.cdiv(R, len(gathers))
    if 4 * most * share + 8 > boxes.block_bytes:
        raise ValueError(
            f"an all-gather sends at most {boxes.block_bytes} bytes, got {4 * most * share}"
        )
    out = values.new_empty((R, boxes.ranks * share))
    given, to = in_words(values), out.view(torch.int32)
    if share % 2 == 0:
        given, to = given.view(torch.int64), to.view(torch.int64)
    share = given.shape[1]
    for number, gather in enumerate(gathers):
        _gather_kernel[(min(triton.cdiv(most * share, BLOCK_UNITS), MOST_BLOCKS),)](
            *(given, to, rows, gather.mail.place, gather.mail.clock, gather.call),
            *(R, number * most, most),
            box=PeerLayout.of(boxes),
            share=share,
            at_once=BLOCK_UNITS,
            num_warps=BLOCK_WARPS,
            launch_pdl=True,
        )
    return out


@triton.jit(do_not_specialize=["call", "first", "most", "num_rows"])
def _gather_kernel(
    own_at,
    out_at,
    rows_at,
    peers_at,
    clock_at,
    call,
    num_rows,
    first,
    most,
    box: tl.constexpr,
    share: tl.constexpr,
    at_once: tl.constexpr,
):
    """Stores this program's rows in all symmetric buffers and copies those of the other ranks."""
    gdc_wait()
    gdc_launch_dependents()
    number, block, programs = number_of(clock_at, call), tl.program_id(0), tl.num_programs(0)
    ranks: tl.constexpr = box.ranks
    rank = tl.load(peers_at + ranks).to(tl.int32)
    own = tl.load(peers_at + rank)
    max_polls = max_polls_of(peers_at, own, ranks)
    count = tl.minimum(tl.maximum(tl.load(rows_at + num_rows) - first, 0), most)
    total, lanes = count * share, tl.arange(0, at_once)
    base = box.blocks_at + (number & 1).to(tl.int64) * (ranks * box.block_bytes)
    kind: tl.constexpr = tl.pointer_type(own_at.dtype.element_ty)
    for start in range(block * at_once, total, programs * at_once):
        place = start + lanes
        is_one = place < total
        row = tl.load(rows_at + first + place // share, mask=is_one, other=0).to(tl.int64)
        value = tl.load(own_at + row * share + place % share, mask=is_one, other=0)
        for distance in tl.static_range(1, ranks):
            to = tl.load(peers_at + (rank ^ distance)) + base + rank * box.block_bytes
            tl.store(to.to(kind) + place, value, mask=is_one)
        at = out_at + row * (ranks * share) + rank * share + place % share
        tl.store(at, value, mask=is_one)
    flag = box.flags_at + block * (ranks * 4)
    sent = set_flags(flag, peers_at, rank, number, ranks)
    for distance in tl.static_range(1, ranks):
        peer = rank ^ distance
        has_arrived = wait_flag(peer, flag, own, number, max_polls, call, sent)
        received_at = (own + base + peer * box.block_bytes).to(kind)
        for start in range(block * at_once, total, programs * at_once):
            place = start + lanes
            is_one = place < total
            row = tl.load(rows_at + first + place // share, mask=is_one, other=0).to(tl.int64)
            got = tl.load(received_at + place, mask=is_one & has_arrived, other=-1, volatile=True)
            at = out_at + row * (ranks * share) + peer * share + place % share
            tl.store(at, got, mask=is_one)


def sum_exp(
    left: Int32[Tensor, "R words_of_all"],
    peaks: Int32[Tensor, "R groups"],
    masses: Float[Tensor, "R groups"],
    temperature: Float[Tensor, " B"],
    first: int,
    *,
    share: int,
    ranks: int,
    width: int,
    tau: float,
    nodes: int,
) -> Int32[Tensor, "R 3"]:
    """Computes a rank's sum of exponentials relative to a row's best token, as three integers.

    Args:
      left: Candidates of all ranks, see `merge_topk`.
      peaks, masses: Group sums of `sampling.leave`.
      temperature: Temperature of each request.
      first, share: First token of this rank's shard, and the shard's size.
      ranks: Number of ranks.
      width: Tokens per row.
      tau: Softness of the weights of sampled tokens.
      nodes: Rows per request.
    """
    found = left.new_empty((len(left), 3))
    _totals_kernel[(len(left),)](
        *(left, peaks, masses, temperature, first, found, peaks.shape[1]),
        nodes=nodes,
        ranks=ranks,
        width=width,
        lanes=triton.next_power_of_2(ranks * width),
        own_groups=share // GROUP,
        group_lanes=triton.next_power_of_2(share // GROUP),
        tau=tau,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return found


@triton.jit
def _totals_kernel(
    left_at,
    peaks_at,
    masses_at,
    temperature_at,
    first,
    found_at,
    num_groups,
    nodes: tl.constexpr,
    ranks: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    own_groups: tl.constexpr,
    group_lanes: tl.constexpr,
    tau: tl.constexpr,
):
    row = tl.program_id(0)
    keys, _ = _load_candidates(left_at, row, ranks, width, lanes)
    own = tl.arange(0, group_lanes)
    group = first // (2 * PAIRS) + own
    inside, at = (own < own_groups) & (group < num_groups), row * num_groups + group
    peaks = tl.load(peaks_at + at, mask=inside, other=LOWEST)
    masses = tl.load(masses_at + at, mask=inside, other=0.0)
    sharpness = sharpness_of(tl.load(temperature_at + row // nodes), tau)
    terms = terms_of(peaks, masses, score_of(tl.max(keys)), sharpness)
    whole, high, low = add_halves(no_sum(), terms)
    tl.store(found_at + row * 3, whole)
    tl.store(found_at + row * 3 + 1, high)
    tl.store(found_at + row * 3 + 2, low)


def merge_topk(
    left: Int32[Tensor, "R words_of_all"],
    totals: Int32[Tensor, "R totals_of_all"] | None,
    temperature: Float[Tensor, " B"],
    columns: Int[Tensor, " vocab"] | None,
    *,
    vocab: int,
    ranks: int,
    width: int,
    tau: float | None,
    nodes: int,
) -> tuple[Int32[Tensor, "R width"], Float[Tensor, "R width"], Bool[Tensor, " R"]]:
    """Merges the candidates of all ranks into best tokens and weights; checks for finite logits.

    Args:
      left: Keys and ids of each rank's best tokens of a row, and whether some logit is not finite.
        Rows with a filter are complete on every rank.
      totals: Result of `sum_exp` of each rank; None: no weights are returned.
      temperature: Temperature of each request.
      columns: Map from the draft vocabulary to the target's tokens.
      vocab: Tokens of all ranks.
      ranks, width, tau, nodes: See `sum_exp`; `tau` and `nodes` are ignored without `sum_exp`.
    """
    R = len(left)
    ids, is_finite = left.new_empty((R, width)), left.new_empty(R, dtype=torch.bool)
    weights = torch.empty_like(ids, dtype=torch.float32)
    _join_kernel[(R,)](
        *(left, left if totals is None else totals, temperature),
        *(left if columns is None else columns, ids, weights, is_finite, vocab),
        has_columns=columns is not None,
        is_weighed=totals is not None,
        nodes=nodes,
        ranks=ranks,
        width=width,
        lanes=triton.next_power_of_2(ranks * width),
        rank_lanes=triton.next_power_of_2(ranks),
        tau=tau,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return ids, weights, is_finite


@triton.jit
def _join_kernel(
    left_at,
    totals_at,
    temperature_at,
    columns_at,
    ids_at,
    weights_at,
    finite_at,
    vocab,
    has_columns: tl.constexpr,
    is_weighed: tl.constexpr,
    nodes: tl.constexpr,
    ranks: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    rank_lanes: tl.constexpr,
    tau: tl.constexpr,
):
    row = tl.program_id(0)
    keys, ids = _load_candidates(left_at, row, ranks, width, lanes)
    rank = tl.arange(0, rank_lanes)
    words: tl.constexpr = 2 * width + 1
    bad_at = left_at + (row * ranks + rank) * words + 2 * width
    bad = tl.load(bad_at, mask=rank < ranks, other=0)
    tl.store(finite_at + row, tl.max(bad) == 0)
    highest, norm, sharpness = score_of(tl.max(keys)), 0.0, 1.0
    if is_weighed:
        at, is_rank = totals_at + (row * ranks + rank) * 3, rank < ranks
        whole = tl.sum(tl.load(at, mask=is_rank, other=0))
        high = tl.sum(tl.load(at + 1, mask=is_rank, other=0))
        low = tl.sum(tl.load(at + 2, mask=is_rank, other=0))
        norm = log(sum_of(carried(whole, high, low)) * (2 * PAIRS))
        sharpness = sharpness_of(tl.load(temperature_at + row // nodes), tau)
    key, winner = first_token(keys, ids)
    for place in range(width):
        if place > 0:
            key, winner = next_token(keys, ids, key, winner)
        token = tl.minimum(winner, vocab - 1)
        if has_columns:
            token = tl.load(columns_at + token)
        tl.store(ids_at + row * width + place, token)
        if is_weighed:
            weight = (score_of(key) - highest) * sharpness - norm
            tl.store(weights_at + row * width + place, weight)


@triton.jit
def _load_candidates(left_at, row, ranks: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr):
    """Loads keys and ids of all ranks' candidates of a row."""
    place = tl.arange(0, lanes)
    at = left_at + (row * ranks + place // width) * (2 * width + 1) + place % width
    keys = tl.load(at, mask=place < ranks * width, other=LOWEST)
    ids = tl.load(at + width, mask=place < ranks * width, other=HIGHEST)
    return keys, ids
