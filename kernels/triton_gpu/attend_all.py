"""Attention of a picture's patches, which see each other, in Triton.

A first kernel turns queries and keys and lays each head in blocks; then a program sums the values
of all patches for a block of rows of one head, tile by tile from the first patch on. So a row's
sums have one order, whatever the padding. What must stay equal in the Pallas twin is listed in
`kernels/__init__.py`.
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
    """Of a head, and of the blocks that hold it, which are powers of two.

    Attributes:
      heads: How many there are.
      main, rest: Columns of a head in each of its two blocks, or all of them and 0.
      main_block, rest_block: Columns of each block of queries and keys; those past the head's are
        0. Without a rest there is no second block.
      beside_block: Of the second block of values, which has a 1 behind the rest.
      tile: Patches that are added at once.
    """

    heads: int
    main: int
    rest: int
    main_block: int
    rest_block: int
    beside_block: int
    tile: int


class Rows(NamedTuple):
    """Where the keys of one head lie, and both blocks of its values; how many patches there are.

    Attributes:
      scale: Of scores, by which 2 is raised.
    """

    keys: Any
    main: Any
    beside: Any
    count: Any
    scale: Any


class Sums(NamedTuple):
    """Over some patches: the highest score, and the weighted values of both blocks.

    Behind the rest of the second stands the sum of the weights, as its values are 1.
    """

    peak: Any
    main: Any
    beside: Any


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
    sizes = _sizes(hidden // D, D, tile)
    width = sizes.heads * (2 * (sizes.main_block + sizes.rest_block) + sizes.beside_block)
    laid, out = qkv.new_empty((R, width)), qkv.new_empty((R, hidden))
    block = triton.next_power_of_2(width)
    _lay_kernel[(R,)](qkv, cos, sin, laid, sizes=sizes, block=block, num_warps=8, **how)
    _attend_kernel[(triton.cdiv(R, tiles.lanes), sizes.heads)](
        *(laid, qkv, out, count, R),
        scale=scale * LOG2_E.value,
        sizes=sizes,
        lanes=tiles.lanes,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **how,
    )
    return out


def _sizes(heads: int, D: int, tile: int) -> Sizes:
    main = 1 << (D.bit_length() - 1)
    rest = D - main
    return Sizes(
        heads=heads,
        main=main,
        rest=rest,
        main_block=max(16, main),  # of fewer a matrix unit takes none
        rest_block=max(16, triton.next_power_of_2(rest)) if rest else 0,
        beside_block=max(16, triton.next_power_of_2(rest + 1)),
        tile=tile,
    )


@triton.jit
def _lay_kernel(
    qkv_at, cos_at, sin_at, out_at,
    sizes: tl.constexpr, block: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program a row: its queries and keys, turned, and its values' second blocks."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    beside_block: tl.constexpr = sizes.beside_block
    D: tl.constexpr = main + rest
    half: tl.constexpr = D // 2
    padded: tl.constexpr = main_block + sizes.rest_block
    turned: tl.constexpr = 2 * sizes.heads * padded
    width: tl.constexpr = turned + sizes.heads * beside_block
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    start = qkv_at + row * (3 * sizes.heads * D)
    within = column % padded
    is_rest = within >= main_block
    place = tl.where(is_rest, within - main_block + main, within)
    inside = (column < turned) & (place < tl.where(is_rest, D, main))
    is_first = place < half
    pair = tl.where(is_first, place, place - half)
    at = column // padded * D + place
    x = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.where(is_first, at + half, at - half)
    y = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_at + row * half + pair, mask=inside, other=0.0)
    sin = tl.load(sin_at + row * half + pair, mask=inside, other=0.0)
    out = tl.where(is_first, x * cos - y * sin, x * cos + y * sin)
    beside = tl.maximum(column - turned, 0)
    part, head = beside % beside_block, beside // beside_block
    is_value = (column >= turned) & (column < width)
    at = (2 * sizes.heads + head) * D + main + part
    value = tl.load(start + at, mask=is_value & (part < rest), other=0.0).to(tl.float32)
    out = tl.where(is_value, tl.where(part == rest, 1.0, value), out)
    tl.store(out_at + row * width + column, out.to(out_at.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["num_rows"])
def _attend_kernel(
    laid_at, qkv_at, out_at, count_at, num_rows, scale,
    sizes: tl.constexpr, lanes: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and head."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    beside_block: tl.constexpr = sizes.beside_block
    tile: tl.constexpr = sizes.tile
    D: tl.constexpr = main + rest
    hidden: tl.constexpr = sizes.heads * D
    padded: tl.constexpr = main_block + rest_block
    turned: tl.constexpr = 2 * sizes.heads * padded
    width: tl.constexpr = turned + sizes.heads * beside_block
    head, first = tl.program_id(1), tl.program_id(0) * lanes
    count, row = tl.load(count_at), first + tl.arange(0, lanes)
    rows = Rows(
        keys=laid_at + turned // 2 + head * padded,
        main=qkv_at + 2 * hidden + head * D,
        beside=laid_at + turned + head * beside_block,
        count=count,
        scale=scale,
    )
    sums = Sums(
        peak=tl.full((lanes,), NEGATIVE, tl.float32),
        main=tl.zeros((lanes, main_block), tl.float32),
        beside=tl.zeros((lanes, beside_block), tl.float32),
    )
    # Padding's rows are those of the last patch again, of which nothing is kept.
    end = tl.where(first < count, count, 0)
    patch = tl.minimum(row, tl.maximum(count - 1, 0))
    queries = laid_at + head * padded + patch.to(tl.int64)[:, None] * width
    q = tl.load(queries + tl.arange(0, main_block)[None, :])
    q_rest = q
    if rest > 0:
        q_rest = tl.load(queries + main_block + tl.arange(0, rest_block)[None, :])
    for i in tl.range(0, tl.cdiv(end, tile)):
        sums = _add_tile(q, q_rest, rows, i, sums, sizes)
    is_weight = tl.arange(0, beside_block)[None, :] == rest
    total = tl.max(tl.where(is_weight, sums.beside, 0.0), axis=1)
    weight = tl.maximum(total, 1e-30)[:, None]
    is_row, out = row < num_rows, out_at + row.to(tl.int64)[:, None] * hidden + head * D
    _store(out, sums.main / weight, is_row, main, main_block)
    if rest > 0:
        _store(out + main, sums.beside / weight, is_row, rest, beside_block)


@triton.jit
def _add_tile(q, q_rest, rows, i, sums, sizes: tl.constexpr):
    """Adds a tile of patches to the sums of a block of rows.

    Behind the last patch stands that one again, with no weight. So the tile that is not whole is
    no other code: its loads, masked by rows in a loop of its own, gave the columns of a head's
    second block other values in one of the languages on an H100.
    """
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    beside_block: tl.constexpr = sizes.beside_block
    tile: tl.constexpr = sizes.tile
    hidden: tl.constexpr = sizes.heads * (main + rest)
    width: tl.constexpr = sizes.heads * (2 * (main_block + rest_block) + beside_block)
    patch = i * tile + tl.arange(0, tile)
    behind = tl.where(patch < rows.count, 0.0, NEGATIVE)
    patch = tl.minimum(patch, rows.count - 1).to(tl.int64)[:, None]
    keys = rows.keys + patch * width
    k = tl.load(keys + tl.arange(0, main_block)[None, :])
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if rest > 0:
        k_rest = tl.load(keys + main_block + tl.arange(0, rest_block)[None, :])
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = scores * rows.scale + behind[None, :]
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None]).to(q.dtype)
    decay = tl.exp2(sums.peak - highest)[:, None]
    values, column = rows.main + patch * (3 * hidden), tl.arange(0, main_block)[None, :]
    if main == main_block:
        v = tl.load(values + column)
    else:
        v = tl.load(values + column, mask=column < main, other=0.0)
    of_main = sums.main * decay + tl.dot(weights, v, input_precision="ieee")
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    v_beside = tl.load(rows.beside + patch * width + tl.arange(0, beside_block)[None, :])
    beside = sums.beside * decay + tl.dot(weights, v_beside, input_precision="ieee")
    return Sums(peak=highest, main=of_main, beside=beside)


@triton.jit
def _store(at, x, is_row, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    keep = is_row[:, None] & (column < width)
    tl.store(at + column, x.to(at.dtype.element_ty), mask=keep)
