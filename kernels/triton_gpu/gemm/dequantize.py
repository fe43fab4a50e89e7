"""Dequantisation of packed weights in memory, for GEMMs of many rows (Triton)."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.gemm.block_loaders import TileLoads, format_of, load_block, packed_tile

_OUTPUTS = tl.constexpr(64)
_WARPS = 4


def dequantize(
    words: Int32[Tensor, "N words"],
    scales: Shaped[Tensor, "scales scales_in"],
    format: str,
    inputs: int,
    *,
    is_launched: bool,
    **launching: bool,
) -> Float[Tensor, "N K"]:
    """Dequantises a packed weight.

    Args:
      words, scales: Packed values and their scales, see `shared.models.formats`.
      format: Name of the weight format.
      inputs: Inputs of the weight, without those that fill its last block.
      is_launched, launching: Launch options, see `launching` in `linear`.
    """
    outputs, stored = len(words), format_of(format, 0, words, scales)
    wide = torch.empty((outputs, inputs), dtype=torch.bfloat16, device=words.device)
    loads = TileLoads.of(
        stored,
        "row",
        inputs,
        has_all_rows=False,
        has_all_outputs=outputs % _OUTPUTS.value == 0,
        is_interpreted=not is_launched,
    )
    blocks = triton.cdiv(outputs, _OUTPUTS.value) * triton.cdiv(inputs, stored.inputs)
    _dequantize_kernel[(blocks,)](
        words,
        scales,
        wide,
        outputs,
        loads=loads,
        is_launched=is_launched,
        num_warps=_WARPS,
        **launching,
    )
    return wide


@triton.jit(do_not_specialize=["outputs"])
def _dequantize_kernel(
    words_at, scales_at, wide_at, outputs, loads: tl.constexpr, is_launched: tl.constexpr
):
    """One program per block of inputs of some outputs."""
    inputs: tl.constexpr = loads.format.inputs
    parts: tl.constexpr = loads.format.parts
    width: tl.constexpr = loads.rows.width
    blocks: tl.constexpr = (loads.K + inputs - 1) // inputs
    at = tl.program_id(0) % blocks * inputs
    output = tl.program_id(0) // blocks * _OUTPUTS + tl.arange(0, _OUTPUTS)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    has_all: tl.constexpr = loads.weight.has_all
    is_inside = output < outputs
    scale = output // loads.format.scales.outputs
    tile = packed_tile(words_at, scales_at, output, scale, is_inside, has_all, loads)
    block = load_block(tile, tile.place, at, 0, 0, loads)
    row = output.to(tl.int64)[:, None] * loads.K
    for number in tl.static_range(parts):
        column = at + number * width + tl.arange(0, width)[None, :]
        mask = is_inside[:, None]
        if not loads.rows.is_whole:
            mask = mask & (column < loads.K)
        tl.store(wide_at + row + column, block.parts[number], mask=mask)
