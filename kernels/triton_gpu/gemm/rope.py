"""Rotary embedding of rope parts (Triton)."""

import triton
import triton.language as tl


@triton.jit
def store_rotated(
    x_at, cos_at, sin_at, out_at, count, half: tl.constexpr, is_interleaved: tl.constexpr
):
    """Rotates rope parts in float32 and stores them, rounded once.

    Args:
      x_at, cos_at, sin_at: Pointers to the first element and angle of each part, `[rows, 1]`, or
        of one part.
      out_at: Pointers to the first stored elements.
      count: Pairs to store of each part: all, or none of a part out of bounds.
      half: Angles of a part, one for each pair of elements.
      is_interleaved: Whether a pair is of adjacent elements; otherwise of elements `half` apart.
    """
    pair = tl.arange(0, triton.next_power_of_2(half))[None, :]
    keep = pair < count
    step: tl.constexpr = 2 if is_interleaved else 1
    apart: tl.constexpr = 1 if is_interleaved else half
    first = pair * step
    x = tl.load(x_at + first, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(x_at + first + apart, mask=keep, other=0.0).to(tl.float32)
    cos = tl.load(cos_at + pair, mask=keep, other=0.0)
    sin = tl.load(sin_at + pair, mask=keep, other=0.0)
    kind = out_at.dtype.element_ty
    tl.store(out_at + first, (x * cos - y * sin).to(kind), mask=keep)
    tl.store(out_at + first + apart, (y * cos + x * sin).to(kind), mask=keep)
