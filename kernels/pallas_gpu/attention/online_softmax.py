"""Online softmax accumulators (Pallas, Triton backend)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LOG2_E = 1.4426950408889634
NEGATIVE = -1e30  # finite: -inf minus -inf is NaN in rows without visible positions


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
