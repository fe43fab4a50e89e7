"""Online softmax accumulators and sinks (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(-1e30)  # finite: -inf minus -inf is NaN in rows without visible positions


class SoftmaxState(NamedTuple):
    """Online softmax accumulator (acc, m, l) over some positions."""

    value: Any
    peak: Any
    total: Any


def softcap_of(softcap: float | None) -> float:
    """Returns the soft cap of scores that are exponents of 2; 0 for none."""
    return 0.0 if softcap is None else softcap * LOG2_E.value


@triton.jit
def no_sums(lanes: tl.constexpr, D: tl.constexpr):
    """Returns an empty accumulator."""
    peak = tl.full((lanes,), NEGATIVE, tl.float32)
    block: tl.constexpr = triton.next_power_of_2(D)
    values, total = tl.zeros((lanes, block), tl.float32), tl.zeros((lanes,), tl.float32)
    return SoftmaxState(value=values, peak=peak, total=total)


@triton.jit
def no_split(lanes: tl.constexpr, D: tl.constexpr, ones: tl.constexpr):
    """Returns an empty accumulator of a split; its total has `ones` equal columns."""
    sums = no_sums(lanes, D)
    return SoftmaxState(value=sums.value, peak=sums.peak, total=tl.zeros((lanes, ones), tl.float32))


@triton.jit
def fold_split(sums, split):
    """Merges a split into its span; the total of a split has equal columns."""
    total = tl.max(split.total, axis=1)
    return fold(sums, SoftmaxState(value=split.value, peak=split.peak, total=total))


@triton.jit
def fold(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    highest = tl.maximum(sums.peak, more.peak)
    ours, theirs = tl.exp2(sums.peak - highest), tl.exp2(more.peak - highest)
    values = sums.value * ours[:, None] + more.value * theirs[:, None]
    return SoftmaxState(value=values, peak=highest, total=sums.total * ours + more.total * theirs)


@triton.jit
def with_sink(sums, sinks_at, place, q_heads: tl.constexpr):
    """Adds the sink of each lane's query head to the total weight.

    A sink far above all scores makes the total infinite, and the output 0, which is the limit.
    """
    sink = tl.load(sinks_at + place % q_heads).to(tl.float32)
    total = sums.total + tl.exp2(sink * LOG2_E - sums.peak)
    return SoftmaxState(value=sums.value, peak=sums.peak, total=total)
