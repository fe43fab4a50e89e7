"""Gated delta net chunked prefill, in chunks of 64 rows (Triton).

Four kernels run in sequence: causal convolution and norms of all rows; gates of all chunks, and the
inverse of the triangular system by which a token's update depends on earlier tokens of its chunk;
the recurrent state of each request and head, carried from chunk to chunk; the gated norm of the
outputs. Tensor-core operands are bfloat16. Queries and decayed query-key scores are rounded to
bfloat16; all inputs of the state are split into two bfloat16 parts, so that 16 bits are
significant. `kernels/__init__.py` lists what must equal the Pallas twin.
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
from kernels.recurrent_sizes import sizes_of
from kernels.triton_gpu.gdn.gdn_chunk import (
    CHUNK,
    NOTHING,
    SIZE,
    add_product,
    inverse_of,
    parts_of,
    share_of,
)
from kernels.triton_gpu.gdn.gdn_rows import (
    LOG2_E,
    WINDOW,
    GDNLayerWeights,
    Inputs,
    States,
    check_contiguous,
    convolved,
    gated_norm,
    gates,
    sum_by_halves,
    unit,
)
from kernels.triton_gpu.gdn.prefill_requests import (
    PrefillRequests,
    first_chunk,
    move_window,
    rows_of,
)
from kernels.triton_gpu.gemm.linear import launching


class ChunkOutputs(NamedTuple):
    """Intermediate results between kernels, by row or by chunk."""

    keys: Any
    v: Any
    solved: Any
    scores: Any
    total: Any
    read: Any


def prefill(
    projected: Float[Tensor, "R outputs"],
    conv: Float[Tensor, "C 4"],
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
    norm: Float[Tensor, " V"],
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
    eps: float,
    digits: int,
    tiles: GDNPrefillTiles,
) -> Float[Tensor, "R values"]:
    """Same as `shared.spec.recurrent_layer.prefill`, for flat bfloat16 rows grouped by request.

    Args:
      projected: See `shared.spec.recurrent_mixer.split_inputs`.
      conv, a_log, dt_bias, norm, eps: Weights of the layer, and the epsilon of its norm.
      recurrent, window, layer: States of all layers, and the index of the layer to read and write.
      saved_recurrent, saved_window: Snapshots of all layers.
      slots: State slot of each request; distinct, except for requests without rows, which keep
        their states.
      row_starts: First flat row of each request, and the end; later rows are padding.
      save_after: Rows after which a state is saved: 0, a multiple of 64, or all rows of the
        request.
      save: Snapshot index of each request; 0 for none.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.
      tiles: Tile config.

    Returns:
      The concatenated head outputs, zeros for padding.

    Raises:
      ValueError: States are not contiguous.
    """
    check_contiguous(recurrent, window, saved_recurrent, saved_window)
    R, B = len(projected), len(slots)
    sizes = sizes_of(recurrent.shape, window.shape, has_delta=True, has_bias=False)
    H, V, places = sizes.H, sizes.V, R // CHUNK + B
    columns, projected = min(tiles.columns, V), projected.contiguous()
    weights = GDNLayerWeights(
        conv=conv, conv_bias=None, a_log=a_log, dt_bias=dt_bias, skip=None, norm=norm, eps=eps
    )
    states = States(recurrent=recurrent[layer], window=window[layer])
    requests = PrefillRequests.of(slots, row_starts, save_after, save)
    half, single = (
        partial(torch.empty, dtype=x, device=projected.device)
        for x in (torch.bfloat16, torch.float32)
    )
    chunks = ChunkOutputs(
        keys=half(R, 3 * sizes.key_heads * sizes.K),
        v=single(R, H, V),
        solved=half(places, H, 2, CHUNK, CHUNK),
        scores=half(places, H, CHUNK, CHUNK),
        total=single(places, H, CHUNK),
        read=single(R, H, V),
    )
    out = projected.new_empty((R, H * V))
    fixed, lanes = {"sizes": sizes, **launching(projected)}, triton.next_power_of_2(B)
    _rows_kernel[(2 * sizes.key_heads + H, CHUNK // tiles.rows * places)](
        *(projected, weights, states, requests, chunks),
        num_requests=B,
        lanes=lanes,
        rows=tiles.rows,
        digits=digits,
        num_warps=tiles.row_warps,
        **fixed,
    )
    _prepare_kernel[(H, places)](
        *(projected, weights, requests, chunks),
        num_requests=B,
        lanes=lanes,
        num_warps=tiles.prepare_warps,
        **fixed,
    )
    _carry_kernel[(V // columns, H, B)](
        *(projected, states, States(saved_recurrent[layer], saved_window[layer])),
        *(requests, chunks),
        columns=columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **fixed,
    )
    _norm_kernel[(H, triton.cdiv(R, tiles.rows))](
        *(projected, out, weights, requests, chunks),
        num_rows=R,
        num_requests=B,
        rows=tiles.rows,
        digits=digits,
        num_warps=tiles.row_warps,
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
    sizes: tl.constexpr,
    digits: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows of a chunk, and query, key or value head."""
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    key_heads: tl.constexpr = sizes.key_heads
    head, part = tl.program_id(0), tl.program_id(1)
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
        rows=projected_at + start * sizes.width,
        window=states.window + slot * (WINDOW * sizes.C),
        count=count,
    )
    places = (node, node + 1, node + 2, node + 3)
    keep, row = (node < count)[:, None], start + node[:, None]
    if head < 2 * key_heads:
        _key, x = convolved(inputs, weights, places, head * K, K, sizes)
        x = unit(x, digits)
        at = chunks.keys + (row * (3 * key_heads) + head) * K + tl.arange(0, K)[None, :]
        if head < key_heads:
            tl.store(at, (x * (K**-0.5)).to(tl.bfloat16), mask=keep)
        else:
            high, low = parts_of(x)
            tl.store(at, high, mask=keep)
            tl.store(at + key_heads * K, low, mask=keep)
    else:
        value_head = head - 2 * key_heads
        channel = 2 * key_heads * K + value_head * V
        _value, v = convolved(inputs, weights, places, channel, V, sizes)
        v_at = chunks.v + (row * sizes.H + value_head) * V + tl.arange(0, V)[None, :]
        tl.store(v_at, v, mask=keep)


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
    """One program per value head and chunk."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    key_heads: tl.constexpr = sizes.key_heads
    head, chunk = tl.program_id(0), tl.program_id(1)
    key_head = head // (H // key_heads)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    _, start, first, count = rows_of(requests.starts, chunk, num_requests, lanes)
    if first >= count:
        return
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    is_row, at = first + row < count, (start + first).to(tl.int64) + row
    gates_at = projected_at + at * sizes.width + (sizes.C + H * sizes.V + head)
    b = tl.load(gates_at, mask=is_row, other=0.0)
    a = tl.load(gates_at + H, mask=is_row, other=0.0)
    a_log, dt_bias = tl.load(weights.a_log + head), tl.load(weights.dt_bias + head)
    log_decay, beta = gates(b, a, a_log, dt_bias)
    # Clamped, so that the cumulative sum keeps its precision after a token with decay 0.
    log_decay = tl.where(is_row, tl.maximum(log_decay * LOG2_E, NOTHING), 0.0)
    beta = tl.where(is_row, beta, 0.0)
    total = sum_by_halves(tl.where(row[:, None] <= column[None, :], log_decay[:, None], 0.0))
    place = chunk.to(tl.int64) * H + head
    tl.store(chunks.total + place * SIZE + column, total)
    # Masked before exp2: above the diagonal the difference is positive and would overflow.
    is_seen = row[:, None] >= column[None, :]
    decay = share_of(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
    decay = tl.where(is_seen, decay, 0.0)
    in_keys = (at[:, None] * (3 * key_heads) + key_head) * K + tl.arange(0, K)[None, :]
    q, k_high, k_low = _keys(chunks.keys + in_keys, is_row[:, None], key_heads * K)
    high, low = tl.trans(k_high), tl.trans(k_low)
    scores = (tl.dot(q, low) + tl.dot(q, high)) * decay
    square = row[:, None] * SIZE + column[None, :]
    tl.store(chunks.scores + place * (SIZE * SIZE) + square, scores.to(tl.bfloat16))
    lower = add_product(tl.zeros_like(decay), k_high, k_low, high, low) * decay * beta[:, None]
    lower = tl.where(row[:, None] > column[None, :], lower, 0.0)
    high, low = parts_of(inverse_of(lower) * beta[None, :])
    solved_at = chunks.solved + (place * (2 * SIZE * SIZE) + square)
    tl.store(solved_at, high)
    tl.store(solved_at + SIZE * SIZE, low)


@triton.jit
def _keys(at, is_row, apart: tl.constexpr):
    """Loads queries and both parts of keys; rows past the end of a request are 0."""
    q = tl.load(at, mask=is_row, other=0.0)
    high = tl.load(at + apart, mask=is_row, other=0.0)
    return q, high, tl.load(at + 2 * apart, mask=is_row, other=0.0)


@triton.jit
def _carry_kernel(
    projected_at,
    states,
    snapshots,
    requests,
    chunks,
    sizes: tl.constexpr,
    columns: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of state columns, value head and request."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    key_heads: tl.constexpr = sizes.key_heads
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (H // key_heads)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    start, stop = tl.load(requests.starts + request), tl.load(requests.starts + request + 1)
    slot = tl.load(requests.slots + request).to(tl.int64)
    save = tl.load(requests.save + request).to(tl.int64)
    save_after, count = tl.load(requests.save_after + request), stop - start
    column = block * columns + tl.arange(0, columns)[None, :]
    in_state = tl.arange(0, K)[:, None] * V + column
    state_at = states.recurrent + ((slot * H + head) * (K * V) + in_state)
    saved_state_at = snapshots.recurrent + ((save * H + head) * (K * V) + in_state)
    state = tl.load(state_at)
    ends = (save_after % SIZE == 0) | (save_after == count)
    is_saved = (save != 0) & (save_after >= 0) & (save_after <= count) & ends
    if is_saved & (save_after == 0):
        tl.store(saved_state_at, state)

    row = tl.arange(0, SIZE)
    square = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    place = first_chunk(start, request).to(tl.int64) * H + head
    solved_at = chunks.solved + (place * (2 * SIZE * SIZE) + square)
    scores_at = chunks.scores + (place * (SIZE * SIZE) + square)
    total_at = chunks.total + place * SIZE
    at = start.to(tl.int64) + row[:, None]
    keys_at = chunks.keys + ((at * (3 * key_heads) + key_head) * K + tl.arange(0, K)[None, :])
    in_values = (at * H + head) * V + column
    v_at, read_at = chunks.v + in_values, chunks.read + in_values
    nothing = tl.zeros((SIZE, columns), tl.float32)
    for i in range(0, tl.cdiv(count, SIZE)):
        is_row = (row + i * SIZE < count)[:, None]
        q, k_high, k_low = _keys(keys_at, is_row, key_heads * K)
        v = tl.load(v_at, mask=is_row, other=0.0)
        total = tl.load(total_at + row)
        end = tl.load(total_at + SIZE - 1)
        decay_from_start = share_of(total)[:, None]
        high, low = parts_of(state)
        predicted = add_product(nothing, k_high, k_low, high, low)
        out = (tl.dot(q, low) + tl.dot(q, high)) * decay_from_start
        solved_high, solved_low = tl.load(solved_at), tl.load(solved_at + SIZE * SIZE)
        high, low = parts_of(v - predicted * decay_from_start)
        stored = add_product(nothing, solved_high, solved_low, high, low)
        high, low = parts_of(stored)
        scores = tl.load(scores_at)
        out = out + tl.dot(scores, low) + tl.dot(scores, high)
        tl.store(read_at, out, mask=is_row)
        high, low = parts_of(stored * share_of(end - total)[:, None])
        state = add_product(state * share_of(end), tl.trans(k_high), tl.trans(k_low), high, low)
        if is_saved & (tl.minimum((i + 1) * SIZE, count) == save_after):
            tl.store(saved_state_at, state)
        keys_at += SIZE * 3 * key_heads * K
        v_at += SIZE * H * V
        read_at += SIZE * H * V
        solved_at += 2 * H * SIZE * SIZE
        scores_at += H * SIZE * SIZE
        total_at += H * SIZE
    if (count == 0) & (not is_saved):
        return
    if count > 0:
        tl.store(state_at, state)
    inputs = Inputs(
        rows=projected_at + start.to(tl.int64) * sizes.width,
        window=states.window + slot * (WINDOW * sizes.C),
        count=count,
    )
    saved_at = snapshots.window + save * (WINDOW * sizes.C)
    channel = 2 * key_heads * K + head * V + block * columns
    move_window(inputs, saved_at, save_after, is_saved, channel, columns, sizes)
    if (head % (H // key_heads) == 0) & (block == 0):
        channel = key_head * K
        move_window(inputs, saved_at, save_after, is_saved, channel, K, sizes)
        channel = (key_heads + key_head) * K
        move_window(inputs, saved_at, save_after, is_saved, channel, K, sizes)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _norm_kernel(
    projected_at, out_at, weights, requests, chunks, num_rows, num_requests, sizes: tl.constexpr,
    rows: tl.constexpr, digits: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and value head."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.arange(0, sizes.V)[None, :]
    keep = (row < tl.load(requests.starts + num_requests))[:, None]  # later rows are padding
    at = (row.to(tl.int64) * sizes.H + head)[:, None] * sizes.V + column
    read = tl.load(chunks.read + at, mask=keep, other=0.0)
    first = sizes.C + head * sizes.V
    z_at = projected_at + row.to(tl.int64)[:, None] * sizes.width + first + column
    z = tl.load(z_at, mask=keep, other=0.0)
    out = gated_norm(read, z, tl.load(weights.norm + column), weights.eps, digits)
    out = tl.where(keep, out, 0.0).to(out_at.dtype.element_ty)
    tl.store(out_at + at, out, mask=(row < num_rows)[:, None])
