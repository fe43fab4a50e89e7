"""Bidirectional vision encoder attention with online softmax (Triton).

A first kernel applies RoPE to queries and keys and writes each head in column blocks. A program
then processes a block of rows of one head, tile by tile from the first patch. The reduction order
of a row therefore does not depend on the padding. `kernels/__init__.py` lists what must equal the
Pallas twin.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.encoder_head_sizes import sizes_of
from kernels.tiles import EncoderAttentionTiles
from kernels.triton_gpu.attention.encoder_attention_sm90 import (
    encoder_attention_sm90,
    takes,
)
from kernels.triton_gpu.attention.encoder_qkv_layout import pack_encoder_qkv
from kernels.triton_gpu.gemm.linear import launching

LOG2_E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(-1e30)


class PatchRows(NamedTuple):
    """Addresses of both column blocks of a head's keys and values, and the number of patches.

    Attributes:
      scale: Multiplier of the scores, times log2(e).
    """

    k: Any
    k_rest: Any
    v: Any
    v_beside: Any
    count: Any
    scale: Any


class EncoderSoftmaxState(NamedTuple):
    """Online softmax accumulator: maximum score, weighted values of a head's two column blocks.

    Column `rest` of the second block is the total weight, because its values are 1.
    """

    peak: Any
    main: Any
    beside: Any


def bidirectional_attention(
    qkv: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    count: Int[Tensor, " 1"],
    *,
    tile: int,
    scale: float,
    tiles: EncoderAttentionTiles,
) -> Float[Tensor, "R hidden"]:
    """Same as `shared.spec.attention.bidirectional_attention`.

    Args:
      qkv, cos, sin, count: See the specification.
      tile: Patches of a tile; it fixes the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.
    """
    qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
    (R, columns), half = qkv.shape, cos.shape[1]
    hidden, D = columns // 3, 2 * half
    out, scale = qkv.new_empty((R, hidden)), scale * LOG2_E.value
    sizes = sizes_of(hidden // D, D)
    if tiles.described and takes(qkv, D, tile):
        rows = triton.cdiv(R, tiles.groups * tile) * tiles.groups * tile
        laid = pack_encoder_qkv(qkv, cos, sin, count, rows, sizes)
        encoder_attention_sm90(laid, count, out, heads=sizes.heads, scale=scale, tiles=tiles)
        return out
    laid = pack_encoder_qkv(qkv, cos, sin, count, R, sizes)
    _attend_kernel[(triton.cdiv(R, tiles.lanes), sizes.heads)](
        *(laid, out, count, R),
        scale=scale,
        sizes=sizes,
        tile=tile,
        lanes=tiles.lanes,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launching(qkv),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _attend_kernel(
    laid_at,
    out_at,
    count_at,
    num_rows,
    scale,
    sizes: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows and head."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    main: tl.constexpr = sizes.main
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    beside_block: tl.constexpr = sizes.beside_block
    D: tl.constexpr = main + rest
    heads: tl.constexpr = sizes.heads
    rests: tl.constexpr = 3 * heads * main_block
    besides: tl.constexpr = rests + 2 * heads * rest_block
    width: tl.constexpr = besides + heads * beside_block
    head, first = tl.program_id(1), tl.program_id(0) * lanes
    count, row = tl.load(count_at), first + tl.arange(0, lanes)
    rows = PatchRows(
        k=laid_at + (heads + head) * main_block,
        k_rest=laid_at + rests + (heads + head) * rest_block,
        v=laid_at + (2 * heads + head) * main_block,
        v_beside=laid_at + besides + head * beside_block,
        count=count,
        scale=scale,
    )
    sums = EncoderSoftmaxState(
        peak=tl.full((lanes,), NEGATIVE, tl.float32),
        main=tl.zeros((lanes, main_block), tl.float32),
        beside=tl.zeros((lanes, beside_block), tl.float32),
    )
    # Padding rows repeat the last patch; a block of padding alone adds no tile.
    end = tl.where(first < count, count, 0)
    patch = tl.minimum(row, tl.maximum(count - 1, 0))
    lines = laid_at + patch.to(tl.int64)[:, None] * width
    q = tl.load(lines + head * main_block + tl.arange(0, main_block)[None, :])
    q_rest = q
    if rest > 0:
        q_rest = tl.load(lines + rests + head * rest_block + tl.arange(0, rest_block)[None, :])
    for i in tl.range(0, tl.cdiv(end, tile)):
        sums = _add_tile(q, q_rest, rows, i, sums, sizes, tile)
    is_weight = tl.arange(0, beside_block)[None, :] == rest
    total = tl.max(tl.where(is_weight, sums.beside, 0.0), axis=1)
    weight = tl.maximum(total, 1e-30)[:, None]
    is_row, out = row < num_rows, out_at + (row.to(tl.int64)[:, None] * heads + head) * D
    _store(out, sums.main / weight, is_row, main, main_block)
    if rest > 0:
        _store(out + main, sums.beside / weight, is_row, rest, beside_block)


@triton.jit
def _add_tile(q, q_rest, rows, i, sums, sizes: tl.constexpr, tile: tl.constexpr):
    """Adds a tile of patches to the accumulators of a block of rows.

    The last patch is repeated to the end of its tile, with weight 0, so a partial tile needs no
    separate code. Masked loads in a separate loop gave the second column block of a head other
    values in one of the languages on an H100.
    """
    rest: tl.constexpr = sizes.rest
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    beside_block: tl.constexpr = sizes.beside_block
    width: tl.constexpr = sizes.heads * (3 * main_block + 2 * rest_block + beside_block)
    patch = i * tile + tl.arange(0, tile)
    padding_bias = tl.where(patch < rows.count, 0.0, NEGATIVE)
    line = tl.minimum(patch, rows.count - 1).to(tl.int64)[:, None] * width
    k = tl.load(rows.k + line + tl.arange(0, main_block)[None, :])
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if rest > 0:
        k_rest = tl.load(rows.k_rest + line + tl.arange(0, rest_block)[None, :])
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = scores * rows.scale + padding_bias[None, :]
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None]).to(q.dtype)
    decay = tl.exp2(sums.peak - highest)[:, None]
    v = tl.load(rows.v + line + tl.arange(0, main_block)[None, :])
    of_main = sums.main * decay + tl.dot(weights, v, input_precision="ieee")
    # Tensor cores sum in one order for any number of rows; a reduction over threads does not.
    v_beside = tl.load(rows.v_beside + line + tl.arange(0, beside_block)[None, :])
    beside = sums.beside * decay + tl.dot(weights, v_beside, input_precision="ieee")
    return EncoderSoftmaxState(peak=highest, main=of_main, beside=beside)


@triton.jit
def _store(at, x, is_row, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    keep = is_row[:, None] & (column < width)
    tl.store(at + column, x.to(at.dtype.element_ty), mask=keep)
