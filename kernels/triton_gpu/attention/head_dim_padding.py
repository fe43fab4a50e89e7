"""Columns of a head whose size need not be a power of two, as a block's must be, in Triton.

A block has the columns of the next power of two; those past the head are 0 and in no memory. Of a
head that is a power of two there are none, and nothing is masked.
"""

import triton
import triton.language as tl


@triton.jit
def columns_of(D: tl.constexpr):
    """The columns of a block."""
    return tl.arange(0, triton.next_power_of_2(D))


@triton.jit
def in_head(keep, D: tl.constexpr):
    """What is kept of rows, [rows, 1], for the columns of the head alone."""
    if D & (D - 1) != 0:
        keep = keep & (columns_of(D) < D)[None, :]
    return keep


@triton.jit
def load_head(at, D: tl.constexpr):
    """Loads whole heads."""
    if D & (D - 1) == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=columns_of(D) < D, other=0.0)


@triton.jit
def store_head(at, x, D: tl.constexpr):
    """Stores one head."""
    if D & (D - 1) == 0:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=columns_of(D) < D)
