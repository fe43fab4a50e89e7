"""Dynamic FP8 quantisation of activations for W8A8 GEMMs (Triton)."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float8e4m3fn, Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.gemm.fp8_w8a8 import quantise
from kernels.triton_gpu.gemm.linear import launching
from shared.models.formats.fp8 import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_FEW = 64
_ROWS, _ROWS_OF_MANY, _WARPS = 4, 32, 4
"""Rows per program for at most `_ROWS` rows and for more, and warps."""


def quantised(
    x: Float[Tensor, "R inputs"],
) -> tuple[Float8e4m3fn[Tensor, "R inputs"], Float32[Tensor, "blocks R"]]:
    """Implements `shared.spec.fp8_activations.quantised`, for whole blocks of inputs.

    Returns:
      The quantised rows, and the scales of each block of inputs, one row per block.
    """
    x = x.contiguous()
    R, K = x.shape
    codes = torch.empty((R, K), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((K // BLOCK, R), dtype=torch.float32, device=x.device)
    is_few = R <= _FEW
    rows = _ROWS if is_few else _ROWS_OF_MANY
    _quantising_kernel[(triton.cdiv(R, rows), K // BLOCK)](
        x, codes, scales, R, K=K, rows=rows, is_few=is_few, num_warps=_WARPS, **launching(x)
    )
    return codes, scales


@triton.jit(do_not_specialize=["num_rows"])
def _quantising_kernel(
    x_at,
    codes_at,
    scales_at,
    num_rows,
    K: tl.constexpr,
    rows: tl.constexpr,
    is_few: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of inputs of some rows."""
    row, block = tl.program_id(0) * rows + tl.arange(0, rows), tl.program_id(1)
    is_row = row < num_rows
    place = row.to(tl.int64)[:, None] * K + block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    if is_launched:
        gdc_wait()
        if is_few:
            gdc_launch_dependents()
    x = tl.load(x_at + place, mask=is_row[:, None], other=0.0).to(tl.float32)
    codes, scale = quantise(x, is_launched)
    tl.store(codes_at + place, codes, mask=is_row[:, None])
    tl.store(scales_at + block.to(tl.int64) * num_rows + row, scale, mask=is_row)
    # With many rows, starting the next kernel early makes its GEMM up to 1.5 times slower. With few
    # rows, all programs end together.
    if is_launched and not is_few:
        gdc_launch_dependents()
