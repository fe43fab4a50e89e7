"""LM-head epilogue: block partials of argmax and log-sum-exp (Pallas, Triton backend).

Greedy rows need only block partials, so their full logits are not stored: `sampling` reduces the
partials of all blocks. Logits are stored for blocks of rows in which some row needs them. Keys are
compared as in `sampling`, so the tokens equal those found in full rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float32, Int, Int32

from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_INFINITY,
    LOWEST,
    PAIRS,
    first_token,
    key_of,
    score_of,
    weight_of,
)
from kernels.pallas_gpu.sampling.topk import load_row

GROUP = 2 * PAIRS
ARGMAX_ONLY, LOGITS, GROUP_SUMEXP, GROUP_SUMEXP_AND_LOGITS = range(4)


class RowOutputs(NamedTuple):
    """Outputs that each row needs from the LM head.

    Attributes:
      asks: `ARGMAX_ONLY`: the argmax only. `LOGITS`: the logits. `GROUP_SUMEXP`: sums of
        exponentials per group of tokens. `GROUP_SUMEXP_AND_LOGITS`: logits and group sums, the
        logits for a second pass.
      temperature: Temperature of rows with logits and group sums at once; 1 for other rows.
      tokens: Number of outputs that are tokens: the shard of a rank may have padding.
    """

    asks: Int32[jax.Array, " R"]
    temperature: Float32[jax.Array, " R"]
    tokens: Int32[jax.Array, "1"]


class BlockPartials(NamedTuple):
    """Block partials of an LM-head GEMM.

    Attributes:
      asks, temperature, tokens: See `RowOutputs`.
      keys, ids: Best token of each block of outputs.
      bad: 1 if some logit of a block is not finite.
      peaks, masses: Group maxima and sums of exponentials, of rows with a temperature; see
        `logits_processing.store_groups`.
    """

    asks: Any
    temperature: Any
    tokens: Any
    keys: Any
    ids: Any
    bad: Any
    peaks: Any
    masses: Any


def partial_shapes(rows: int, outputs: int, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays for block partials of `columns` outputs each, by their names in
    `BlockPartials`.

    Raises:
      ValueError: A block is not a whole number of groups.
    """
    if columns % GROUP:
        raise ValueError(f"LM-head tiles must have a multiple of {GROUP} columns, got {columns}")
    of_blocks = jax.ShapeDtypeStruct((rows, pl.cdiv(outputs, columns)), jnp.int32)
    groups = (rows, pl.cdiv(outputs, GROUP))
    room = dict.fromkeys(("keys", "ids", "bad"), of_blocks)
    room["peaks"] = jax.ShapeDtypeStruct(groups, jnp.int32)
    return room | {"masses": jax.ShapeDtypeStruct(groups, jnp.float32)}


def row_outputs(
    seen: Any,
    positions: Int[jax.Array, "named ..."],
    sampling: Any,
    request: Int[jax.Array, "named ..."],
    *,
    num_tokens: int | Int[jax.Array, ""],
    nodes: int = 0,
    width: int = 0,
    is_warm_whole: bool = False,
) -> RowOutputs:
    """Computes the outputs that each row needs: logits if edited, group sums if sampled.

    XLA compiles it to one kernel.

    Args:
      seen, positions, sampling, request: Same as in `sampling.choose`.
      num_tokens: Tokens among the LM head's outputs; the shard of a rank may have fewer.
      nodes: Rows per request, if `positions` are per request; 0: `request` maps rows to
        requests.
      width: Tokens that are ranked per row, with their weights; 0: one token is sampled.
      is_warm_whole: Rows with a temperature need logits, and no group sums.
    """
    if nodes:
        B = len(positions)
        request = jnp.repeat(jnp.arange(B), nodes)
        positions = jnp.broadcast_to(positions.reshape(B, -1), (B, nodes)).ravel()
    is_edited = (sampling.repetition != 1) | (sampling.presence != 0) | (sampling.frequency != 0)
    is_edited |= (sampling.bias_values != 0).any(axis=1)
    is_edited = is_edited[request] | (positions < sampling.min_length[request])
    temperature = sampling.temperature[request]
    if is_warm_whole:
        is_edited |= temperature > 0
    is_sampled = (temperature > 0) & ~is_edited
    rest = (ARGMAX_ONLY, GROUP_SUMEXP, GROUP_SUMEXP_AND_LOGITS)[min(width, 2)]
    asks = jnp.where(is_sampled, GROUP_SUMEXP_AND_LOGITS, jnp.where(is_edited, LOGITS, rest))
    tokens = jnp.asarray(num_tokens, jnp.int32).reshape(1)
    return RowOutputs(asks.astype(jnp.int32), jnp.where(is_sampled, temperature, 1.0), tokens)


def store_partials(out, out_ref, given, left_refs, row, column, block):
    """Stores the partials of a block, and its logits if one of its rows needs them."""
    R, N = out_ref.shape
    *of_blocks, peaks_ref, masses_ref = left_refs
    is_row, is_column, is_token = row < R, column < N, column < given.tokens[0]
    keys = jnp.where(is_token[None, :], key_of(out), LOWEST)
    best = keys.max(axis=1)
    ids = jnp.where(keys == best[:, None], column[None, :], HIGHEST).min(axis=1)
    magnitudes = lax.bitcast_convert_type(out, jnp.int32) & HIGHEST
    is_bad = jnp.where(is_token[None, :], magnitudes, 0).max(axis=1) >= KEY_OF_INFINITY
    at_row = jnp.where(is_row, row, R)  # outside the array, for the interpreter
    for ref, left in zip(of_blocks, (best, ids, is_bad.astype(jnp.int32)), strict=True):
        pltriton.store(ref.at[at_row, jnp.full(row.shape, block)], left, mask=is_row)
    asks = pltriton.load(given.asks.at[row], mask=is_row, other=0)

    @pl.when(jnp.max(asks & LOGITS) > 0)
    def _():
        at = out_ref.at[at_row[:, None], jnp.where(is_column, column, N)[None, :]]
        pltriton.store(at, out, mask=is_row[:, None] & is_column[None, :])

    @pl.when(jnp.max(asks & GROUP_SUMEXP) > 0)
    def _():
        temperature = pltriton.load(given.temperature.at[row], mask=is_row, other=1.0)
        where = (peaks_ref, masses_ref, at_row, row, column, block, given.tokens[0])
        _store_groups(out / temperature[:, None], *where)


def _store_groups(x, peaks_ref, masses_ref, at_row, row, column, block, num_tokens):
    """Same as `logits_processing.store_groups`, for the groups of a block of rows."""
    groups = x.shape[1] // GROUP
    shape = (x.shape[0], groups, GROUP)
    keys = jnp.where((column < num_tokens)[None, :], key_of(x), LOWEST).reshape(shape)
    peaks = keys.max(axis=2)
    weights = weight_of(x.reshape(shape), score_of(peaks)[:, :, None], 1.0)
    units = jnp.where(keys > LOWEST, jnp.floor(weights * 2.0**24 + 0.5), 0.0).astype(jnp.int32)
    masses = units.sum(axis=2).astype(jnp.float32) * 2.0**-24
    group, of_row = block * groups + lax.iota(jnp.int32, groups), peaks_ref.shape[1]
    at = (at_row[:, None], jnp.where(group < of_row, group, of_row)[None, :])
    inside = (row < peaks_ref.shape[0])[:, None] & (group < of_row)[None, :]
    pltriton.store(peaks_ref.at[at], peaks, mask=inside)
    pltriton.store(masses_ref.at[at], masses, mask=inside)


def requested_outputs(leaves, row):
    """Returns the outputs that a row needs; the logits if there are no block partials."""
    return LOGITS if leaves is None else leaves.asks[row]


def best_of_partials(leaves, row):
    """Reduces the block partials of a row to the key and the index of its best token."""
    keys, ids = load_row(leaves.keys, (row,), LOWEST), load_row(leaves.ids, (row,), HIGHEST)
    return first_token(keys, ids)


def has_bad_partial(leaves, row):
    """Returns whether some block has logits that are not finite."""
    return jnp.max(load_row(leaves.bad, (row,), 0))
