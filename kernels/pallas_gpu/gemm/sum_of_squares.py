"""Order-independent sums of squares in fixed point (Pallas, Triton backend).

Implements `shared.spec.reduction_order.SquaresOrder`. A sum has three steps, so that callers can
combine partial sums: the exponent of the largest term, the terms as integers, and the integer sum
as a float.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def exponent_of(largest, digits):
    """Returns the exponent for non-negative terms, from the largest of them."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    return jnp.minimum(jnp.maximum(lax.shift_right_logical(bits, jnp.int32(23)), digits + 1), 254)


def units_of(terms, exponent, digits):
    """Converts terms to integers in fixed-point units."""
    return jnp.floor(terms * _power(digits + 254 - exponent) + 0.5).astype(jnp.int32)


def in_floats(units, exponent, digits):
    """Converts a fixed-point sum to a float."""
    return units.astype(jnp.float32) * _power(exponent - digits)


def add_up(terms, digits):
    """Adds the terms of each row, [rows, terms], none of them negative."""
    exponent = exponent_of(terms.max(axis=1), digits)
    return in_floats(units_of(terms, exponent[:, None], digits).sum(axis=1), exponent, digits)


def load_squares(squares_ref, row, is_row):
    """Loads the sums of squares of some rows, padded to a power of two of columns."""
    chunks = squares_ref.shape[1]
    place = lax.iota(jnp.int32, pl.next_power_of_2(chunks))
    mask = is_row[:, None] & (place < chunks)[None, :]
    return pltriton.load(squares_ref.at[row[:, None], place[None, :]], mask=mask, other=0.0)


def _power(exponent):
    """Returns the power of two with a biased exponent."""
    return lax.bitcast_convert_type(lax.shift_left(exponent, jnp.int32(23)), jnp.float32)
