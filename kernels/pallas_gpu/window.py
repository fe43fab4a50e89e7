"""What the rows of a request see behind the positions that all see, as bits, for Pallas."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton


def pack(window_ref, own, nodes):
    """Each lane's window as the bits of two numbers, and that of all lanes together."""
    nothing = (jnp.zeros(own.shape, jnp.int32), 0)
    low, any_low = _pack_word(window_ref, own, 0, nodes) if nodes > 0 else nothing
    high, any_high = _pack_word(window_ref, own, 32, nodes) if nodes > 32 else nothing
    return low, high, any_low, any_high


def _pack_word(window_ref, own, begin, nodes):
    bit = lax.iota(jnp.int32, 32)
    is_node = jnp.broadcast_to((begin + bit < nodes)[None, :], (len(own), 32))
    at = window_ref.at[own[:, None], jnp.minimum(begin + bit, nodes - 1)[None, :]]
    is_set = pltriton.load(at, mask=is_node, other=0).astype(jnp.int32)
    word = jnp.sum(lax.shift_left(is_set, jnp.broadcast_to(bit[None, :], is_set.shape)), axis=1)
    return word, jnp.sum(lax.shift_left(is_set.max(axis=0), bit))


def sees(position, first, until, window, nodes):
    """Which positions each lane sees, [lanes, positions]."""
    position = position[None, :]
    seen = (position >= first[:, None]) & (position < until[:, None])
    if nodes > 0:
        node = position - until[:, None]
        low, high = (jnp.broadcast_to(x[:, None], node.shape) for x in window[:2])
        seen |= is_in(low, high, node, nodes)
    return seen


def is_in(low, high, node, nodes):
    """Whether a bit is set, and is one."""
    bits = jnp.where(node < 32, low, high) if nodes > 32 else low
    is_set = lax.shift_right_arithmetic(bits, node & 31) & 1
    return (is_set != 0) & (node >= 0) & (node < nodes)
