"""Rotary embedding of rope parts (Pallas, Triton backend)."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def store_rotated(x_ref, cos_ref, sin_ref, row, start, keep, store, *, is_interleaved):
    """Rotates rope parts in float32 and stores them, to be rounded once.

    Args:
      x_ref, cos_ref, sin_ref: Rows `[R, columns]`, and the angles of each, `[R, half]`, one for
        each pair of elements.
      row, start: Row of each part, `[rows, 1]`, and the column of its first element.
      keep: Mask of the parts to store.
      store: Function that stores elements, given their places in the part, values and mask.
      is_interleaved: Whether a pair is of adjacent elements; otherwise of elements `half` apart.
    """
    half = cos_ref.shape[1]
    pair = lax.iota(jnp.int32, pl.next_power_of_2(half))[None, :]
    keep = keep & (pair < half)
    first, apart = (2 * pair, 1) if is_interleaved else (pair, half)

    def load(ref, columns):
        at = ref.at[row, columns]
        return pltriton.load(at, mask=keep, other=0.0).astype(jnp.float32)

    x, y = load(x_ref, start + first), load(x_ref, start + first + apart)
    cos, sin = load(cos_ref, pair), load(sin_ref, pair)
    store(first, x * cos - y * sin, keep)
    store(first + apart, y * cos + x * sin, keep)
