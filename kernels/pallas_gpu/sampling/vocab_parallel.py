"""Vocab-parallel sampling: merges the candidates of all vocabulary shards (Pallas, Triton backend).

A row's best tokens are the best of all ranks' candidates. Its sum of exponentials is the integer
sum of the ranks' sums. For rows with a filter all logits are gathered, because no rank alone can
compute the threshold.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int, Int32

from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, load_words, store_words
from kernels.pallas_gpu.collectives.flag_protocol import (
    BLOCK_UNITS,
    BLOCK_WARPS,
    MOST_BLOCKS,
    PeerView,
    load_block_words,
    set_flags,
    store_block_words,
    wait_flag,
)
from kernels.pallas_gpu.sampling.gumbel_noise import log
from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    LOWEST,
    PAIRS,
    add_halves,
    carried,
    no_sum,
    number_of,
    score_of,
    sharpness_of,
    store_sorted,
    terms_of,
)

GROUP = 2 * PAIRS


def rows_with_filters(
    sampling: Any, request: Int[jax.Array, "named ..."], rows: int, nodes: int, vocab: int
) -> Int32[jax.Array, " R_and_1"]:
    """Returns the rows with a filter, in order; the last entry is their number.

    XLA compiles it to kernels.

    Args:
      sampling, request: Same as in `sampling.choose`.
      rows: Number of all rows.
      nodes: Rows per request; 0: `request` maps rows to requests.
      vocab: Tokens of all ranks.
    """
    cuts = (sampling.top_p < 1) | (sampling.top_k < vocab) | (sampling.min_p > 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    is_one = (cuts & (sampling.temperature > 0))[row // nodes if nodes else request]
    # Compares all pairs of the few rows: a scan or a scatter would add kernels.
    place = (is_one & (row < row[:, None])).sum(axis=1, dtype=jnp.int32)
    is_there = is_one & (place == row[:, None])
    found = jnp.where(is_there, row, 0).sum(axis=1, dtype=jnp.int32)
    return jnp.concatenate([found, is_one.sum(dtype=jnp.int32)[None]])


def gathered_rows(
    values: Float[jax.Array, "R share"],
    rows: Int32[jax.Array, " R_and_1"],
    gathers: Sequence[AllGatherArgs],
) -> Float[jax.Array, "R places"]:
    """All-gathers the columns of all ranks for some rows; other rows are undefined.

    Args:
      values: This rank's columns, in float32.
      rows: Rows to gather, from `rows_with_filters`, the same on all ranks.
      gathers: All-gathers of the step, among which the rows are divided.

    Raises:
      ValueError: A call exceeds the capacity of the symmetric buffer.
    """
    (R, share), boxes = values.shape, gathers[0].boxes
    most = pl.cdiv(R, len(gathers))
    if 4 * most * share + 8 > boxes.block_bytes:
        raise ValueError(
            f"an all-gather sends at most {boxes.block_bytes} bytes, got {4 * most * share}"
        )
    out: list[Any] = []
    for number, gather in enumerate(gathers):
        out = pl.pallas_call(
            functools.partial(_gather_kernel, boxes=boxes, first=number * most, most=most),
            grid=(min(pl.cdiv(most * share, BLOCK_UNITS), MOST_BLOCKS),),
            out_shape=(jax.ShapeDtypeStruct((R, boxes.ranks * share), values.dtype),),
            input_output_aliases={3: 0} if out else {},
            compiler_params=pltriton.CompilerParams(num_warps=BLOCK_WARPS, num_stages=1),
            name="gathered_rows",
        )(values, rows, gather.place, *out)
    return out[0]


def _gather_kernel(own_ref, rows_ref, place_ref, *outs, boxes, first, most):
    """Stores this program's rows in all symmetric buffers and copies those of the other ranks."""
    out_ref, (R, share) = outs[-1], own_ref.shape
    programs = min(pl.cdiv(most * share, BLOCK_UNITS), MOST_BLOCKS)
    peers, block = PeerView.read(place_ref, boxes, programs), pl.program_id(0)
    count = jnp.minimum(jnp.maximum(rows_ref[R] - first, 0), most)
    steps = lax.div(count * share + programs * BLOCK_UNITS - 1, jnp.int32(programs * BLOCK_UNITS))
    base = boxes.blocks_at + (peers.number & 1) * (boxes.ranks * boxes.block_bytes)

    def places(step):
        place = (step * programs + block) * BLOCK_UNITS + lax.iota(jnp.int32, BLOCK_UNITS)
        is_one = place < count * share
        at = jnp.minimum(first + lax.div(place, share), R)
        row = pltriton.load(rows_ref.at[at], mask=is_one, other=0)
        return place, row, lax.rem(place, share), is_one

    def put(step, kept):
        place, row, word, is_one = places(step)
        bits = load_words(own_ref, row, word, is_one)
        bits = store_block_words(bits, base + peers.rank * boxes.block_bytes, place, is_one, peers)
        store_words(out_ref, row, peers.rank * share + word, bits, is_one)
        return kept | bits

    kept = lax.fori_loop(0, steps, put, jnp.zeros((BLOCK_UNITS,), jnp.int32))
    flag = boxes.flags_at + block * (boxes.ranks * 4)
    after = set_flags(flag, kept, peers)
    peers = peers.counted()
    for distance in range(1, boxes.ranks):
        peer = peers.rank ^ distance
        has_arrived = wait_flag(peer, flag, after, peers)

        def take(step, done, peer=peer, has_arrived=has_arrived):
            place, row, word, is_one = places(step)
            at = base + peer * boxes.block_bytes
            bits = load_block_words(at, place, jnp.where(is_one, has_arrived, 0), peers)
            store_words(out_ref, row, peer * share + word, bits, is_one)
            return done

        lax.fori_loop(0, steps, take, 0)


def sum_exp(
    left: Int32[jax.Array, "R words_of_all"],
    peaks: Int32[jax.Array, "R groups"],
    masses: Float[jax.Array, "R groups"],
    temperature: Float[jax.Array, " B"],
    first: Int32[jax.Array, "1"],
    *,
    share: int,
    ranks: int,
    width: int,
    tau: float,
    nodes: int,
    interpret: bool = False,
) -> Int32[jax.Array, "R 3"]:
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
      interpret: Run on a CPU.
    """
    how = {"groups": share // GROUP, "ranks": ranks, "width": width, "tau": tau, "nodes": nodes}
    return pl.pallas_call(
        functools.partial(_totals_kernel, **how),
        grid=(len(left),),
        out_shape=jax.ShapeDtypeStruct((len(left), 3), jnp.int32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sum_exp",
    )(left, peaks, masses, temperature, first)


def _totals_kernel(
    left_ref,
    peaks_ref,
    masses_ref,
    temperature_ref,
    first_ref,
    found_ref,
    *,
    groups,
    ranks,
    width,
    tau,
    nodes,
):
    row, most = pl.program_id(0), peaks_ref.shape[1]
    keys, _ = _load_candidates(left_ref, row, ranks, width)
    own = lax.iota(jnp.int32, pl.next_power_of_2(groups))
    group = lax.div(first_ref[0], GROUP) + own
    inside = (own < groups) & (group < most)
    at = jnp.where(inside, group, most)  # outside the array, for the interpreter
    peaks = pltriton.load(peaks_ref.at[row, at], mask=inside, other=LOWEST)
    masses = pltriton.load(masses_ref.at[row, at], mask=inside, other=0.0)
    sharpness = sharpness_of(temperature_ref[lax.div(row, nodes)], tau)
    terms = terms_of(peaks, masses, score_of(jnp.max(keys)), sharpness)
    for place, word in enumerate(add_halves(no_sum(), terms)):
        found_ref[row, place] = word


def merge_topk(
    left: Int32[jax.Array, "R words_of_all"],
    totals: Int32[jax.Array, "R totals_of_all"] | None,
    temperature: Float[jax.Array, " B"],
    columns: Int[jax.Array, " vocab"] | None,
    *,
    vocab: int,
    ranks: int,
    width: int,
    tau: float | None,
    nodes: int,
    interpret: bool = False,
) -> tuple[Int32[jax.Array, "R width"], Float[jax.Array, "R width"], Bool[jax.Array, " R"]]:
    """Merges the candidates of all ranks into best tokens and weights; checks for finite logits.

    Args:
      left: Keys and ids of each rank's best tokens of a row, and whether some logit is not finite.
        Rows with a filter are complete on every rank.
      totals: Result of `sum_exp` of each rank; None: no weights are returned.
      temperature: Temperature of each request.
      columns: Map from the draft vocabulary to the target's tokens.
      vocab: Tokens of all ranks.
      ranks, width, tau, nodes: See `sum_exp`; `tau` and `nodes` are ignored without `sum_exp`.
      interpret: Run on a CPU.
    """
    R, how = len(left), {"ranks": ranks, "width": width, "tau": tau, "nodes": nodes}
    array = jax.ShapeDtypeStruct
    ids, weights, is_finite = pl.pallas_call(
        functools.partial(_join_kernel, vocab=vocab, **how),
        grid=(R,),
        out_shape=(
            array((R, width), jnp.int32),
            array((R, width), jnp.float32),
            array((R,), jnp.int32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_topk",
    )(left, totals, temperature, columns)
    return ids, weights, is_finite != 0


def _join_kernel(
    left_ref,
    totals_ref,
    temperature_ref,
    columns_ref,
    ids_ref,
    weights_ref,
    finite_ref,
    *,
    vocab,
    ranks,
    width,
    tau,
    nodes,
):
    row, rank = pl.program_id(0), lax.iota(jnp.int32, pl.next_power_of_2(ranks))
    keys, ids = _load_candidates(left_ref, row, ranks, width)
    words = 2 * width + 1

    def of_ranks(ref, size, place):
        at = jnp.where(rank < ranks, rank * size + place, ref.shape[1])
        return pltriton.load(ref.at[row, at], mask=rank < ranks, other=0)

    finite_ref[row] = 1 - jnp.max(of_ranks(left_ref, words, 2 * width))
    highest, norm, sharpness = score_of(jnp.max(keys)), 0.0, 1.0
    if totals_ref is not None:
        total = carried(*(of_ranks(totals_ref, 3, place).sum() for place in range(3)))
        norm = log(number_of(total) * (2 * PAIRS))
        sharpness = sharpness_of(temperature_ref[lax.div(row, nodes)], tau)

    def store(place, key, winner):
        token = jnp.minimum(winner, vocab - 1)
        ids_ref[row, place] = token if columns_ref is None else columns_ref[token]
        if totals_ref is not None:
            weights_ref[row, place] = (score_of(key) - highest) * sharpness - norm

    store_sorted(keys, ids, width, store)


def _load_candidates(left_ref, row, ranks, width):
    """Loads keys and ids of all ranks' candidates of a row."""
    place = lax.iota(jnp.int32, pl.next_power_of_2(ranks * width))
    inside = place < ranks * width
    at = lax.div(place, width) * (2 * width + 1) + lax.rem(place, width)
    outside = left_ref.shape[1]
    keys = pltriton.load(
        left_ref.at[row, jnp.where(inside, at, outside)], mask=inside, other=LOWEST
    )
    at = jnp.where(inside, at + width, outside)
    return keys, pltriton.load(left_ref.at[row, at], mask=inside, other=HIGHEST)
