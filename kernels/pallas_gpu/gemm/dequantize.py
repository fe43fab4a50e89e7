"""Dequantisation of packed weights in memory, for GEMMs of many rows (Pallas, Triton backend)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, Int32, Shaped

from kernels.pallas_gpu.gemm.block_loaders import LOADERS, OperandTiles, PackedLoader

_OUTPUTS = 64
_WARPS = 4


def is_packed(format: str) -> bool:
    """Returns whether a format packs several inputs in a stored element."""
    return issubclass(LOADERS[format], PackedLoader)


def dequantize(
    words: Int32[jax.Array, "L N words"],
    scales: Shaped[jax.Array, "L scales scales_in"],
    layer: Int[jax.Array, ""],
    format: str,
    inputs: int,
    *,
    interpret: bool = False,
) -> Float[jax.Array, "N K"]:
    """Dequantises a layer of packed weights.

    Args:
      words, scales: Packed values and their scales, see `shared.models.formats`.
      layer: Index into the stack.
      format: Name of the weight format.
      inputs: Inputs of the weight, without those that fill its last block.
      interpret: Run on a CPU.
    """
    loader = LOADERS[format]
    assert issubclass(loader, PackedLoader)
    _, outputs, count = words.shape
    blocks = pl.cdiv(inputs, loader.inputs_of(count))
    return pl.pallas_call(
        functools.partial(_dequantize_kernel, loader=loader, is_compiled=not interpret),
        grid=(pl.cdiv(outputs, _OUTPUTS) * blocks,),
        out_shape=jax.ShapeDtypeStruct((outputs, inputs), jnp.bfloat16),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="dequantize",
    )(words, scales, layer.reshape(1))


def _dequantize_kernel(words_ref, scales_ref, layer_ref, wide_ref, *, loader, is_compiled):
    """One program per block of inputs of some outputs."""
    outputs, inputs = wide_ref.shape
    depth = loader.inputs_of(words_ref.shape[2])
    blocks = pl.cdiv(inputs, depth)
    number = lax.rem(pl.program_id(0), blocks)
    output = lax.div(pl.program_id(0), blocks) * _OUTPUTS + lax.iota(jnp.int32, _OUTPUTS)
    has_all, is_output = outputs % _OUTPUTS == 0, output < outputs
    tile = OperandTiles(
        x=None,
        row_scales=None,
        weights=words_ref,
        scales=scales_ref,
        stack=(layer_ref[0],),
        row=None,
        scale_row=None,
        outputs=[lambda: jnp.where(is_output, output, outputs - 1)[:, None]],
        columns=_OUTPUTS,
        is_row=None,
        is_output=is_output,
        has_all_rows=True,
        has_all_outputs=has_all,
        loads_weight_first=True,
    )
    at = jnp.where(is_output, output, outputs)[:, None]
    for part, numbers in enumerate(loader(tile, 0, is_compiled).numbers(number)):
        width = numbers.shape[1]
        column = (number * depth + part * width + lax.iota(jnp.int32, width))[None, :]
        masks = [] if has_all else [is_output[:, None]]
        if inputs % depth:
            masks.append(column < inputs)
            column = jnp.minimum(column, inputs)  # the interpreter requires it to be at the end
        mask = functools.reduce(jnp.logical_and, masks, True)
        masked = {"mask": jnp.broadcast_to(mask, numbers.shape)} if masks else {}
        pltriton.store(wide_ref.at[at, column], numbers, **masked)
