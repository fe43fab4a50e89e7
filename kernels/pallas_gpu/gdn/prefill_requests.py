"""Requests of a prefill by recurrent layers: their chunks, and their conv states (Pallas, Triton
backend).
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gdn.gdn_chunk import CHUNK
from kernels.pallas_gpu.gdn.gdn_rows import WINDOW


class PrefillRequests(NamedTuple):
    """Requests of a step; `starts` has the first row of each, and the end."""

    slots: Any
    starts: Any
    save_after: Any
    save: Any


def prefill_kernel(
    kernel, grid, makes, *, interpret, name, warps, stages=1, aliases=None, **settings
):
    """Returns a kernel of a prefill that maps pytrees of arrays to `makes`."""
    return pl.pallas_call(
        partial(kernel, interpret=interpret, **settings),
        grid=grid,
        out_shape=makes,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )


def rows_of(starts_ref, chunk):
    """Returns the request of a chunk, its first row, the chunk's first row in it, its row count."""
    requests = starts_ref.shape[0] - 1
    lane = lax.iota(jnp.int32, pl.next_power_of_2(requests))
    is_one = lane < requests
    starts = pltriton.load(starts_ref.at[lane], mask=is_one, other=0)
    begins = is_one & (first_chunk(starts, lane) <= chunk)
    request = jnp.sum(begins.astype(jnp.int32), axis=0) - 1
    start, stop = starts_ref[request], starts_ref[request + 1]
    return request, start, (chunk - first_chunk(start, request)) * CHUNK, stop - start


def first_chunk(start, request):
    """Returns the index of a request's first chunk, which depends on the earlier rows alone.

    Chunks of requests do not overlap: rounding adds at most one chunk per request.
    """
    return lax.div(start, CHUNK) + request


def move_window(inputs, saved_ref, save, save_after, is_saved, first, D, interpret):
    """Writes the conv state of some channels after all rows, and a copy after `save_after`.

    Args:
      inputs: Rows and conv state of a request; its conv state is written.
      saved_ref, save: Conv states of all snapshots, and the index of the one to write.
      save_after, is_saved: Rows before the copy, and True if it is written.
      first, D: First channel, and number of channels.
      interpret: Run on a CPU.
    """
    layer, slot = inputs.layer, inputs.slot
    lane, channel = lax.iota(jnp.int32, 4), first + lax.iota(jnp.int32, D)[None, :]
    is_one = (lane < WINDOW)[:, None]

    def after(taken):
        """Returns rows `taken` to `taken + 3` of the old conv state and the request's rows."""
        place, is_one = taken + lane, lane < WINDOW
        is_new = (is_one & (place >= WINDOW))[:, None]
        is_old = (is_one & (place < WINDOW))[:, None]
        place = place[:, None]
        at = inputs.projected.at[inputs.start + place - WINDOW, inputs.first + channel]
        new = pltriton.load(at, mask=is_new, other=0.0)
        at = inputs.window.at[layer, slot, place, channel]
        return jnp.where(is_new, new, pltriton.load(at, mask=is_old, other=0.0))

    @pl.when(is_saved)
    def _():
        at = saved_ref.at[layer, save, lane[:, None], channel]
        pltriton.store(at, after(save_after), mask=is_one)

    new = after(inputs.count)
    if not interpret:
        pltriton.debug_barrier()  # other threads may still read what this one overwrites
    # The last lane is out of bounds, for the interpreter.
    pltriton.store(inputs.window.at[layer, slot, lane[:, None], channel], new, mask=is_one)
