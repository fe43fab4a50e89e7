"""What the rows of a request see behind the positions that all see, as bits, in Triton."""

import triton
import triton.language as tl


@triton.jit
def pack(window_at, own, nodes: tl.constexpr):
    """Each lane's window as the bits of two numbers, and that of all lanes together."""
    low, any_low = tl.zeros(own.shape, tl.int32), 0
    high, any_high = low, 0
    if nodes > 0:
        low, any_low = _pack_word(window_at, own, 0, nodes)
    if nodes > 32:
        high, any_high = _pack_word(window_at, own, 32, nodes)
    return low, high, any_low, any_high


@triton.jit
def _pack_word(window_at, own, begin: tl.constexpr, nodes: tl.constexpr):
    bit = tl.arange(0, 32)
    at = window_at + own.to(tl.int64)[:, None] * nodes + (begin + bit)[None, :]
    is_set = tl.load(at, mask=((begin + bit) < nodes)[None, :], other=0).to(tl.int32)
    word = tl.sum(is_set << bit[None, :], axis=1)
    return word.to(tl.int32), tl.sum(tl.max(is_set, axis=0) << bit, axis=0).to(tl.int32)


@triton.jit
def sees(position, first, until, window, nodes: tl.constexpr):
    """Which positions each lane sees, [lanes, positions]."""
    position = position[None, :]
    seen = (position >= first[:, None]) & (position < until[:, None])
    if nodes > 0:
        seen |= is_in(window[0][:, None], window[1][:, None], position - until[:, None], nodes)
    return seen


@triton.jit
def is_in(low, high, node, nodes: tl.constexpr):
    """Whether a bit is set, and is one."""
    bits = low
    if nodes > 32:
        bits = tl.where(node < 32, low, high)
    return (((bits >> (node & 31)) & 1) != 0) & (node >= 0) & (node < nodes)
