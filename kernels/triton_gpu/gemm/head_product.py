"""Products of rows with the weights of each head in latent attention (Triton).

`kv_b` has the rows of W_UK and then of W_UV of each head. A program computes one tile of rows and
outputs of a head, and accumulates along the inputs in one chain. The bits of a row depend neither
on the tiles nor on the number of rows and heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_tiles import HeadProductTiles
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.rope import store_rotated


class HeadProductSizes(NamedTuple):
    """Sizes of a call, compile-time constants.

    Attributes:
      K, N: Inputs and outputs of a head.
      x_row, x_head: Elements of a row of inputs, and of one of its heads.
      stored, first, rank: Rows of a head in the weight, the first of the product, and their length.
      is_key: Whether the inputs are rows of the weight (W_UK); otherwise the outputs are (W_UV).
      out_head: Elements of a head of the result.
      half, is_interleaved: Rotation of the inputs after the first K; 0: there are none.
    """

    K: int
    N: int
    x_row: int
    x_head: int
    stored: int
    first: int
    rank: int
    is_key: bool
    out_head: int
    half: int
    is_interleaved: bool


class HeadProductBlock(NamedTuple):
    """Tile of a program: rows, outputs, inputs per step, pipeline stages."""

    rows: int
    columns: int
    depth: int
    stages: int


def latent_queries(
    q: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    kv_b: Float[Tensor, "Hq stored r"],
    nope_size: int,
    *,
    is_interleaved: bool,
    tiles: HeadProductTiles,
) -> Float[Tensor, "R Hq latent_and_rope"]:
    """Multiplies the nope part of each query head by W_UK, and rotates its rope part.

    Args:
      q: Rows that begin with the query heads, each its nope part and then its rope part.
      cos, sin: RoPE cosine and sine of each row.
      kv_b: Weight of each head: `nope_size` rows of W_UK, then those of W_UV.
      nope_size: Elements of a nope part.
      is_interleaved: Whether adjacent elements are rotated together; otherwise the halves are.
      tiles: Tile config.
    """
    (_, stored, rank), rope = kv_b.shape, 2 * cos.shape[1]
    q, cos, sin = (x.contiguous() for x in (q, cos, sin))
    sizes = HeadProductSizes(
        K=nope_size,
        N=rank,
        x_row=q.shape[1],
        x_head=nope_size + rope,
        stored=stored,
        first=0,
        rank=rank,
        is_key=True,
        out_head=rank + rope,
        half=rope // 2,
        is_interleaved=is_interleaved,
    )
    return _product(q, cos, sin, kv_b, sizes, tiles)


def value_heads(
    x: Float[Tensor, "R Hq r"],
    kv_b: Float[Tensor, "Hq stored r"],
    nope_size: int,
    *,
    tiles: HeadProductTiles,
) -> Float[Tensor, "R Hq dv"]:
    """Multiplies each head by its W_UV.

    Args:
      x: Attention outputs in the latent space.
      kv_b, nope_size, tiles: See `latent_queries`.
    """
    heads, stored, rank = kv_b.shape
    x = x.contiguous()
    sizes = HeadProductSizes(
        K=rank,
        N=stored - nope_size,
        x_row=heads * rank,
        x_head=rank,
        stored=stored,
        first=nope_size,
        rank=rank,
        is_key=False,
        out_head=stored - nope_size,
        half=0,
        is_interleaved=False,
    )
    return _product(x, x, x, kv_b, sizes, tiles)  # Triton requires pointers to angles


def _product(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_b: Float[Tensor, "Hq stored r"],
    sizes: HeadProductSizes,
    tiles: HeadProductTiles,
) -> Float[Tensor, "R Hq out"]:
    if not kv_b.is_contiguous():
        raise ValueError("kv_b must be contiguous; pass one layer of the stack")
    R, heads = len(x), len(kv_b)
    out = torch.empty((R, heads, sizes.out_head), dtype=x.dtype, device=x.device)
    block = HeadProductBlock(*tiles.block_of(R, sizes.N, sizes.K), stages=tiles.stages)
    blocks = triton.cdiv(sizes.N, block.columns)
    _head_product_kernel[(triton.cdiv(R, block.rows), blocks + (sizes.half > 0), heads)](
        x,
        kv_b,
        cos,
        sin,
        out,
        R,
        sizes=sizes,
        block=block,
        num_warps=tiles.warps,
        **launching(x),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _head_product_kernel(
    x_at,
    weight_at,
    cos_at,
    sin_at,
    out_at,
    num_rows,
    sizes: tl.constexpr,
    block: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows, block of outputs and head; the last block of outputs is the
    rope part, if there is one.
    """
    N: tl.constexpr = sizes.N
    half: tl.constexpr = sizes.half
    row = tl.program_id(0) * block.rows + tl.arange(0, block.rows)
    first, head = tl.program_id(1) * block.columns, tl.program_id(2).to(tl.int64)
    is_row, line = (row < num_rows)[:, None], row.to(tl.int64)[:, None]
    x_at += line * sizes.x_row + head * sizes.x_head
    weight_at += (head * sizes.stored + sizes.first) * sizes.rank
    out_at += (line * tl.num_programs(2) + head) * sizes.out_head
    if is_launched:
        gdc_wait()
    if first < N:
        column = first + tl.arange(0, block.columns)
        acc = _accumulate(x_at, weight_at, column, is_row, sizes, block)
        if is_launched:
            gdc_launch_dependents()
        keep = is_row & (column < N)[None, :]
        tl.store(out_at + column[None, :], acc.to(out_at.dtype.element_ty), mask=keep)
    elif half > 0:
        place = line * half
        store_rotated(
            x_at + sizes.K,
            cos_at + place,
            sin_at + place,
            out_at + N,
            tl.where(is_row, half, 0),
            half,
            sizes.is_interleaved,
        )


@triton.jit
def _accumulate(x_at, weight_at, column, is_row, sizes: tl.constexpr, block: tl.constexpr):
    """Returns the products of a tile, in float32."""
    K: tl.constexpr = sizes.K
    rows: tl.constexpr = block.rows
    columns: tl.constexpr = block.columns
    depth: tl.constexpr = block.depth
    is_even: tl.constexpr = K % depth == 0
    is_whole: tl.constexpr = is_even and sizes.N % columns == 0
    step: tl.constexpr = depth * (sizes.rank if sizes.is_key else 1)
    lane = tl.arange(0, depth)
    x_at += lane[None, :]
    if sizes.is_key:
        weight_at += lane[:, None] * sizes.rank + column[None, :]
        is_column = (column < sizes.N)[None, :]
    else:
        weight_at += column[:, None] * sizes.rank + lane[None, :]
        is_column = (column < sizes.N)[:, None]
    acc = tl.zeros((rows, columns), tl.float32)
    for at in tl.range(0, K, depth, num_stages=block.stages):
        if is_even:
            x = tl.load(x_at, mask=is_row, other=0.0)
        else:
            x = tl.load(x_at, mask=is_row & (lane < K - at)[None, :], other=0.0)
        if is_whole:
            weight = tl.load(weight_at)
        elif is_even:
            weight = tl.load(weight_at, mask=is_column, other=0.0)
        elif sizes.is_key:
            weight = tl.load(weight_at, mask=is_column & (lane < K - at)[:, None], other=0.0)
        else:
            weight = tl.load(weight_at, mask=is_column & (lane < K - at)[None, :], other=0.0)
        if not sizes.is_key:
            weight = tl.trans(weight)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_at += depth
        weight_at += step
    return acc
