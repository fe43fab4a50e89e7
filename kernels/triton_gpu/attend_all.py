"""Attention of a picture's patches, which see each other, in Triton.

A first kernel turns queries and keys; then a program sums the values of all patches for a block of
rows of one head, tile by tile from the first patch on. So a row's sums have one order, whatever the
padding. What must stay equal in the Pallas twin is listed in `kernels/__init__.py`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import AttendAllTiles
from kernels.triton_gpu.linear import launching

LOG2_E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(-1e30)


class Sizes(NamedTuple):
    """Of rows, of heads, and of the blocks that hold a head, which are powers of two.

    Attributes:
      hidden: Columns of all heads.
      main, rest: Columns of a head in each of its two blocks, or all of them and 0.
      main_block, rest_block: Columns of each block; those past the head's are 0.
      tile: Patches that are added at once.
    """

    hidden: int
    main: int
    rest: int
    main_block: int
    rest_block: int
    tile: int


class Rows(NamedTuple):
    """Where queries and keys, and values, of one head lie; how many patches there are.

    Attributes:
      scale: Of scores, by which 2 is raised.
    """

    turned: Any
    qkv: Any
    count: Any
    scale: Any


class Sums(NamedTuple):
    """Over some patches: the highest score, the weights, and the weighted values of both blocks."""

    peak: Any
    total: Any
    main: Any
    rest: Any


def attend_all(
    qkv: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    count: Int[Tensor, " 1"],
    *,
    tile: int,
    scale: float,
    tiles: AttendAllTiles,
) -> Float[Tensor, "R hidden"]:
    """As `shared.spec.attention.attend_all`, its heads side by side; rows of padding are 0.

    Args:
      tile: Patches that are added at once: the order of the sums.
      scale: What scores are multiplied by.
      tiles: How the work is cut otherwise.
    """
    qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
    (R, columns), half, how = qkv.shape, cos.shape[1], launching(qkv)
    hidden, D = columns // 3, 2 * half
    turned, out = qkv.new_empty((R, 2 * hidden)), qkv.new_empty((R, hidden))
    block = triton.next_power_of_2(2 * hidden)
    _turn_kernel[(R,)](
        qkv, cos, sin, turned, hidden=hidden, half=half, block=block, num_warps=8, **how
    )
    _attend_kernel[(triton.cdiv(R, tiles.lanes), hidden // D)](
        *(turned, qkv, out, count, R),
        scale=scale * LOG2_E.value,
        sizes=_sizes(hidden, D, tile),
        lanes=tiles.lanes,
        ones=tiles.ones,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **how,
    )
    return out


def _sizes(hidden: int, D: int, tile: int) -> Sizes:
    main = 1 << (D.bit_length() - 1)
    rest = D - main
    return Sizes(
        hidden=hidden,
        main=main,
        rest=rest,
        main_block=max(16, main),  # of fewer a matrix unit takes none
        rest_block=max(16, triton.next_power_of_2(max(rest, 1))),
        tile=tile,
    )


@triton.jit
def _turn_kernel(
    qkv_at, cos_at, sin_at, out_at,
    hidden: tl.constexpr, half: tl.constexpr, block: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program a row: its queries and keys, turned."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside, place = column < 2 * hidden, column % (2 * half)
    is_first, start = place < half, row * 3 * hidden
    pair = tl.where(is_first, place, place - half)
    other = tl.where(is_first, column + half, column - half)
    x = tl.load(qkv_at + start + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv_at + start + other, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_at + row * half + pair, mask=inside, other=0.0)
    sin = tl.load(sin_at + row * half + pair, mask=inside, other=0.0)
    turned = tl.where(is_first, x * cos - y * sin, x * cos + y * sin)
    tl.store(out_at + row * 2 * hidden + column, turned.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _attend_kernel(
    turned_at, qkv_at, out_at, count_at, num_rows, scale,
    sizes: tl.constexpr, lanes: tl.constexpr, ones: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and head."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    hidden: tl.constexpr = sizes.hidden
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    tile: tl.constexpr = sizes.tile
    head = tl.program_id(1) * (main + rest)
    count, row = tl.load(count_at), tl.program_id(0) * lanes + tl.arange(0, lanes)
    rows = Rows(turned=turned_at + head, qkv=qkv_at + head + 2 * hidden, count=count, scale=scale)
    sums = Sums(
        peak=tl.full((lanes,), NEGATIVE, tl.float32),
        total=tl.zeros((lanes, ones), tl.float32),
        main=tl.zeros((lanes, main_block), tl.float32),
        rest=tl.zeros((lanes, rest_block), tl.float32),
    )
    # Padding's rows are those of the last patch again, of which nothing is kept.
    end = tl.where(tl.program_id(0) * lanes < count, count, 0)
    patch = tl.minimum(row, tl.maximum(count - 1, 0))
    queries = rows.turned + patch.to(tl.int64)[:, None] * (2 * hidden)
    q = _load(queries, 0, main, main_block)
    q_rest = q
    if rest > 0:
        q_rest = _load(queries, main, rest, rest_block)
    for i in tl.range(0, tl.cdiv(end, tile)):
        sums = _add_tile(q, q_rest, rows, i, sums, sizes)
    weight = tl.maximum(tl.max(sums.total, axis=1), 1e-30)[:, None]
    is_row, out = row < num_rows, out_at + row.to(tl.int64)[:, None] * hidden + head
    _store(out, sums.main / weight, is_row, 0, main, main_block)
    if rest > 0:
        _store(out, sums.rest / weight, is_row, main, rest, rest_block)


@triton.jit
def _add_tile(q, q_rest, rows, i, sums, sizes: tl.constexpr):
    """Adds a tile of patches to the sums of a block of rows.

    Behind the last patch stands that one again, with no weight. So the tile that is not whole is
    no other code: its loads, masked by rows in a loop of its own, gave the columns of a head's
    second block other values in one of the languages on an H100.
    """
    hidden: tl.constexpr = sizes.hidden
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    tile: tl.constexpr = sizes.tile
    patch = i * tile + tl.arange(0, tile)
    beside = tl.where(patch < rows.count, 0.0, NEGATIVE)
    patch = tl.minimum(patch, rows.count - 1).to(tl.int64)[:, None]
    keys = rows.turned + hidden + patch * (2 * hidden)
    values = rows.qkv + patch * (3 * hidden)
    k = _load(keys, 0, main, main_block)
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if rest > 0:
        k_rest = _load(keys, main, rest, rest_block)
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = scores * rows.scale + beside[None, :]
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None]).to(q.dtype)
    decay = tl.exp2(sums.peak - highest)[:, None]
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    units = tl.full((tile, sums.total.shape[1]), 1.0, q.dtype)
    total = sums.total * decay + tl.dot(weights, units, input_precision="ieee")
    v = _load(values, 0, main, main_block)
    of_main = sums.main * decay + tl.dot(weights, v, input_precision="ieee")
    of_rest = sums.rest
    if rest > 0:
        v_rest = _load(values, main, rest, rest_block)
        of_rest = of_rest * decay + tl.dot(weights, v_rest, input_precision="ieee")
    return Sums(peak=highest, total=total, main=of_main, rest=of_rest)


@triton.jit
def _load(at, first: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """A piece of the head of some rows; 0 past it."""
    column = tl.arange(0, block)[None, :]
    at += first + column
    if width == block:
        return tl.load(at)
    else:
        return tl.load(at, mask=column < width, other=0.0)


@triton.jit
def _store(
    at, x, is_row, first: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, block)[None, :]
    keep = is_row[:, None] & (column < width)
    tl.store(at + first + column, x.to(at.dtype.element_ty), mask=keep)
