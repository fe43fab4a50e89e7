"""Padding of a head dimension to a power-of-two block (Triton).

A block has the columns of the next power of two; columns past the head are 0 and occupy no memory.
A head dimension that is a power of two has no padding and no mask.
"""

import triton
import triton.language as tl


@triton.jit
def columns_of(D: tl.constexpr):
    """Returns the column indices of a block."""
    return tl.arange(0, triton.next_power_of_2(D))


@triton.jit
def in_head(keep, D: tl.constexpr):
    """Restricts a row mask, [rows, 1], to the columns of the head."""
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
