"""Partial results of `latent_attention`: the units of a request, and their combination (Pallas,
Triton backend).

A unit is a tile, or a span if a request has enough spans for its programs. Units are combined in
position order, tiles into spans and spans into the total, regardless of the program that computed
them.
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

from kernels.latent_tiles import COMBINED, COMBINED_COLUMNS, PROGRAMS_PER_SPAN
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE
from kernels.pallas_gpu.attention.split_kv import SplitPartials


class LatentBounds(NamedTuple):
    """Positions [low, high) that a request or a program attends to, and its units.

    Attributes:
      tiles: Tiles of a unit.
      base, end: First unit, and the end.
    """

    low: Any
    high: Any
    tiles: Any
    base: Any
    end: Any


def request_units(first_ref, until_ref, start, stop, capacity, work):
    """Returns the bounds and units of a request with rows [start, stop)."""
    row = start + lax.iota(jnp.int32, pl.next_power_of_2(work.max_rows))
    is_row, most = row < stop, 2**31 - 1
    # A row that is not read gets an index in bounds, for the interpreter.
    at = jnp.minimum(row, first_ref.shape[0] - 1)
    first = pltriton.load(first_ref.at[at], mask=is_row, other=most)
    until = pltriton.load(until_ref.at[at], mask=is_row, other=most)
    low = jnp.min(jnp.minimum(first, until))
    until = jnp.max(jnp.where(is_row, until, 0))
    high = jnp.minimum(until + work.nodes, capacity)
    spans = pl.cdiv(high, work.span) - lax.div(low, work.span)
    by_span = (spans * PROGRAMS_PER_SPAN >= work.sharing).astype(jnp.int32)
    tiles = 1 + by_span * (work.span // work.tile - 1)
    base = lax.div(low, tiles * work.tile)
    end = jnp.where(low < high, pl.cdiv(high, tiles * work.tile), base)
    return LatentBounds(low=low, high=high, tiles=tiles, base=base, end=end)


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
      parts: Partial results of all units.
      row_starts, first, until: See `attend_latent`.
      capacity: Positions of a page table.
      dtype: Type of the outputs.
      work: Compile-time settings.
      interpret: Run on a CPU.
    """
    _, R, Hq, rank = parts.sums.shape
    width = min(COMBINED_COLUMNS, pl.next_power_of_2(rank))
    return pl.pallas_call(
        partial(_combine_kernel, width=width, capacity=capacity, work=work),
        grid=(pl.cdiv(rank, width) * Hq, R),
        out_shape=jax.ShapeDtypeStruct((R, Hq, rank), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="latent_combine",
    )(parts, row_starts, first, until)


def _combine_kernel(parts, starts_ref, first_ref, until_ref, out_ref, *, width, capacity, work):
    """One program per block of columns of a head, and row."""
    number, row = pl.program_id(0), pl.program_id(1)
    blocks, rank = pl.cdiv(out_ref.shape[2], width), out_ref.shape[2]
    head, column = lax.div(number, blocks), lax.rem(number, blocks) * width
    column += lax.iota(jnp.int32, width)
    keep, requests = column < rank, starts_ref.shape[0] - 1

    def combined():
        number = lax.iota(jnp.int32, pl.next_power_of_2(requests))
        at = jnp.minimum(number + 1, requests)
        ends = pltriton.load(starts_ref.at[at], mask=number < requests, other=2**31 - 1)
        request = jnp.sum((ends <= row).astype(jnp.int32))
        start, stop = starts_ref[request], starts_ref[request + 1]
        bounds = request_units(first_ref, until_ref, start, stop, capacity, work)
        value, total = _combined(parts, bounds, row, head, column, keep, work)
        return value, jnp.broadcast_to(total, (width,))

    def nothing():
        return (jnp.zeros((width,), jnp.float32),) * 2

    value, total = lax.cond(row < starts_ref[requests], combined, nothing)
    out = (value / jnp.maximum(total, 1e-30)).astype(out_ref.dtype)
    # A column that is not written gets an index out of bounds, for the interpreter.
    at = out_ref.at[row, head, jnp.where(keep, column, rank)]
    pltriton.store(at, out, mask=keep)


def _combined(parts, bounds, row, head, column, keep, work):
    """Combines the units of a (row, head) pair: tiles into spans, spans into the total.

    Several units are loaded per step, so that a load does not wait for the previous one.
    """
    width = column.shape[0]
    by_tile = (bounds.tiles == 1).astype(jnp.int32)
    per_span = by_tile * (work.span // work.tile) + (1 - by_tile) * (1 << 20)

    def load(unit, is_one):
        at = (jnp.where(is_one, unit - bounds.base, 0), row, head)
        value = pltriton.load(parts.sums.at[(*at, column)], mask=keep & is_one, other=0.0)
        peak = jnp.where(is_one, parts.peaks[at], NEGATIVE)
        return value, peak, jnp.where(is_one, parts.totals[at], 0.0)

    def add_span(number, sums):
        low = jnp.maximum(number * per_span, bounds.base)
        high = jnp.minimum((number + 1) * per_span, bounds.end)

        def add(several, sums):
            units = [several * COMBINED + member for member in range(COMBINED)]
            for more in [load(unit, (unit >= low) & (unit < high)) for unit in units]:
                sums = _merged(sums, more)
            return sums

        begin, end = lax.div(low, COMBINED), pl.cdiv(high, COMBINED)
        return _merged(sums, lax.fori_loop(begin, end, add, nothing))

    nothing = (jnp.zeros((width,), jnp.float32), jnp.float32(NEGATIVE), jnp.float32(0.0))
    begin, end = lax.div(bounds.base, per_span), pl.cdiv(bounds.end, per_span)
    value, _, total = lax.fori_loop(begin, end, add_span, nothing)
    return value, total


def _merged(sums, more):
    """Merges two accumulators of a (row, head) pair."""
    (value, peak, total), (more_value, more_peak, more_total) = sums, more
    highest = jnp.maximum(peak, more_peak)
    ours, theirs = jnp.exp2(peak - highest), jnp.exp2(more_peak - highest)
    value = fold(value, more_value, ours, theirs)
    return value, highest, fold(total, more_total, ours, theirs)


def fold(one, more, ours, theirs):
    """Adds two sums with their factors."""
    return one * ours + more * theirs
