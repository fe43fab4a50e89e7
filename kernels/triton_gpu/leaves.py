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
from jaxtyping import Int, Int32
from torch import Tensor

from kernels.triton_gpu.scores import (
    HIGHEST,
    KEY_OF_INFINITY,
    LOWEST,
    first_token,
    inputs_of,
    key_of,
    sizes_of,
    tokens_of,
    wish_of,
)


class Leaves(NamedTuple):
    """What the blocks of a product with a head have left.

    Attributes:
      asks: 1 for each row whose scores are in memory, else 0.
      keys, ids: Of the best token of each block of outputs.
      bad: 1 where some score of a block is not finite.
    """

    asks: Int32[Tensor, " R"]
    keys: Int32[Tensor, "R blocks"]
    ids: Int32[Tensor, "R blocks"]
    bad: Int32[Tensor, "R blocks"]

    @classmethod
    def of(cls, asks: Int32[Tensor, " R"], blocks: int) -> "Leaves":
        """Room for what so many blocks leave."""
        return cls(asks, *(asks.new_empty(len(asks), blocks) for _ in range(3)))


def asking(
    seen: Any,
    positions: Int[Tensor, " R"],
    sampling: Any,
    request: Int[Tensor, " R"],
) -> Int32[Tensor, " R"]:
    """1 for each row that asks for more than its best token, which takes its scores; else 0.

    Args:
      seen, positions, sampling, request: As of `sampling.choose`.
    """
    given = (seen, positions, sampling, request, None)
    asks = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    _asking_kernel[(len(positions),)](
        inputs_of(asks, *given, None, positions, 0),
        asks,
        sizes=sizes_of(seen.counts.shape[1], seen, sampling, None, 0, None),
        num_warps=1,
    )
    return asks


@triton.jit
def _asking_kernel(inputs, asks_at, sizes: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0)
    wish = wish_of(inputs, row, sizes)
    asks = (wish.temperature > 0) | wish.has_penalty | wish.is_short | (wish.biases > 0)
    tl.store(asks_at + row, asks.to(tl.int32))


@triton.jit
def store_leaves(out, ends, row, column, block, num_rows, sizes: tl.constexpr):
    """Stores what a block leaves of its rows, and its scores if one of them asks for them."""
    is_row, is_column = row < num_rows, (column < sizes.N)[None, :]
    keys = tl.where(is_column, key_of(out), LOWEST)
    best = tl.max(keys, 1)
    ids = tl.min(tl.where(keys == best[:, None], column[None, :], HIGHEST), 1)
    magnitudes = tl.where(is_column, out.to(tl.int32, bitcast=True) & HIGHEST, 0)
    is_bad = tl.max(magnitudes, 1) >= KEY_OF_INFINITY
    at = row * sizes.leaves + block
    tl.store(ends.keys + at, best, mask=is_row)
    tl.store(ends.ids + at, ids, mask=is_row)
    tl.store(ends.bad + at, is_bad.to(tl.int32), mask=is_row)
    asks = tl.load(ends.asks + row, mask=is_row, other=0)
    if tl.max(asks) > 0:
        place = row.to(tl.int64)[:, None] * sizes.N + column[None, :]
        tl.store(ends.out + place, out, mask=is_row[:, None] & is_column)


@triton.jit
def has_logits(leaves, row, num_leaves: tl.constexpr):
    """Whether a row's logits are in memory, which all are where no head has left anything."""
    is_there = tl.full((), True, tl.int1)
    if num_leaves > 0:
        is_there = tl.load(leaves.asks + row) != 0
    return is_there


@triton.jit
def join_leaves(
    leaves, row, best, inputs, sizes: tl.constexpr, num_leaves: tl.constexpr, lanes: tl.constexpr
):
    """Stores the best token of a row, of what all blocks have left."""
    block = tl.arange(0, lanes)
    at, inside = row * num_leaves + block, block < num_leaves
    keys = tl.load(leaves.keys + at, mask=inside, other=LOWEST)
    ids = tl.load(leaves.ids + at, mask=inside, other=HIGHEST)
    bad = tl.load(leaves.bad + at, mask=inside, other=0)
    _, winner = first_token(keys, ids)
    tl.store(best.ids + row, tokens_of(tl.minimum(winner, sizes.vocab - 1), inputs, sizes))
    tl.store(best.is_finite + row, tl.max(bad) == 0)
