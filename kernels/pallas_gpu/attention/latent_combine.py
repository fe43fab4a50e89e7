"""Partial results of `latent_attention`: one per split, and their combination (Pallas, Triton
backend).

Splits are combined in position order, regardless of the program that computed them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from kernels.latent_tiles import COMBINED, COMBINED_COLUMNS, COMBINED_HEADS
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE
from kernels.pallas_gpu.attention.split_kv import SplitPartials


class LatentBounds(NamedTuple):
    """Positions [low, high) that a request or a program attends to, its first split, and the end of
    its splits.
    """

    low: Any
    high: Any
    base: Any
    end: Any


def split_tiles(i, work):
    """Returns the tiles of the split that contains tile `i`."""
    near, far = work.split // work.tile, work.far_split // work.tile
    return near + (i * work.tile >= work.near).astype(jnp.int32) * (far - near)


def split_of(i, work):
    """Returns the split that contains tile `i`."""
    near, far = work.near // work.tile, work.far_split // work.tile
    more = lax.div(jnp.maximum(i - near, 0), far)
    return lax.div(jnp.minimum(i, near), work.split // work.tile) + more


def request_splits(first_ref, until_ref, start, stop, capacity, work):
    """Returns the bounds of a request with rows [start, stop)."""
    row = start + lax.iota(jnp.int32, pl.next_power_of_2(work.max_rows))
    is_row, most = row < stop, 2**31 - 1
    # A row that is not read gets an index in bounds, for the interpreter.
    at = jnp.minimum(row, first_ref.shape[0] - 1)
    first = pltriton.load(first_ref.at[at], mask=is_row, other=most)
    until = pltriton.load(until_ref.at[at], mask=is_row, other=most)
    low = jnp.min(jnp.minimum(first, until))
    until = jnp.max(jnp.where(is_row, until, 0))
    high = jnp.minimum(until + work.nodes, capacity)
    base = split_of(lax.div(low, work.tile), work)
    end = jnp.where(low < high, split_of(pl.cdiv(high, work.tile) - 1, work) + 1, base)
    return LatentBounds(low=low, high=high, base=base, end=end)


def tile_range(bounds, share, work):
    """Returns the first tile of a program, and the end: the splits that begin in its share."""
    begin = lax.div(bounds.low, work.tile)
    end = jnp.where(bounds.low < bounds.high, pl.cdiv(bounds.high, work.tile), begin)
    each = pl.cdiv(end - begin, work.sharing)
    first = _split_end(begin + share * each, work)
    until = _split_end(begin + (share + 1) * each, work)
    return jnp.where(share == 0, begin, jnp.minimum(first, end)), jnp.minimum(until, end)


def _split_end(i, work):
    """Returns the first tile from `i` on with which a split begins."""
    tiles = split_tiles(i, work)
    return lax.div(i + tiles - 1, tiles) * tiles


def combine(
    parts: SplitPartials,
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    capacity: int,
    dtype: DTypeLike,
    work: Any,
    interpret: bool,
) -> Float[jax.Array, "R Hq r"]:
    """Combines the partial results of `attend_latent` into its outputs.

    Args:
      parts: Partial results of all splits.
      row_starts, first, until: See `attend_latent`.
      capacity: Positions of a page table.
      dtype: Type of the outputs.
      work: Compile-time settings.
      interpret: Run on a CPU.
    """
    _, rank, R, Hq = parts.sums.shape
    # The interpreter takes time for each program.
    width = pl.next_power_of_2(rank) if interpret else COMBINED_COLUMNS
    return pl.pallas_call(
        partial(_combine_kernel, width=width, capacity=capacity, work=work),
        grid=(pl.cdiv(rank, width), pl.cdiv(Hq, COMBINED_HEADS), R),
        out_shape=jax.ShapeDtypeStruct((R, Hq, rank), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="latent_combine",
    )(parts, row_starts, first, until)


def _combine_kernel(parts, starts_ref, first_ref, until_ref, out_ref, *, width, capacity, work):
    """One program per block of columns, block of heads, and row."""
    block, of_heads, row = (pl.program_id(axis) for axis in range(3))
    _, Hq, rank = out_ref.shape
    column = (block * width + lax.iota(jnp.int32, width))[:, None]
    head = of_heads * COMBINED_HEADS + lax.iota(jnp.int32, COMBINED_HEADS)
    keep, requests = (column < rank) & (head < Hq)[None, :], starts_ref.shape[0] - 1

    def combined():
        number = lax.iota(jnp.int32, pl.next_power_of_2(requests))
        at = jnp.minimum(number + 1, requests)
        ends = pltriton.load(starts_ref.at[at], mask=number < requests, other=2**31 - 1)
        request = jnp.sum((ends <= row).astype(jnp.int32))
        start, stop = starts_ref[request], starts_ref[request + 1]
        bounds = request_splits(first_ref, until_ref, start, stop, capacity, work)
        return _combined(parts, bounds.end - bounds.base, row, column, head, keep)

    nothing = jnp.zeros(keep.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    value, total = lax.cond(row < starts_ref[requests], combined, lambda: nothing)
    out = (value / jnp.maximum(total, 1e-30)[None, :]).astype(out_ref.dtype)
    # An output that is not written gets an index out of bounds, for the interpreter.
    at = out_ref.at[row, head[None, :], jnp.where(keep, column, rank)]
    pltriton.store(at, out, mask=keep)


def _combined(parts, count, row, column, head, keep):
    """Combines the splits of some (row, head) pairs.

    Several splits are loaded per step, so that a load does not wait for the previous one.
    """
    # A number that is not read gets an index in bounds, for the interpreter.
    column, head = jnp.where(keep, column, 0), jnp.minimum(head, parts.peaks.shape[2] - 1)

    def load(number):
        is_one = number < count
        number = jnp.minimum(number, count - 1)
        at = parts.sums.at[number, column, row, head[None, :]]
        value = pltriton.load(at, mask=keep & is_one, other=0.0)
        peak = jnp.where(is_one, pltriton.load(parts.peaks.at[number, row, head]), NEGATIVE)
        total = jnp.where(is_one, pltriton.load(parts.totals.at[number, row, head]), 0.0)
        return value, peak, total

    def add(step, sums):
        for more in [load(step * COMBINED + member) for member in range(COMBINED)]:
            sums = _merged(sums, more)
        return sums

    zeros = jnp.zeros(head.shape, jnp.float32)
    nothing = (jnp.zeros(keep.shape, jnp.float32), zeros + NEGATIVE, zeros)
    value, _, total = lax.fori_loop(0, pl.cdiv(count, COMBINED), add, nothing)
    return value, total


def _merged(sums, more):
    """Merges two accumulators of some (row, head) pairs."""
    (value, peak, total), (more_value, more_peak, more_total) = sums, more
    highest = jnp.maximum(peak, more_peak)
    ours, theirs = jnp.exp2(peak - highest), jnp.exp2(more_peak - highest)
    value = fold(value, more_value, ours[None, :], theirs[None, :])
    return value, highest, fold(total, more_total, ours, theirs)


def fold(one, more, ours, theirs):
    """Adds two sums with their factors."""
    return one * ours + more * theirs
