"""Sums of squares that no order changes, for Pallas; see
`shared.spec.reduction_order.SquaresOrder`.

Terms are added in three steps, so that a caller can add parts that it holds apart: the exponent of
the largest term, whole numbers of units, and their sum as a float again.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def exponent_of(largest, digits):
    """Of terms whose largest is given, none of them negative."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    return jnp.minimum(jnp.maximum(lax.shift_right_logical(bits, jnp.int32(23)), digits + 1), 254)


def units_of(terms, exponent, digits):
    """Terms as whole numbers of units."""
    return jnp.floor(terms * _power(digits + 254 - exponent) + 0.5).astype(jnp.int32)


def in_floats(units, exponent, digits):
    """A sum of units as the float that it stands for."""
    return units.astype(jnp.float32) * _power(exponent - digits)


def add_up(terms, digits):
    """Adds the terms of each row, [rows, terms], none of them negative."""
    exponent = exponent_of(terms.max(axis=1), digits)
    return in_floats(units_of(terms, exponent[:, None], digits).sum(axis=1), exponent, digits)


def load_squares(squares_ref, row, is_row):
    """The squares of some rows, in as many columns as the next power of two."""
    chunks = squares_ref.shape[1]
    place = lax.iota(jnp.int32, pl.next_power_of_2(chunks))
    mask = is_row[:, None] & (place < chunks)[None, :]
    return pltriton.load(squares_ref.at[row[:, None], place[None, :]], mask=mask, other=0.0)


def _power(exponent):
    """The power of two with a biased exponent."""
    return lax.bitcast_convert_type(lax.shift_left(exponent, jnp.int32(23)), jnp.float32)
