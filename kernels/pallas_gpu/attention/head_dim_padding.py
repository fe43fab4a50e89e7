"""Padding of a head dimension to a power-of-two block (Pallas, Triton backend).

A block has the columns of the next power of two; columns past the head are 0 and occupy no memory.
A head dimension that is a power of two has no padding and no mask.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def columns_of(D):
    """Returns the column indices of a block."""
    return lax.iota(jnp.int32, pl.next_power_of_2(D))


def is_in_head(D):
    """Returns the mask of columns inside the head, [columns]; None means all."""
    return None if D & (D - 1) == 0 else columns_of(D) < D


def in_head(keep, D):
    """Restricts a row mask, [rows, 1], to the columns of the head; None keeps all."""
    if D & (D - 1) == 0:
        return keep
    is_column = is_in_head(D)[None, :]
    return is_column if keep is None else keep & is_column


def load_head(at, D):
    """Loads whole heads, [rows, columns]."""
    return load_kept(at, in_head(None, D))


def load_kept(at, keep):
    """Loads the elements that `keep` selects, 0 elsewhere; None selects all."""
    return pltriton.load(at) if keep is None else pltriton.load(at, mask=keep, other=0.0)


def outside(at, D, end):
    """Returns the write offsets of the columns of a block; columns past the head get `end`.

    They are not written, but in the interpreter they must not alias another head's columns.
    """
    return at if D & (D - 1) == 0 else jnp.where(columns_of(D) < D, at, end)
