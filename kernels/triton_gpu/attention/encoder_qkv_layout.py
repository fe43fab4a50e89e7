"""RoPE and column-block layout of vision encoder queries, keys and values (Triton).

Used by `bidirectional_attention` and `encoder_attention_sm90`.
"""

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.encoder_head_sizes import EncoderHeadSizes
from kernels.triton_gpu.gemm.linear import launching


def pack_encoder_qkv(
    qkv: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    count: Int[Tensor, " 1"],
    rows: int,
    sizes: EncoderHeadSizes,
) -> Float[Tensor, "rows width"]:
    """Returns rotated queries and keys, and values: first blocks of all heads, then second blocks.

    Args:
      qkv, cos, sin, count: See `bidirectional_attention`.
      rows: Rows of the result; rows past the last patch repeat it.
      sizes: Columns of the heads and their blocks.
    """
    laid = qkv.new_empty((rows, sizes.width))
    block = triton.next_power_of_2(sizes.width)
    settings = {"sizes": sizes, "block": block, "num_warps": 8, **launching(qkv)}
    _pack_encoder_qkv_kernel[(rows,)](qkv, cos, sin, count, laid, **settings)
    return laid


@triton.jit
def _pack_encoder_qkv_kernel(
    qkv_at,
    cos_at,
    sin_at,
    count_at,
    out_at,
    sizes: tl.constexpr,
    block: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row: its rotated queries and keys, and its values."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    main: tl.constexpr = sizes.main
    main_block: tl.constexpr = sizes.main_block
    rest_block: tl.constexpr = sizes.rest_block
    beside_block: tl.constexpr = sizes.beside_block
    heads: tl.constexpr = sizes.heads
    D: tl.constexpr = main + sizes.rest
    half: tl.constexpr = D // 2
    rests: tl.constexpr = 3 * heads * main_block
    besides: tl.constexpr = rests + 2 * heads * rest_block
    width: tl.constexpr = besides + heads * beside_block
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    patch = tl.minimum(row, tl.maximum(tl.load(count_at) - 1, 0))
    head, place = column // main_block, column % main_block
    is_rest, is_beside = column >= rests, column >= besides
    if rest_block > 0:
        of_rest = column - rests
        head = tl.where(is_rest, of_rest // rest_block, head)
        place = tl.where(is_rest, main + of_rest % rest_block, place)
    of_beside = column - besides
    head = tl.where(is_beside, 2 * heads + of_beside // beside_block, head)
    place = tl.where(is_beside, main + of_beside % beside_block, place)
    inside = (column < width) & (place < tl.where(is_rest, D, main))
    start = qkv_at + patch * (3 * heads * D)
    x = tl.load(start + head * D + place, mask=inside, other=0.0).to(tl.float32)
    is_rotated, is_first = inside & (head < 2 * heads), place < half
    pair = tl.where(is_first, place, place - half)
    other = tl.where(is_first, place + half, pair)
    y = tl.load(start + head * D + other, mask=is_rotated, other=0.0).to(tl.float32)
    cos = tl.load(cos_at + patch * half + pair, mask=is_rotated, other=0.0)
    sin = tl.load(sin_at + patch * half + pair, mask=is_rotated, other=0.0)
    out = tl.where(is_first, x * cos - y * sin, x * cos + y * sin)
    out = tl.where(head < 2 * heads, out, tl.where(is_beside & (place == D), 1.0, x))
    tl.store(out_at + row * width + column, out.to(out_at.dtype.element_ty), mask=column < width)
