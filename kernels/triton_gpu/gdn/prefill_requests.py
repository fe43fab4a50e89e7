"""Requests of a prefill by recurrent layers: their chunks, and their conv states (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_gpu.gdn.gdn_chunk import SIZE
from kernels.triton_gpu.gdn.gdn_rows import WINDOW


class PrefillRequests(NamedTuple):
    """Requests of a step; `starts` has the first row of each, and the end."""

    slots: Any
    starts: Any
    save_after: Any
    save: Any

    @classmethod
    def of(
        cls, slots: Tensor, starts: Tensor, save_after: Tensor, save: Tensor
    ) -> "PrefillRequests":
        """Returns the requests with contiguous arrays."""
        return cls(*(x.contiguous() for x in (slots, starts, save_after, save)))


@triton.jit
def rows_of(starts_at, chunk, num_requests, lanes: tl.constexpr):
    """Returns the request of a chunk, its first row, the chunk's first row in it, its row count."""
    lane = tl.arange(0, lanes)
    is_one = lane < num_requests
    starts = tl.load(starts_at + lane, mask=is_one, other=0)
    begins = is_one & (first_chunk(starts, lane) <= chunk)
    request = tl.sum(begins.to(tl.int32), 0) - 1
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    return request, start, (chunk - first_chunk(start, request)) * SIZE, stop - start


@triton.jit
def first_chunk(start, request):
    """Returns the index of a request's first chunk, which depends on the earlier rows alone.

    Chunks of requests do not overlap: rounding adds at most one chunk per request.
    """
    return start // SIZE + request


@triton.jit
def move_window(
    inputs, saved_at, save_after, is_saved, first, D: tl.constexpr, sizes: tl.constexpr
):
    """Writes the conv state of some channels after all rows, and a copy after `save_after`."""
    lane, channel = tl.arange(0, 4), first + tl.arange(0, D)[None, :]
    is_one, at = (lane < WINDOW)[:, None], lane[:, None] * sizes.C + channel
    if is_saved:
        saved = _window_after(inputs, save_after, lane, channel, sizes)
        tl.store(saved_at + at, saved, mask=is_one)
    new = _window_after(inputs, inputs.count, lane, channel, sizes)
    tl.debug_barrier()  # other threads may still read what this one overwrites
    tl.store(inputs.window + at, new, mask=is_one)


@triton.jit
def _window_after(inputs, taken, lane, channel, sizes: tl.constexpr):
    """Returns rows `taken` to `taken + 3` of the old conv state and the request's rows."""
    place, is_one = taken + lane, lane < WINDOW
    is_new, is_old = (is_one & (place >= WINDOW))[:, None], (is_one & (place < WINDOW))[:, None]
    at = inputs.rows + (place - WINDOW).to(tl.int64)[:, None] * sizes.width + channel
    new = tl.load(at, mask=is_new, other=0.0)
    at = inputs.window + place[:, None] * sizes.C + channel
    return tl.where(is_new, new, tl.load(at, mask=is_old, other=0.0))
