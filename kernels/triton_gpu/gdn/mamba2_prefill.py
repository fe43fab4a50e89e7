"""Mamba2 chunked prefill, in chunks of 64 rows (Triton).

Three kernels run in sequence: causal convolution of all rows; time steps and decays of all chunks,
and the decayed products of B and C; the recurrent state of each request and head, carried from
chunk to chunk, with the outputs before the norm. B, C and x are bfloat16, as after the convolution.
Decayed products are rounded to bfloat16; all other inputs of the state are split into two bfloat16
parts, so that 16 bits are significant. `kernels/__init__.py` lists what must equal the Pallas twin.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gdn_tiles import GDNPrefillTiles
from kernels.recurrent_sizes import columns_of, sizes_of
from kernels.triton_gpu.attention.attention import clear_padding
from kernels.triton_gpu.gdn.gdn_chunk import CHUNK, NOTHING, SIZE, parts_of, share_of
from kernels.triton_gpu.gdn.gdn_rows import (
    LOG2_E,
    WINDOW,
    GDNLayerWeights,
    Inputs,
    States,
    check_contiguous,
    convolved,
    sum_by_halves,
    time_steps,
)
from kernels.triton_gpu.gdn.prefill_requests import (
    PrefillRequests,
    first_chunk,
    move_window,
    rows_of,
)
from kernels.triton_gpu.gemm.linear import launching


class ChunkInputs(NamedTuple):
    """Intermediate results between kernels: channels by row, the others by chunk."""

    channels: Any
    scores: Any
    total: Any
    dt: Any


def prefill(
    projected: Float[Tensor, "R outputs"],
    conv: Float[Tensor, "C 4"],
    conv_bias: Float[Tensor, " C"] | None,
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
    skip: Float[Tensor, " H"],
    recurrent: Float[Tensor, "L states H K V"],
    window: Float[Tensor, "L states 3 C"],
    saved_recurrent: Float[Tensor, "L snapshots H K V"],
    saved_window: Float[Tensor, "L snapshots 3 C"],
    layer: int,
    slots: Int[Tensor, " B"],
    row_starts: Int[Tensor, " B1"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
    *,
    tiles: GDNPrefillTiles,
) -> Float[Tensor, "R values"]:
    """Same as `shared.spec.recurrent_layer.prefill`, for flat bfloat16 rows grouped by request.

    Args:
      projected: See `shared.spec.recurrent_mixer.split_inputs`.
      conv, conv_bias, a_log, dt_bias, skip: Weights of the layer.
      recurrent, window, layer: States of all layers, and the index of the layer to read and write.
      saved_recurrent, saved_window: Snapshots of all layers.
      slots: State slot of each request; distinct, except for requests without rows, which keep
        their states.
      row_starts: First flat row of each request, and the end; later rows are padding.
      save_after: Rows after which a state is saved: 0, a multiple of 64, or all rows of the
        request.
      save: Snapshot index of each request; 0 for none.
      tiles: Tile config.

    Returns:
      The concatenated head outputs before the norm, zeros for padding.

    Raises:
      ValueError: States are not contiguous.
    """
    check_contiguous(recurrent, window, saved_recurrent, saved_window)
    R, B, projected = len(projected), len(slots), projected.contiguous()
    has = {"has_delta": False, "has_bias": conv_bias is not None}
    sizes = sizes_of(recurrent.shape, window.shape, **has)
    H, V, C, places = sizes.H, sizes.V, sizes.C, R // CHUNK + B
    weights = GDNLayerWeights(
        conv=conv,
        conv_bias=conv_bias,
        a_log=a_log,
        dt_bias=dt_bias,
        skip=skip,
        norm=None,
        eps=None,
    )
    states = States(recurrent=recurrent[layer], window=window[layer])
    requests = PrefillRequests.of(slots, row_starts, save_after, save)
    half, single = (
        partial(torch.empty, dtype=x, device=projected.device)
        for x in (torch.bfloat16, torch.float32)
    )
    chunks = ChunkInputs(
        channels=half(R, C),
        scores=half(places, H, CHUNK, CHUNK),
        total=single(places, H, CHUNK),
        dt=single(places, H, CHUNK),
    )
    out = projected.new_empty((R, H * V))
    fixed, lanes = {"sizes": sizes, **launching(projected)}, triton.next_power_of_2(B)
    block = min(sizes.K, V)
    _rows_kernel[(C // block, CHUNK // tiles.rows * places)](
        projected,
        weights,
        states,
        requests,
        chunks,
        num_requests=B,
        lanes=lanes,
        rows=tiles.rows,
        block=block,
        num_warps=tiles.row_warps,
        **fixed,
    )
    _prepare_kernel[(H, places)](
        projected,
        weights,
        requests,
        chunks,
        num_requests=B,
        lanes=lanes,
        num_warps=tiles.prepare_warps,
        **fixed,
    )
    columns = columns_of(tiles.columns, sizes)
    _carry_kernel[(V // columns, H, B)](
        projected,
        out,
        weights,
        states,
        States(saved_recurrent[layer], saved_window[layer]),
        requests,
        chunks,
        num_rows=R,
        num_requests=B,
        columns=columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **fixed,
    )
    return out


@triton.jit(do_not_specialize=["num_requests"])
def _rows_kernel(
    projected_at,
    weights,
    states,
    requests,
    chunks,
    num_requests,
    lanes: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    sizes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows of a chunk, and block of channels."""
    first_channel, part = tl.program_id(0) * block, tl.program_id(1)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    chunk, within = part // (SIZE // rows), part % (SIZE // rows) * rows
    request, start, first, count = rows_of(requests.starts, chunk, num_requests, lanes)
    node = first + within + tl.arange(0, rows)
    if first + within >= count:
        return
    start = start.to(tl.int64)
    slot = tl.load(requests.slots + request).to(tl.int64)
    inputs = Inputs(
        rows=projected_at + start * sizes.width + sizes.channels,
        window=states.window + slot * (WINDOW * sizes.C),
        count=count,
    )
    places = (node, node + 1, node + 2, node + 3)
    _input, x = convolved(inputs, weights, places, first_channel, block, sizes)
    at = (start + node[:, None]) * sizes.C + first_channel + tl.arange(0, block)[None, :]
    tl.store(chunks.channels + at, x.to(tl.bfloat16), mask=(node < count)[:, None])


@triton.jit(do_not_specialize=["num_requests"])
def _prepare_kernel(
    projected_at,
    weights,
    requests,
    chunks,
    num_requests,
    lanes: tl.constexpr,
    sizes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per head and chunk."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    head, chunk = tl.program_id(0), tl.program_id(1)
    group = head // (H // sizes.key_heads)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    _, start, first, count = rows_of(requests.starts, chunk, num_requests, lanes)
    if first >= count:
        return
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    is_row, at = first + row < count, (start + first).to(tl.int64) + row
    dt = tl.load(projected_at + at * sizes.width + (sizes.gates + head), mask=is_row, other=0.0)
    a_log, dt_bias = tl.load(weights.a_log + head), tl.load(weights.dt_bias + head)
    dt, log_decay = time_steps(dt, a_log, dt_bias)
    place = (chunk.to(tl.int64) * H + head) * SIZE
    tl.store(chunks.dt + place + row, tl.where(is_row, dt, 0.0))
    # Clamped, so that the cumulative sum keeps its precision after a token with decay 0.
    log_decay = tl.where(is_row, tl.maximum(log_decay * LOG2_E, NOTHING), 0.0)
    total = sum_by_halves(tl.where(row[:, None] <= column[None, :], log_decay[:, None], 0.0))
    tl.store(chunks.total + place + column, total)
    # Masked before exp2: above the diagonal the difference is positive and would overflow.
    is_seen = row[:, None] >= column[None, :]
    decay = share_of(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
    key = at[:, None] * sizes.C + group * K + tl.arange(0, K)[None, :]
    q = tl.load(chunks.channels + key + sizes.q, mask=is_row[:, None], other=0.0)
    k = tl.load(chunks.channels + key + sizes.k, mask=is_row[:, None], other=0.0)
    scores = tl.where(is_seen, tl.dot(q, tl.trans(k)) * decay, 0.0)
    square = row[:, None] * SIZE + column[None, :]
    tl.store(chunks.scores + place * SIZE + square, scores.to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _carry_kernel(
    projected_at,
    out_at,
    weights,
    states,
    snapshots,
    requests,
    chunks,
    num_rows,
    num_requests,
    sizes: tl.constexpr,
    columns: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of state columns, head and request."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    heads: tl.constexpr = H // sizes.key_heads  # of a group
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // heads
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if block == 0:
        padding = tl.load(requests.starts + num_requests) + request
        clear_padding(padding, out_at, num_rows, num_requests, head, 1, H, V)
    start, stop = tl.load(requests.starts + request), tl.load(requests.starts + request + 1)
    count, slot = stop - start, tl.load(requests.slots + request).to(tl.int64)
    save = tl.load(requests.save + request).to(tl.int64)
    save_after = tl.load(requests.save_after + request)
    row, key = tl.arange(0, SIZE), tl.arange(0, K)
    column = block * columns + tl.arange(0, columns)[None, :]
    in_state = head * (K * V) + key[:, None] * V + column
    state_at = states.recurrent + slot * (H * K * V) + in_state
    saved_state_at = snapshots.recurrent + save * (H * K * V) + in_state
    state = tl.load(state_at)
    ends = (save_after % SIZE == 0) | (save_after == count)
    is_saved = (save != 0) & (save_after >= 0) & (save_after <= count) & ends
    if is_saved & (save_after == 0):
        tl.store(saved_state_at, state)
    skip = tl.load(weights.skip + head)
    at = start.to(tl.int64) + row[:, None]
    key_at = chunks.channels + at * sizes.C + group * K + key[None, :]
    x_at = chunks.channels + at * sizes.C + sizes.v + head * V + column
    rows_at = out_at + (at * H + head) * V + column
    place = (first_chunk(start, request).to(tl.int64) * H + head) * SIZE
    scores_at = chunks.scores + place * SIZE + row[:, None] * SIZE + row[None, :]
    for i in range(0, tl.cdiv(count, SIZE)):
        is_row = (row + i * SIZE < count)[:, None]
        q = tl.load(key_at + sizes.q, mask=is_row, other=0.0)
        k = tl.load(key_at + sizes.k, mask=is_row, other=0.0)
        x = tl.load(x_at, mask=is_row, other=0.0).to(tl.float32)
        total, dt = tl.load(chunks.total + place + row), tl.load(chunks.dt + place + row)
        end = tl.load(chunks.total + place + SIZE - 1)
        high, low = parts_of(state)
        out = (tl.dot(q, low) + tl.dot(q, high)) * share_of(total)[:, None]
        stored = dt[:, None] * x
        high, low = parts_of(stored)
        scores = tl.load(scores_at)
        out = out + tl.dot(scores, low) + tl.dot(scores, high)
        out = out + skip * x
        tl.store(rows_at, out.to(out_at.dtype.element_ty), mask=is_row)
        high, low = parts_of(stored * share_of(end - total)[:, None])
        k = tl.trans(k)
        state = state * share_of(end) + tl.dot(k, low) + tl.dot(k, high)
        if is_saved & (tl.minimum((i + 1) * SIZE, count) == save_after):
            tl.store(saved_state_at, state)
        key_at += SIZE * sizes.C
        x_at += SIZE * sizes.C
        rows_at += SIZE * H * V
        place += H * SIZE
        scores_at += H * SIZE * SIZE
    if (count == 0) & (not is_saved):
        return
    if count > 0:
        tl.store(state_at, state)
    inputs = Inputs(
        rows=projected_at + start.to(tl.int64) * sizes.width + sizes.channels,
        window=states.window + slot * (WINDOW * sizes.C),
        count=count,
    )
    saved_at = snapshots.window + save * (WINDOW * sizes.C)
    channel = sizes.v + head * V + block * columns
    move_window(inputs, saved_at, save_after, is_saved, channel, columns, sizes)
    if (head % heads == 0) & (block == 0):
        channel = sizes.q + group * K
        move_window(inputs, saved_at, save_after, is_saved, channel, K, sizes)
        channel = sizes.k + group * K
        move_window(inputs, saved_at, save_after, is_saved, channel, K, sizes)
