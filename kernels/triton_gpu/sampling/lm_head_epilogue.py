"""What the blocks of a head's product leave of each row for the choice of tokens, in Triton.

A row that asks for nothing but its best token needs no scores in memory: each block of the product
leaves the best of its own tokens, and `sampling` joins the blocks. Scores are stored of blocks of
rows of which one asks for more. Keys are compared as `sampling` compares them, so that the tokens
are those that it finds in whole rows.
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
    score_of,
    sizes_of,
    weight_of,
    wish_of,
)

GROUP = 2 * PAIRS.value
NOTHING, SCORES, MASSES, GROUPS = (tl.constexpr(kind) for kind in range(4))


class Leaves(NamedTuple):
    """What the blocks of a product with a head have left.

    Attributes:
      asks, warmth, tokens: See `Asks`.
      keys, ids: Of the best token of each block of outputs.
      bad: 1 where some score of a block is not finite.
      peaks, masses: Of groups of rows with a temperature, see `scores.store_groups`.
    """

    asks: Int32[Tensor, " R"]
    warmth: Float32[Tensor, " R"]
    tokens: Int32[Tensor, "1"]
    keys: Int32[Tensor, "R blocks"]
    ids: Int32[Tensor, "R blocks"]
    bad: Int32[Tensor, "R blocks"]
    peaks: Int32[Tensor, "R groups"]
    masses: Float32[Tensor, "R groups"]

    @classmethod
    def of(cls, asks: "Asks", outputs: int, columns: int) -> "Leaves":
        """Room for what blocks of so many columns leave.

        Raises:
          ValueError: The blocks do not have whole groups.
        """
        if columns % GROUP:
            raise ValueError(f"blocks of a head must have whole groups of {GROUP}, got {columns}")
        R, room = len(asks.asks), asks.asks.new_empty
        keys, ids, bad = room(3, R, triton.cdiv(outputs, columns))
        peaks = room(R, triton.cdiv(outputs, GROUP))
        masses = torch.empty_like(peaks, dtype=torch.float32)
        return cls(*asks, keys, ids, bad, peaks, masses)


class Asks(NamedTuple):
    """What each row asks a head for.

    Attributes:
      asks: `NOTHING` but the best token; `SCORES`; `MASSES`, what groups hold; or `GROUPS`, both,
        the scores for a second pass.
      warmth: The temperature of rows that ask for both at one; 1 of the others.
      tokens: How many of the head's outputs are tokens: places of a rank may be empty.
    """

    asks: Int32[Tensor, " R"]
    warmth: Float32[Tensor, " R"]
    tokens: Int32[Tensor, "1"]


def asking(
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
    *,
    num_tokens: int,
    nodes: int = 0,
    width: int = 0,
    is_warm_whole: bool = False,
) -> Asks:
    """What rows ask for: scores where some are edited, and groups where there is a temperature.

    Args:
      seen, positions, sampling, request: As of `sampling.choose`.
      num_tokens: Of the head's outputs; those of a rank's part may be fewer.
      nodes: Rows of a request, whose positions are its own; 0: `request` names it.
      width: Tokens that are ranked of each row, with their weights; 0: one is chosen.
      is_warm_whole: A row with a temperature asks for its scores alone.
    """
    R, given = len(seen.slots), (seen, positions, sampling, request, None)
    asks = torch.empty(R, dtype=torch.int32, device=positions.device)
    warmth, tokens = torch.empty_like(asks, dtype=torch.float32), asks.new_empty(1)
    rest = (NOTHING, MASSES, GROUPS)[min(width, 2)].value
    _asking_kernel[(R,)](
        inputs_of(warmth, *given, None, positions, 0, None),
        *(asks, warmth, tokens, num_tokens),
        sizes=sizes_of(seen.counts.shape[1], seen, sampling, None, nodes, None),
        rest=rest,
        is_warm_whole=is_warm_whole,
        num_warps=1,
    )
    return Asks(asks, warmth, tokens)


@triton.jit
def _asking_kernel(
    inputs, asks_at, warmth_at, tokens_at, num_tokens, sizes: tl.constexpr, rest: tl.constexpr,
    is_warm_whole: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0)
    tl.store(tokens_at, num_tokens)
    wish = wish_of(inputs, row, sizes)
    is_edited = wish.has_penalty | wish.is_short | (wish.biases > 0)
    if is_warm_whole:
        is_edited |= wish.temperature > 0
    is_warm = (wish.temperature > 0) & (is_edited == 0)
    asks = tl.where(is_edited, SCORES, rest)
    tl.store(asks_at + row, tl.where(is_warm, GROUPS, asks))
    tl.store(warmth_at + row, tl.where(is_warm, wish.temperature, 1.0))


@triton.jit
def store_leaves(out, ends, row, column, block, num_rows, sizes: tl.constexpr):
    """Stores what a block leaves of its rows, and its scores if one of them asks for them."""
    is_row, is_column = row < num_rows, (column < sizes.N)[None, :]
    is_token = (column < tl.load(ends.tokens))[None, :]
    keys = tl.where(is_token, key_of(out), LOWEST)
    best = tl.max(keys, 1)
    ids = tl.min(tl.where(keys == best[:, None], column[None, :], HIGHEST), 1)
    magnitudes = tl.where(is_token, out.to(tl.int32, bitcast=True) & HIGHEST, 0)
    is_bad = tl.max(magnitudes, 1) >= KEY_OF_INFINITY
    at = row * sizes.leaves + block
    tl.store(ends.keys + at, best, mask=is_row)
    tl.store(ends.ids + at, ids, mask=is_row)
    tl.store(ends.bad + at, is_bad.to(tl.int32), mask=is_row)
    asks = tl.load(ends.asks + row, mask=is_row, other=0)
    if tl.max(asks & SCORES) > 0:
        place = row.to(tl.int64)[:, None] * sizes.N + column[None, :]
        tl.store(ends.out + place, out, mask=is_row[:, None] & is_column)
    if tl.max(asks & MASSES) > 0:
        warmth = tl.load(ends.warmth + row, mask=is_row, other=1.0)
        _store_groups(out / warmth[:, None], ends, row, column, block, num_rows, sizes)


@triton.jit
def _store_groups(x, ends, row, column, block, num_rows, sizes: tl.constexpr):
    """As `scores.store_groups`, of the groups of a block of rows."""
    groups: tl.constexpr = x.shape[1] // (2 * PAIRS)
    shape: tl.constexpr = (x.shape[0], groups, 2 * PAIRS)
    keys = tl.where((column < tl.load(ends.tokens))[None, :], key_of(x), LOWEST)
    keys, x = tl.reshape(keys, shape), tl.reshape(x, shape)
    peaks = tl.max(keys, 2)
    weights = weight_of(x, score_of(peaks)[:, :, None], 1.0)
    units = tl.where(keys > LOWEST, tl.floor(weights * 2.0**24 + 0.5), 0.0).to(tl.int32)
    masses = tl.sum(units, 2).to(tl.float32) * 2.0**-24
    group, of_row = block * groups + tl.arange(0, groups), tl.cdiv(sizes.N, 2 * PAIRS)
    at = row[:, None] * of_row + group[None, :]
    inside = (row < num_rows)[:, None] & (group < of_row)[None, :]
    tl.store(ends.peaks + at, peaks, mask=inside)
    tl.store(ends.masses + at, masses, mask=inside)


@triton.jit
def asked_of(leaves, row, num_leaves: tl.constexpr):
    """What a row asks for: scores, where no head has left anything."""
    asks = tl.full((), SCORES, tl.int32)
    if num_leaves > 0:
        asks = tl.load(leaves.asks + row)
    return asks


@triton.jit
def best_left(leaves, row, num_leaves: tl.constexpr, lanes: tl.constexpr):
    """The key and the place in the head of the best token of what all blocks have left of a row."""
    block = tl.arange(0, lanes)
    at, inside = row * num_leaves + block, block < num_leaves
    keys = tl.load(leaves.keys + at, mask=inside, other=LOWEST)
    ids = tl.load(leaves.ids + at, mask=inside, other=HIGHEST)
    return first_token(keys, ids)


@triton.jit
def is_left_bad(leaves, row, num_leaves: tl.constexpr, lanes: tl.constexpr):
    """Whether some block has left word of scores that are not finite."""
    block = tl.arange(0, lanes)
    bad = tl.load(leaves.bad + row * num_leaves + block, mask=block < num_leaves, other=0)
    return tl.max(bad)
