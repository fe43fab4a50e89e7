"""LM-head epilogue: block partials of argmax and log-sum-exp (Triton).

Greedy rows need only block partials, so their full logits are not stored: `sampling` reduces the
partials of all blocks. Logits are stored for blocks of rows in which some row needs them. Keys are
compared as in `sampling`, so the tokens equal those found in full rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int, Int32
from torch import Tensor

from kernels.triton_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_INFINITY,
    LOWEST,
    PAIRS,
    first_token,
    inputs_of,
    key_of,
    row_sampling,
    score_of,
    sizes_of,
    weight_of,
)

GROUP = 2 * PAIRS.value
ARGMAX_ONLY, LOGITS, GROUP_SUMEXP, GROUP_SUMEXP_AND_LOGITS = (
    tl.constexpr(kind) for kind in range(4)
)


class BlockPartials(NamedTuple):
    """Block partials of an LM-head GEMM.

    Attributes:
      asks, temperature, tokens: See `RowOutputs`.
      keys, ids: Best token of each block of outputs.
      bad: 1 if some logit of a block is not finite.
      peaks, masses: Group maxima and sums of exponentials, of rows with a temperature; see
        `logits_processing.store_groups`.
    """

    asks: Int32[Tensor, " R"]
    temperature: Float32[Tensor, " R"]
    tokens: Int32[Tensor, "1"]
    keys: Int32[Tensor, "R blocks"]
    ids: Int32[Tensor, "R blocks"]
    bad: Int32[Tensor, "R blocks"]
    peaks: Int32[Tensor, "R groups"]
    masses: Float32[Tensor, "R groups"]

    @classmethod
    def of(cls, asks: "RowOutputs", outputs: int, columns: int) -> "BlockPartials":
        """Allocates the arrays for block partials of `columns` outputs each.

        Raises:
          ValueError: A block is not a whole number of groups.
        """
        if columns % GROUP:
            raise ValueError(
                f"LM-head tiles must have a multiple of {GROUP} columns, got {columns}"
            )
        R, room = len(asks.asks), asks.asks.new_empty
        keys, ids, bad = room(3, R, triton.cdiv(outputs, columns))
        peaks = room(R, triton.cdiv(outputs, GROUP))
        masses = torch.empty_like(peaks, dtype=torch.float32)
        return cls(*asks, keys, ids, bad, peaks, masses)


class RowOutputs(NamedTuple):
    """Outputs that each row needs from the LM head.

    Attributes:
      asks: `ARGMAX_ONLY`: the argmax only. `LOGITS`: the logits. `GROUP_SUMEXP`: sums of
        exponentials per group of tokens. `GROUP_SUMEXP_AND_LOGITS`: logits and group sums, the
        logits for a second pass.
      temperature: Temperature of rows with logits and group sums at once; 1 for other rows.
      tokens: Number of outputs that are tokens: the shard of a rank may have padding.
    """

    asks: Int32[Tensor, " R"]
    temperature: Float32[Tensor, " R"]
    tokens: Int32[Tensor, "1"]


def row_outputs(
    seen: Any,
    positions: Int[Tensor, "named ..."],
    sampling: Any,
    request: Int[Tensor, "named ..."],
    *,
    num_tokens: int,
    nodes: int = 0,
    width: int = 0,
    is_warm_whole: bool = False,
) -> RowOutputs:
    """Computes the outputs that each row needs: logits if edited, group sums if sampled.

    Args:
      seen, positions, sampling, request: Same as in `sampling.choose`.
      num_tokens: Tokens among the LM head's outputs; the shard of a rank may have fewer.
      nodes: Rows per request, if `positions` are per request; 0: `request` maps rows to
        requests.
      width: Tokens that are ranked per row, with their weights; 0: one token is sampled.
      is_warm_whole: Rows with a temperature need logits, and no group sums.
    """
    R, given = len(seen.slots), (seen, positions, sampling, request, None)
    asks = torch.empty(R, dtype=torch.int32, device=positions.device)
    temperature, tokens = torch.empty_like(asks, dtype=torch.float32), asks.new_empty(1)
    rest = (ARGMAX_ONLY, GROUP_SUMEXP, GROUP_SUMEXP_AND_LOGITS)[min(width, 2)].value
    _asking_kernel[(R,)](
        inputs_of(temperature, *given, None, positions, 0, None),
        *(asks, temperature, tokens, num_tokens),
        sizes=sizes_of(seen.counts.shape[1], seen, sampling, None, nodes, positions, None),
        rest=rest,
        is_warm_whole=is_warm_whole,
        num_warps=1,
    )
    return RowOutputs(asks, temperature, tokens)


@triton.jit
def _asking_kernel(
    inputs,
    asks_at,
    temperature_at,
    tokens_at,
    num_tokens,
    sizes: tl.constexpr,
    rest: tl.constexpr,
    is_warm_whole: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    tl.store(tokens_at, num_tokens)
    params = row_sampling(inputs, row, sizes)
    is_edited = params.has_penalty | params.below_min_length | (params.biases > 0)
    if is_warm_whole:
        is_edited |= params.temperature > 0
    is_sampled = (params.temperature > 0) & (is_edited == 0)
    asks = tl.where(is_edited, LOGITS, rest)
    tl.store(asks_at + row, tl.where(is_sampled, GROUP_SUMEXP_AND_LOGITS, asks))
    tl.store(temperature_at + row, tl.where(is_sampled, params.temperature, 1.0))


@triton.jit
def store_partials(out, args, row, column, block, num_rows, sizes: tl.constexpr):
    """Stores the partials of a block, and its logits if one of its rows needs them."""
    is_row, is_column = row < num_rows, (column < sizes.N)[None, :]
    is_token = (column < tl.load(args.tokens))[None, :]
    keys = tl.where(is_token, key_of(out), LOWEST)
    best = tl.max(keys, 1)
    ids = tl.min(tl.where(keys == best[:, None], column[None, :], HIGHEST), 1)
    magnitudes = tl.where(is_token, out.to(tl.int32, bitcast=True) & HIGHEST, 0)
    is_bad = tl.max(magnitudes, 1) >= KEY_OF_INFINITY
    at = row * sizes.leaves + block
    tl.store(args.keys + at, best, mask=is_row)
    tl.store(args.ids + at, ids, mask=is_row)
    tl.store(args.bad + at, is_bad.to(tl.int32), mask=is_row)
    asks = tl.load(args.asks + row, mask=is_row, other=0)
    if tl.max(asks & LOGITS) > 0:
        place = row.to(tl.int64)[:, None] * sizes.N + column[None, :]
        tl.store(args.out + place, out, mask=is_row[:, None] & is_column)
    if tl.max(asks & GROUP_SUMEXP) > 0:
        temperature = tl.load(args.temperature + row, mask=is_row, other=1.0)
        _store_groups(out / temperature[:, None], args, row, column, block, num_rows, sizes)


@triton.jit
def _store_groups(x, args, row, column, block, num_rows, sizes: tl.constexpr):
    """Same as `logits_processing.store_groups`, for the groups of a block of rows."""
    groups: tl.constexpr = x.shape[1] // (2 * PAIRS)
    shape: tl.constexpr = (x.shape[0], groups, 2 * PAIRS)
    keys = tl.where((column < tl.load(args.tokens))[None, :], key_of(x), LOWEST)
    keys, x = tl.reshape(keys, shape), tl.reshape(x, shape)
    peaks = tl.max(keys, 2)
    weights = weight_of(x, score_of(peaks)[:, :, None], 1.0)
    units = tl.where(keys > LOWEST, tl.floor(weights * 2.0**24 + 0.5), 0.0).to(tl.int32)
    masses = tl.sum(units, 2).to(tl.float32) * 2.0**-24
    group, of_row = block * groups + tl.arange(0, groups), tl.cdiv(sizes.N, 2 * PAIRS)
    at = row[:, None] * of_row + group[None, :]
    inside = (row < num_rows)[:, None] & (group < of_row)[None, :]
    tl.store(args.peaks + at, peaks, mask=inside)
    tl.store(args.masses + at, masses, mask=inside)


@triton.jit
def requested_outputs(leaves, row, num_leaves: tl.constexpr):
    """Returns the outputs that a row needs; the logits if there are no block partials."""
    asks = tl.full((), LOGITS, tl.int32)
    if num_leaves > 0:
        asks = tl.load(leaves.asks + row)
    return asks


@triton.jit
def best_of_partials(leaves, row, num_leaves: tl.constexpr, lanes: tl.constexpr):
    """Reduces the block partials of a row to the key and the index of its best token."""
    block = tl.arange(0, lanes)
    at, inside = row * num_leaves + block, block < num_leaves
    keys = tl.load(leaves.keys + at, mask=inside, other=LOWEST)
    ids = tl.load(leaves.ids + at, mask=inside, other=HIGHEST)
    return first_token(keys, ids)


@triton.jit
def has_bad_partial(leaves, row, num_leaves: tl.constexpr, lanes: tl.constexpr):
    """Returns whether some block has logits that are not finite."""
    block = tl.arange(0, lanes)
    bad = tl.load(leaves.bad + row * num_leaves + block, mask=block < num_leaves, other=0)
    return tl.max(bad)
