"""What the blocks of a head's product leave of each row for the choice of tokens, for Pallas.

A row that asks for nothing but its best token needs no scores in memory: each block of the product
leaves the best of its own tokens, and `sampling` joins the blocks. Scores are stored of blocks of
rows of which one asks for more. Keys are compared as `sampling` compares them, so that the tokens
are those that it finds in whole rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int, Int32

from kernels.pallas_gpu.scores import (
    HIGHEST,
    KEY_OF_INFINITY,
    LOWEST,
    first_token,
    key_of,
    tokens_of,
)
from kernels.pallas_gpu.winners import load_row


class Leaves(NamedTuple):
    """What the blocks of a product with a head have left.

    Attributes:
      asks: 1 for each row whose scores are in memory, else 0.
      keys, ids: Of the best token of each block of outputs; there may be room for more rows.
      bad: 1 where some score of a block is not finite.
    """

    asks: Int32[jax.Array, " R"]
    keys: Int32[jax.Array, "rows blocks"]
    ids: Int32[jax.Array, "rows blocks"]
    bad: Int32[jax.Array, "rows blocks"]

    @classmethod
    def of(cls, asks: Int32[jax.Array, " R"], blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays in which so many blocks leave something."""
        return (jax.ShapeDtypeStruct((len(asks), blocks), jnp.int32),) * 3


def asking(
    seen: Any,
    positions: Int[jax.Array, " R"],
    sampling: Any,
    request: Int[jax.Array, " R"],
) -> Int32[jax.Array, " R"]:
    """1 for each row that asks for more than its best token, which takes its scores; else 0.

    XLA makes one kernel of it.

    Args:
      seen, positions, sampling, request: As of `sampling.choose`.
    """
    asks = (sampling.temperature > 0) | (sampling.repetition != 1)
    asks |= (sampling.presence != 0) | (sampling.frequency != 0)
    asks |= (sampling.bias_values != 0).any(axis=1)
    asks = asks[request] | (positions < sampling.min_length[request])
    return asks.astype(jnp.int32)


def store_leaves(out, out_ref, asks_ref, left_refs, row, column, block):
    """Stores what a block leaves of its rows, and its scores if one of them asks for them."""
    R, N = out_ref.shape
    is_row, is_column = row < R, column < N
    keys = jnp.where(is_column[None, :], key_of(out), LOWEST)
    best = keys.max(axis=1)
    ids = jnp.where(keys == best[:, None], column[None, :], HIGHEST).min(axis=1)
    magnitudes = lax.bitcast_convert_type(out, jnp.int32) & HIGHEST
    is_bad = jnp.where(is_column[None, :], magnitudes, 0).max(axis=1) >= KEY_OF_INFINITY
    at_row = jnp.where(is_row, row, R)  # outside for the interpreter
    for ref, left in zip(left_refs, (best, ids, is_bad.astype(jnp.int32)), strict=True):
        pltriton.store(ref.at[at_row, jnp.full(row.shape, block)], left, mask=is_row)
    asks = pltriton.load(asks_ref.at[row], mask=is_row, other=0)

    @pl.when(jnp.max(asks) > 0)
    def _():
        at = out_ref.at[at_row[:, None], jnp.where(is_column, column, N)[None, :]]
        pltriton.store(at, out, mask=is_row[:, None] & is_column[None, :])


def has_logits(leaves, row):
    """Whether a row's logits are in memory, which all are where no head has left anything."""
    return True if leaves is None else leaves.asks[row] != 0


def join_leaves(leaves, row, inputs, sizes):
    """The best token of a row, of what all blocks have left, and whether its scores are finite."""
    keys, ids = load_row(leaves.keys, (row,), LOWEST), load_row(leaves.ids, (row,), HIGHEST)
    _, winner = first_token(keys, ids)
    is_finite = 1 - jnp.max(load_row(leaves.bad, (row,), 0))
    return tokens_of(jnp.minimum(winner, sizes.vocab - 1), inputs, sizes), is_finite
