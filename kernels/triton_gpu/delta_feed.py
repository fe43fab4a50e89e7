"""Prompts through a gated-delta layer between its two products, in chunks of 64 rows, in Triton.

Four kernels. Convolution and norms of all rows; then of all chunks at once the gates, and the
inverse of the system that says how what a token stores depends on those before it; then the state
of each request and head is carried from chunk to chunk; and the outputs are normed. What the
matrix unit multiplies is bfloat16: queries, and the reach of queries to keys, are rounded to it,
and all that makes the states is cut into two such numbers, so that 16 of its bits count. See
`kernels/__init__.py` for what must stay equal in the Pallas twin.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import DeltaFeedTiles
from kernels.triton_gpu.delta_rows import (
    LOG2_E,
    WINDOW,
    convolved,
    gated_norm,
    gates,
    sum_by_halves,
    unit,
)
from kernels.triton_gpu.linear import launching

CHUNK = 64
"""Rows, as of `shared.spec.gated_delta`."""

_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)  # of the system, solved by itself
_BLOCKS = tl.constexpr(CHUNK // 16)
_NOTHING = tl.constexpr(-100.0)  # the log of a decay that counts as 0
_HIGH_BITS = tl.constexpr(-65536)  # of a float32 that a bfloat16 has


def feed(
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
    tiles: DeltaFeedTiles,
) -> Float[Tensor, "R values"]:
    """As `shared.spec.delta_mix.feed`, for rows in bfloat16 that lie together by request.

    Args:
      projected: See `shared.spec.mamba_state.split_inputs`.
      conv, a_log, dt_bias, norm, eps: Of the layer.
      recurrent, window, layer: The states of all layers, and which are read and written.
      saved_recurrent, saved_window: The snapshots of all layers.
      slots: The states of the requests, different ones but for requests without rows, whose states
        stay.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      save_after: Rows after which a state is saved: 0, a multiple of 64, or all of the request.
      save: Which snapshot it is written to; 0: none.
      digits: Of a unit of the squares: the order of their sums.
      tiles: How the work is cut.

    Returns:
      The heads' outputs side by side, zeros for padding.

    Raises:
      ValueError: States are not contiguous.
    """
    if not all(x.is_contiguous() for x in (recurrent, window, saved_recurrent, saved_window)):
        raise ValueError("states must be contiguous")
    R, (H, K, V), B = len(projected), recurrent.shape[2:], len(slots)
    C, chunks = window.shape[3], R // CHUNK + B
    key_heads = (C - H * V) // (2 * K)
    columns = min(tiles.columns, V)
    projected, *rows = (x.contiguous() for x in (projected, slots, row_starts, save_after, save))
    slots, row_starts, save_after, save = rows
    half, single = (
        partial(torch.empty, dtype=x, device=projected.device)
        for x in (torch.bfloat16, torch.float32)
    )
    keys, v, reach = half(R, 3 * key_heads * K), single(R, H, V), half(chunks, H, CHUNK, CHUNK)
    solved, total = half(chunks, H, 2, CHUNK, CHUNK), single(chunks, H, CHUNK)
    read, out = torch.empty_like(v), projected.new_empty((R, H * V))
    sizes = {"H": H, "K": K, "V": V, "C": C}
    how, requests = launching(projected), triton.next_power_of_2(B)
    _rows_kernel[(2 * key_heads + H, CHUNK // tiles.rows * chunks)](
        *(projected, conv, window[layer], slots, row_starts, keys, v, B),
        requests=requests,
        rows=tiles.rows,
        digits=digits,
        num_warps=tiles.row_warps,
        **(sizes | how),
    )
    _prepare_kernel[(H, chunks)](
        *(projected, keys, a_log, dt_bias, row_starts, solved, reach, total, B),
        requests=requests,
        num_warps=tiles.prepare_warps,
        **(sizes | how),
    )
    _carry_kernel[(V // columns, H, B)](
        *(projected, recurrent[layer], window[layer], saved_recurrent[layer], saved_window[layer]),
        *(slots, row_starts, save_after, save, keys, v, solved, reach, total, read),
        columns=columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **(sizes | how),
    )
    _norm_kernel[(H, triton.cdiv(R, tiles.rows))](
        *(projected, norm, row_starts, read, out, R, B, eps),
        H=H,
        V=V,
        C=C,
        rows=tiles.rows,
        digits=digits,
        num_warps=tiles.row_warps,
        **how,
    )
    return out


@triton.jit(do_not_specialize=["num_requests"])
def _rows_kernel(
    projected_at, conv_at, window_at, slots_at, starts_at, keys_at, v_at, num_requests,
    requests: tl.constexpr, rows: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, digits: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per some rows of a chunk and head: of queries, of keys or of values."""
    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    width: tl.constexpr = C + H * V + 2 * H
    head, part = tl.program_id(0), tl.program_id(1)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    chunk, within = part // (_CHUNK // rows), part % (_CHUNK // rows) * rows
    request, start, first, count = _rows_of(starts_at, chunk, num_requests, requests)
    node = first + within + tl.arange(0, rows)
    if first + within >= count:
        return
    start = start.to(tl.int64)
    slot = tl.load(slots_at + request).to(tl.int64)
    window_at += slot * (WINDOW * C)
    sources = (projected_at + start * width, window_at, conv_at, count)
    places = (node, node + 1, node + 2, node + 3)
    keep, row = (node < count)[:, None], start + node[:, None]
    if head < 2 * key_heads:
        x = unit(convolved(sources, places, head * K, K, C, width)[1], digits)
        at = keys_at + (row * (3 * key_heads) + head) * K + tl.arange(0, K)[None, :]
        if head < key_heads:
            tl.store(at, (x * (K**-0.5)).to(tl.bfloat16), mask=keep)
        else:
            high, low = _parts(x)
            tl.store(at, high, mask=keep)
            tl.store(at + key_heads * K, low, mask=keep)
    else:
        own = head - 2 * key_heads
        v = convolved(sources, places, 2 * key_heads * K + own * V, V, C, width)[1]
        tl.store(v_at + (row * H + own) * V + tl.arange(0, V)[None, :], v, mask=keep)


@triton.jit
def _rows_of(starts_at, chunk, num_requests, requests: tl.constexpr):
    """The request at a place of a chunk, its first row, the chunk's first there, and its count."""
    lane = tl.arange(0, requests)
    is_one = lane < num_requests
    starts = tl.load(starts_at + lane, mask=is_one, other=0)
    begins = is_one & (_first_chunk(starts, lane) <= chunk)
    request = tl.sum(begins.to(tl.int32), 0) - 1
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    return request, start, (chunk - _first_chunk(start, request)) * _CHUNK, stop - start


@triton.jit
def _first_chunk(start, request):
    """The place of a request's first chunk, which depends on the rows before it alone.

    Places of requests do not overlap: one that is cut anywhere has a chunk more at most.
    """
    return start // _CHUNK + request


@triton.jit(do_not_specialize=["num_requests"])
def _prepare_kernel(
    projected_at, keys_at, a_log_at, dt_bias_at, starts_at, solved_at, reach_at, total_at,
    num_requests, requests: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per value head and place of a chunk."""
    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    width: tl.constexpr = C + H * V + 2 * H
    head, chunk = tl.program_id(0), tl.program_id(1)
    key_head = head // (H // key_heads)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    _, start, first, count = _rows_of(starts_at, chunk, num_requests, requests)
    if first >= count:
        return
    row, column = tl.arange(0, _CHUNK), tl.arange(0, _CHUNK)
    is_row, at = first + row < count, (start + first).to(tl.int64) + row
    gates_at = projected_at + at * width + (C + H * V + head)
    b = tl.load(gates_at, mask=is_row, other=0.0)
    a = tl.load(gates_at + H, mask=is_row, other=0.0)
    log_decay, beta = gates(b, a, tl.load(a_log_at + head), tl.load(dt_bias_at + head))
    # No less than counts, so that the sum keeps its digits after a token that forgets all.
    log_decay = tl.where(is_row, tl.maximum(log_decay * LOG2_E, _NOTHING), 0.0)
    beta = tl.where(is_row, beta, 0.0)
    total = sum_by_halves(tl.where(row[:, None] <= column[None, :], log_decay[:, None], 0.0))
    place = chunk.to(tl.int64) * H + head
    tl.store(total_at + place * _CHUNK + column, total)
    # Masked before the power: above the diagonal the difference is positive and would overflow.
    is_seen = row[:, None] >= column[None, :]
    decay = _share(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
    decay = tl.where(is_seen, decay, 0.0)
    keys_at += (at[:, None] * (3 * key_heads) + key_head) * K + tl.arange(0, K)[None, :]
    q, k_high, k_low = _keys(keys_at, is_row[:, None], key_heads * K)
    high, low = tl.trans(k_high), tl.trans(k_low)
    reach = (tl.dot(q, low) + tl.dot(q, high)) * decay
    square = row[:, None] * _CHUNK + column[None, :]
    tl.store(reach_at + place * (_CHUNK * _CHUNK) + square, reach.to(tl.bfloat16))
    among = _add_product(tl.zeros_like(decay), k_high, k_low, high, low) * decay * beta[:, None]
    among = tl.where(row[:, None] > column[None, :], among, 0.0)
    high, low = _parts(_inverse(among) * beta[None, :])
    solved_at += place * (2 * _CHUNK * _CHUNK) + square
    tl.store(solved_at, high)
    tl.store(solved_at + _CHUNK * _CHUNK, low)


@triton.jit
def _inverse(among):
    """The inverse of 1 + `among`, which has nothing on its diagonal or above.

    Blocks on the diagonal first, all at once, then pairs of blocks to blocks of twice the size. All
    that is in an inverse is at most 1 where keys have length 1, which powers of `among` are not.
    """
    inverse = _joined(_inverse_of_blocks(among), among, _BLOCK)
    return _joined(inverse, among, 2 * _BLOCK)


@triton.jit
def _joined(inverse, among, size: tl.constexpr):
    """The inverses of blocks of twice the size from those of blocks of a size."""
    row, column = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
    between = _product(tl.where(is_between, among, 0.0), inverse)
    return inverse - _product(inverse, between)


@triton.jit
def _inverse_of_blocks(among):
    """That of the blocks on the diagonal: a row, once known, is taken from all rows below it."""
    row = tl.arange(0, _BLOCK)[None, :, None]
    column = tl.arange(0, _BLOCK)[None, None, :]
    block, other = (
        tl.arange(0, _BLOCKS)[:, None, None, None],
        tl.arange(0, _BLOCKS)[None, None, :, None],
    )
    is_own = block == other
    whole = tl.reshape(among, (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    # Sums of one number and zeros, here and below, which have one order.
    blocks = tl.sum(tl.where(is_own, whole, 0.0), 2)
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(blocks)
    for i in tl.static_range(_BLOCK - 1):
        share = tl.sum(tl.where(column == i, blocks, 0.0), 2)
        known = tl.sum(tl.where(row == i, inverse, 0.0), 1)
        inverse -= share[:, :, None] * known[:, None, :]
    whole = tl.where(is_own, inverse[:, :, None, :], 0.0)
    return tl.reshape(whole, (_CHUNK, _CHUNK))


@triton.jit
def _product(x, y):
    """Of float32 numbers, of which 16 bits count."""
    x_high, x_low = _parts(x)
    y_high, y_low = _parts(y)
    return _add_product(tl.zeros_like(x), x_high, x_low, y_high, y_low)


@triton.jit
def _add_product(total, x_high, x_low, y_high, y_low):
    """Adds a product of parts; the matrix unit begins with the total, and with the least parts."""
    return total + tl.dot(x_low, y_high) + tl.dot(x_high, y_low) + tl.dot(x_high, y_high)


@triton.jit
def _keys(at, is_row, apart: tl.constexpr):
    """The rows of the queries and of both parts of the keys; none past the end of a request."""
    q = tl.load(at, mask=is_row, other=0.0)
    high = tl.load(at + apart, mask=is_row, other=0.0)
    return q, high, tl.load(at + 2 * apart, mask=is_row, other=0.0)


@triton.jit
def _parts(x):
    """A number as the sum of two in bfloat16; the first is cut off, so no compiler drops it."""
    high = (x.to(tl.int32, bitcast=True) & _HIGH_BITS).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _share(log):
    """What is left after decays, 2 to a power of at most 0; what is too small for digits is 0."""
    return tl.where(log > _NOTHING, tl.exp2(tl.maximum(log, _NOTHING)), 0.0)


@triton.jit
def _carry_kernel(
    projected_at, state_at, window_at, saved_state_at, saved_window_at, slots_at, starts_at,
    save_after_at, save_at, keys_at, v_at, solved_at, reach_at, total_at, read_at, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, columns: tl.constexpr,
    is_launched: tl.constexpr,
):  # fmt: skip
    """One program per block of columns of the state, value head and request."""
    key_heads: tl.constexpr = (C - H * V) // (2 * K)
    width: tl.constexpr = C + H * V + 2 * H
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (H // key_heads)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    slot, save = tl.load(slots_at + request).to(tl.int64), tl.load(save_at + request).to(tl.int64)
    save_after, count = tl.load(save_after_at + request), stop - start
    column = block * columns + tl.arange(0, columns)[None, :]
    in_state = tl.arange(0, K)[:, None] * V + column
    state_at += (slot * H + head) * (K * V) + in_state
    saved_state_at += (save * H + head) * (K * V) + in_state
    state = tl.load(state_at)
    ends = (save_after % _CHUNK == 0) | (save_after == count)
    is_saved = (save != 0) & (save_after >= 0) & (save_after <= count) & ends
    if is_saved & (save_after == 0):
        tl.store(saved_state_at, state)

    row = tl.arange(0, _CHUNK)
    square = row[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    place = _first_chunk(start, request).to(tl.int64) * H + head
    solved_at += place * (2 * _CHUNK * _CHUNK) + square
    reach_at += place * (_CHUNK * _CHUNK) + square
    total_at += place * _CHUNK
    at = start.to(tl.int64) + row[:, None]
    keys_at += (at * (3 * key_heads) + key_head) * K + tl.arange(0, K)[None, :]
    in_values = (at * H + head) * V + column
    v_at += in_values
    read_at += in_values
    nothing = tl.zeros((_CHUNK, columns), tl.float32)
    for i in range(0, tl.cdiv(count, _CHUNK)):
        is_row = (row + i * _CHUNK < count)[:, None]
        q, k_high, k_low = _keys(keys_at, is_row, key_heads * K)
        v = tl.load(v_at, mask=is_row, other=0.0)
        total = tl.load(total_at + row)
        end = tl.load(total_at + _CHUNK - 1)
        carried = _share(total)[:, None]
        high, low = _parts(state)
        known = _add_product(nothing, k_high, k_low, high, low)
        out = (tl.dot(q, low) + tl.dot(q, high)) * carried
        solved_high, solved_low = tl.load(solved_at), tl.load(solved_at + _CHUNK * _CHUNK)
        high, low = _parts(v - known * carried)
        stored = _add_product(nothing, solved_high, solved_low, high, low)
        high, low = _parts(stored)
        reach = tl.load(reach_at)
        out = out + tl.dot(reach, low) + tl.dot(reach, high)
        tl.store(read_at, out, mask=is_row)
        high, low = _parts(stored * _share(end - total)[:, None])
        state = _add_product(state * _share(end), tl.trans(k_high), tl.trans(k_low), high, low)
        if is_saved & (tl.minimum((i + 1) * _CHUNK, count) == save_after):
            tl.store(saved_state_at, state)
        keys_at += _CHUNK * 3 * key_heads * K
        v_at += _CHUNK * H * V
        read_at += _CHUNK * H * V
        solved_at += 2 * H * _CHUNK * _CHUNK
        reach_at += H * _CHUNK * _CHUNK
        total_at += H * _CHUNK
    if (count == 0) & (not is_saved):
        return
    if count > 0:
        tl.store(state_at, state)
    rows_at = projected_at + start.to(tl.int64) * width
    window_at += slot * (WINDOW * C)
    saved_window_at += save * (WINDOW * C)
    given = (rows_at, window_at, saved_window_at, count, save_after, is_saved)
    channel = 2 * key_heads * K + head * V + block * columns
    _move_window(given, channel, columns, C, width)
    if (head % (H // key_heads) == 0) & (block == 0):
        _move_window(given, key_head * K, K, C, width)
        _move_window(given, (key_heads + key_head) * K, K, C, width)


@triton.jit
def _move_window(given, first, D: tl.constexpr, C: tl.constexpr, width: tl.constexpr):
    """Writes the windows of some channels after the rows, and after what is saved."""
    rows_at, window_at, saved_at, count, save_after, is_saved = given
    lane, channel = tl.arange(0, 4), first + tl.arange(0, D)[None, :]
    is_one, at = (lane < WINDOW)[:, None], lane[:, None] * C + channel
    if is_saved:
        saved = _window_after(rows_at, window_at, save_after, lane, channel, C, width)
        tl.store(saved_at + at, saved, mask=is_one)
    new = _window_after(rows_at, window_at, count, lane, channel, C, width)
    tl.debug_barrier()  # other threads may have read where this one writes
    tl.store(window_at + at, new, mask=is_one)


@triton.jit
def _window_after(rows_at, window_at, taken, lane, channel, C: tl.constexpr, width: tl.constexpr):
    """Rows `taken` to `taken + 3` of the old window and a request's rows, one behind the other."""
    place, is_one = taken + lane, lane < WINDOW
    is_new, is_old = (is_one & (place >= WINDOW))[:, None], (is_one & (place < WINDOW))[:, None]
    at = rows_at + (place - WINDOW).to(tl.int64)[:, None] * width + channel
    new = tl.load(at, mask=is_new, other=0.0)
    old = tl.load(window_at + place[:, None] * C + channel, mask=is_old, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _norm_kernel(
    projected_at, norm_at, starts_at, read_at, out_at, num_rows, num_requests, eps,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, rows: tl.constexpr, digits: tl.constexpr,
    is_launched: tl.constexpr,
):  # fmt: skip
    """One program per some rows and value head."""
    width: tl.constexpr = C + H * V + 2 * H
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.arange(0, V)[None, :]
    keep = (row < tl.load(starts_at + num_requests))[:, None]  # the others are padding
    at = (row.to(tl.int64) * H + head)[:, None] * V + column
    read = tl.load(read_at + at, mask=keep, other=0.0)
    z_at = projected_at + row.to(tl.int64)[:, None] * width + (C + head * V) + column
    z = tl.load(z_at, mask=keep, other=0.0)
    out = gated_norm(read, z, tl.load(norm_at + column), eps, digits)
    out = tl.where(keep, out, 0.0).to(out_at.dtype.element_ty)
    tl.store(out_at + at, out, mask=(row < num_rows)[:, None])
