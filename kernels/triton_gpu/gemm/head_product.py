"""Products of rows with the weights of each head in latent attention (Triton).

`kv_b` has the rows of W_UK and then of W_UV of each head. A program computes one tile of rows and
outputs of a head, and accumulates along the inputs in one chain. It continues the chain of a row
over the row's own LoRA adapter, and computes the inputs `round(s * (A x))` for it. The bits of a
row depend neither on the tiles nor on the number of rows and heads, nor on other rows' adapters.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_tiles import HeadProductTiles
from kernels.shrink_tiles import block_of_ranks
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.rope import store_rotated


class HeadAdapters(NamedTuple):
    """LoRA adapters of the weights of all heads, or pointers to them.

    Attributes:
      slots: Adapter slot of each row, 0 for none.
      a, b, scales: Adapters by slot, see `shared.spec.lora.AdapterWeights`; slots may be strided.
    """

    slots: Int[Tensor, " R"]
    a: Float[Tensor, "slots rank r"]
    b: Float[Tensor, "slots Hq_stored rank"]
    scales: Float32[Tensor, "slots rank"]

    @property
    def sizes(self) -> "HeadAdapterSizes":
        """Returns the sizes of the adapters."""
        rank = self.b.shape[2]
        return HeadAdapterSizes(
            slots=len(self.b),
            rank=rank,
            width=block_of_ranks(rank),
            a=self.a.stride(0),
            b=self.b.stride(0),
            scales=self.scales.stride(0),
        )


class HeadAdapterSizes(NamedTuple):
    """Sizes of the adapters, compile-time constants.

    Attributes:
      slots, rank: Adapter slots, and rank of each.
      width: Ranks that are added at once.
      a, b, scales: Elements from a slot to the next.
    """

    slots: int
    rank: int
    width: int
    a: int
    b: int
    scales: int


class HeadProductSizes(NamedTuple):
    """Sizes of a call, compile-time constants.

    Attributes:
      K, N: Inputs and outputs of a head.
      x_row, x_head: Elements of a row of inputs, and of one of its heads.
      stored, first, rank: Rows of a head in the weight, the first of the product, and their length.
      is_key: Whether the inputs are rows of the weight (W_UK); otherwise the outputs are (W_UV).
      out_head: Elements of a head of the result.
      half, is_interleaved: Rotation of the inputs after the first K; 0: there are none.
      adapters: Sizes of the adapters; None without.
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
    adapters: HeadAdapterSizes | None


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
    lora: HeadAdapters | None = None,
) -> Float[Tensor, "R Hq latent_and_rope"]:
    """Multiplies the nope part of each query head by W_UK, and rotates its rope part.

    Args:
      q: Rows that begin with the query heads, each its nope part and then its rope part.
      cos, sin: RoPE cosine and sine of each row.
      kv_b: Weight of each head: `nope_size` rows of W_UK, then those of W_UV.
      nope_size: Elements of a nope part.
      is_interleaved: Whether adjacent elements are rotated together; otherwise the halves are.
      tiles: Tile config.
      lora: Adapters of the rows.
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
        adapters=lora and lora.sizes,
    )
    return _product(q, cos, sin, kv_b, lora, sizes, tiles)


def value_heads(
    x: Float[Tensor, "R Hq r"],
    kv_b: Float[Tensor, "Hq stored r"],
    nope_size: int,
    *,
    tiles: HeadProductTiles,
    lora: HeadAdapters | None = None,
) -> Float[Tensor, "R Hq dv"]:
    """Multiplies each head by its W_UV.

    Args:
      x: Attention outputs in the latent space.
      kv_b, nope_size, tiles, lora: See `latent_queries`.
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
        adapters=lora and lora.sizes,
    )
    return _product(x, x, x, kv_b, lora, sizes, tiles)  # Triton requires pointers to angles


def _product(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_b: Float[Tensor, "Hq stored r"],
    lora: HeadAdapters | None,
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
        lora,
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
    adapters,
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
        if sizes.adapters is not None:
            slots = tl.load(adapters.slots + row, mask=row < num_rows, other=0)
            acc = _add_adapters(acc, x_at, slots, head, column, adapters, sizes, block)
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


@triton.jit
def _add_adapters(
    acc, x_at, slots, head, column, adapters, sizes: tl.constexpr, block: tl.constexpr
):
    """Continues an accumulator over the inputs of the adapters, each row over its own."""
    lora: tl.constexpr = sizes.adapters
    first = tl.min(tl.where(slots > 0, slots, lora.slots + 1), 0)
    for slot in tl.range(first, tl.max(slots, 0) + 1):
        is_own = slots == slot
        if tl.max(is_own.to(tl.int32), 0) > 0:
            sums = acc
            for part in tl.static_range(lora.rank // lora.width):
                rank = part * lora.width + tl.arange(0, lora.width)
                to_rank, to_output = _adapter_at(slot - 1, rank, head, column, adapters, sizes)
                scale = tl.load(adapters.scales + (slot - 1) * lora.scales + rank)
                inputs = _inputs_of(x_at, to_rank, is_own, scale, sizes, block)
                weight = tl.load(to_output, mask=(column < sizes.N)[None, :], other=0.0)
                sums = tl.dot(inputs, weight, sums, input_precision="ieee")
            acc = tl.where(is_own[:, None], sums, acc)
    return acc


@triton.jit
def _adapter_at(index, rank, head, column, adapters, sizes: tl.constexpr):
    """Returns pointers to an adapter of a head: to some ranks from the first input, `[1, ranks]`,
    and from these ranks to some outputs, `[ranks, outputs]`.

    Rows of B are the inputs of the product with W_UK, and the outputs of the product with W_UV.
    """
    lora: tl.constexpr = sizes.adapters
    index = tl.cast(index, tl.int64)
    a_at = adapters.a + index * lora.a + rank.to(tl.int64)[:, None] * sizes.rank
    b_at = adapters.b + index * lora.b + (head * sizes.stored + sizes.first) * lora.rank
    if sizes.is_key:
        to_rank = b_at + rank[None, :]
        to_output = a_at + column[None, :]
    else:
        to_rank = tl.trans(a_at)
        to_output = b_at + rank[:, None] + column[None, :] * lora.rank
    return to_rank, to_output


@triton.jit
def _inputs_of(x_at, to_rank, is_own, scale, sizes: tl.constexpr, block: tl.constexpr):
    """Returns `round(s * (A x))` of the rows of one adapter for some ranks."""
    K: tl.constexpr = sizes.K
    depth: tl.constexpr = block.depth
    stride: tl.constexpr = sizes.adapters.rank if sizes.is_key else 1
    lane = tl.arange(0, depth)
    acc = tl.zeros((is_own.shape[0], scale.shape[0]), tl.float32)
    for at in tl.range(0, K, depth, num_stages=block.stages):
        is_input = lane < K - at
        x = tl.load(
            x_at + (at + lane)[None, :], mask=is_own[:, None] & is_input[None, :], other=0.0
        )
        weight = tl.load(to_rank + (at + lane)[:, None] * stride, mask=is_input[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return (acc * scale[None, :]).to(x_at.dtype.element_ty)
