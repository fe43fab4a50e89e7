"""Split-KV (flash-decoding) partial results of `attention_layer` (Triton).

A unit is a split, or a span in long requests. Units are combined in position order, regardless of
the program that computed them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.attention.head_dim_padding import columns_of, in_head
from kernels.triton_gpu.attention.online_softmax import (
    SoftmaxState,
    fold,
    no_sums,
)


class SplitPartials(NamedTuple):
    """Partial results of each unit: weighted values (acc), peaks (m), totals (l)."""

    sums: Any
    peaks: Any
    totals: Any


@triton.jit
def store_partial(parts, at, sums, is_lane, D: tl.constexpr):
    """Stores the accumulator of a unit."""
    column = columns_of(D)[None, :]
    tl.store(parts.sums + at[:, None] * D + column, sums.value, mask=in_head(is_lane[:, None], D))
    tl.store(parts.peaks + at, sums.peak, mask=is_lane)
    tl.store(parts.totals + at, sums.total, mask=is_lane)


@triton.jit
def combine(
    parts,
    place,
    begin,
    end,
    per_span,
    stride,
    lanes: tl.constexpr,
    D: tl.constexpr,
    unroll: tl.constexpr,
):
    """Combines stored partial results: units into spans, spans into the total.

    Several units are loaded per step, so that a load does not wait for the previous one.
    """
    column = columns_of(D)[None, :]
    w_sums = no_sums(lanes, D)
    for number in range(begin // per_span, tl.cdiv(end, per_span)):
        sums = no_sums(lanes, D)
        low = tl.maximum(number * per_span, begin)
        high = tl.minimum((number + 1) * per_span, end)
        for several in range(low // unroll, tl.cdiv(high, unroll)):
            for member in tl.static_range(unroll):
                unit = several * unroll + member + tl.zeros((lanes,), tl.int32)
                is_one = (unit >= low) & (unit < high)
                at = (unit - begin) * stride + place
                values = tl.load(
                    parts.sums + at[:, None] * D + column,
                    mask=in_head(is_one[:, None], D),
                    other=0.0,
                    cache_modifier=".cg",
                )
                peak = tl.load(parts.peaks + at, mask=is_one, other=-1e30, cache_modifier=".cg")
                total = tl.load(parts.totals + at, mask=is_one, other=0.0, cache_modifier=".cg")
                sums = fold(sums, SoftmaxState(value=values, peak=peak, total=total))
        w_sums = fold(w_sums, sums)
    return w_sums
