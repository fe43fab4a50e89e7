"""Online softmax accumulators and sinks (Pallas, Triton backend)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

LOG2_E = 1.4426950408889634
NEGATIVE = -1e30  # finite: -inf minus -inf is NaN in rows without visible positions


class SinkRefs(NamedTuple):
    """Stacked sinks of query heads, and the index of the layer."""

    values: Any
    layer: Any


class SoftmaxState(NamedTuple):
    """Online softmax accumulator (acc, m, l) over some positions."""

    value: jax.Array
    peak: jax.Array
    total: jax.Array

    @classmethod
    def nothing(cls, lanes, D, *ones):
        """Returns an empty accumulator; within a split the total has `ones` equal columns."""
        values = jnp.zeros((lanes, pl.next_power_of_2(D)), jnp.float32)
        peak = jnp.full((lanes,), NEGATIVE, jnp.float32)
        return cls(values, peak, jnp.zeros((lanes, *ones), jnp.float32))


def fold(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    highest = jnp.maximum(sums.peak, more.peak)
    ours, theirs = jnp.exp2(sums.peak - highest), jnp.exp2(more.peak - highest)
    values = sums.value * ours[:, None] + more.value * theirs[:, None]
    return SoftmaxState(values, highest, sums.total * ours + more.total * theirs)


def with_sink(sums, sinks, q_head):
    """Adds the sink of each lane's query head to the total weight, if there are sinks.

    A sink far above all scores makes the total infinite, and the output 0, which is the limit.
    """
    if sinks is None:
        return sums
    sink = pltriton.load(sinks.values.at[sinks.layer[0], q_head]).astype(jnp.float32)
    return sums._replace(total=sums.total + jnp.exp2(sink * LOG2_E - sums.peak))
