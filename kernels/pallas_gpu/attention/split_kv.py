"""Split-KV (flash-decoding) partial results of `attention_layer` (Pallas, Triton backend).

A unit is a split, or a span in long requests. Units are combined in position order, regardless of
the program that computed them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.head_dim_padding import columns_of, in_head
from kernels.pallas_gpu.attention.online_softmax import SoftmaxState, fold


class SplitPartials(NamedTuple):
    """Partial results of each unit: weighted values (acc), peaks (m), totals (l)."""

    sums: Any
    peaks: Any
    totals: Any

    @classmethod
    def of(cls, units: int, R: int, Hq: int, D: int) -> "SplitPartials":
        """Returns the shapes for `units` units of all rows and query heads."""
        single = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        of_heads = (units, R, Hq)
        return cls(sums=single((*of_heads, D)), peaks=single(of_heads), totals=single(of_heads))


def store_partial(parts, unit, row, q_head, sums, is_lane):
    """Stores the accumulator of a unit."""
    # A lane that is not written gets a row out of bounds, for the interpreter.
    at, D = jnp.where(is_lane, row, parts.sums.shape[1]), parts.sums.shape[3]
    where = (unit, at[:, None], q_head[:, None], columns_of(D)[None, :])
    pltriton.store(parts.sums.at[where], sums.value, mask=in_head(is_lane[:, None], D))
    pltriton.store(parts.peaks.at[unit, at, q_head], sums.peak, mask=is_lane)
    pltriton.store(parts.totals.at[unit, at, q_head], sums.total, mask=is_lane)


def combine(parts, row, q_head, begin, end, per_span, unroll, interpret):
    """Combines stored partial results: units into spans, spans into the total.

    Several units are loaded per step, so that a load does not wait for the previous one.
    """
    (lanes,), D = row.shape, parts.sums.shape[3]

    def load(unit, is_one):
        column, is_one = columns_of(D)[None, :], jnp.broadcast_to(is_one, (lanes,))
        # Volatile loads bypass the L1 cache: other programs have written the values.
        load = partial(pltriton.load, volatile=not interpret)
        at = (unit - begin, row, q_head)
        return SoftmaxState(
            load(
                parts.sums.at[(at[0], row[:, None], q_head[:, None], column)],
                mask=in_head(is_one[:, None], D),
                other=0.0,
            ),
            load(parts.peaks.at[at], mask=is_one, other=-1e30),
            load(parts.totals.at[at], mask=is_one, other=0.0),
        )

    def add_span(number, whole):
        low = jnp.maximum(number * per_span, begin)
        high = jnp.minimum((number + 1) * per_span, end)

        def add_units(several, sums):
            units = [several * unroll + member for member in range(unroll)]
            for more in [load(unit, (unit >= low) & (unit < high)) for unit in units]:
                sums = fold(sums, more)
            return sums

        several = (lax.div(low, unroll), pl.cdiv(high, unroll))
        return fold(whole, lax.fori_loop(*several, add_units, SoftmaxState.nothing(lanes, D)))

    spans = (lax.div(begin, per_span), pl.cdiv(end, per_span))
    return lax.fori_loop(*spans, add_span, SoftmaxState.nothing(lanes, D))
