"""FP8 weights in the formats of releases, and their dequantisation.

A weight is an 8-bit e4m3 value: a sign, four exponent bits, three mantissa bits, no infinities.
Weights share scales. Block scales cover 128 x 128 weights (DeepSeek, Qwen); the last block of a row
or column may be smaller. Per-channel and per-tensor scales are written by vLLM's tools, AutoFP8 and
Mistral. The scales of tensor `X.weight` are the tensor `X.weight_scale_inv` or `X.weight_scale`;
the scales of stacked experts `X` are `X_scale_inv` or `X_scale`. A tensor is FP8 if it has scales,
and the shape of the scales determines their granularity.

A dequantised weight is its value times its scale, computed in float32 and rounded once to the dtype
of the model. Activations are quantised only with `--fp8-activations`, see
`shared.spec.fp8_activations`; stored activation scales are not needed.
"""

from enum import Enum

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from shared.models.parameter import CheckpointTensor
from shared.models.parameter_arrays import slice_tensor

BLOCK = 128
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of the names of a tensor's scales."""

OF_ACTIVATIONS = ("input_scale", "activation_scale")
"""Names of activation scales stored next to a weight, which are ignored."""
OF_KV = ("k_proj.k_scale", "v_proj.v_scale")
"""Names of scales of an FP8 KV cache, which are ignored: KV has the dtype of the model."""

LARGEST = 448.0
"""Largest FP8 value."""
OF_LARGEST = float(np.float32(1 / LARGEST))
"""Multiplier of the maximum of an activation block that gives its scale. A division by `LARGEST`
would be rounded differently, and some compilers turn it into this product."""
STORED = "F8_E4M3"
"""Name of the FP8 dtype in a safetensors file."""

QUANTISED = (
    *("_proj", "kv_a_proj_with_mqa", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    *(".w1", ".w2", ".w3", "input_linear", "output_linear"),
)
"""Suffixes of the names of modules that FP8 releases quantise."""

MTP_INPUT = "eh_proj"
"""Suffix of the name of an MTP layer's input projection."""


_NAN = 0x7F
"""Encoding of NaN without the sign bit."""


def _values() -> Float32[np.ndarray, " codes"]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    size[codes & _NAN == _NAN] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


VALUES = _values()
"""Value of each FP8 encoding."""


class Granularity(Enum):
    """Weights that share a scale, with the names of compressed-tensors."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


def is_quantised(name: str) -> bool:
    """Returns True if FP8 releases quantise a tensor of this name.

    They quantise the projections of mixers, MLPs and experts. Gate and decay projections with few
    rows, embeddings, LM heads, routers and the input projection of MTP layers stay unquantised.
    """
    module = name.removesuffix(".weight")
    return module.endswith(QUANTISED) and not module.endswith(MTP_INPUT)


def scale_shape(shape: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight or of a stack of weights."""
    *stack, rows, columns = shape
    if granularity is Granularity.BLOCK:
        return (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    return (*stack, rows if granularity is Granularity.CHANNEL else 1, 1)


def stored_shapes(shape: tuple[int, ...]) -> dict[tuple[int, ...], Granularity]:
    """Returns the shapes that a weight's scales may have in a file, with the granularity of each.

    If two shapes are equal, their meanings are equal too. A per-tensor scale may have any number of
    axes of size 1.
    """
    found = {scale_shape(shape, each): each for each in reversed(Granularity)}
    stack = shape[:-2]
    return found | {(*stack, 1): Granularity.TENSOR, stack: Granularity.TENSOR}


def scales_of_outputs(
    scales: Shaped[np.ndarray, "*stack blocks blocks_in"], outputs: int
) -> Shaped[np.ndarray, "*stack outputs blocks_in"]:
    """Repeats block scales for each output of a weight or of a stack of weights."""
    return np.repeat(scales, BLOCK, axis=-2)[..., :outputs, :]


def place_of_scales(
    place: tuple[int | slice, ...], shape: tuple[int, ...], granularity: Granularity
) -> tuple[int | slice, ...]:
    """Returns the index of the scales of a slice of a parameter.

    Args:
      place: Index of the slice, which consists of whole blocks.
      shape: Shape of the parameter.
      granularity: Block or channel.
    """
    *outer, last = place
    are_alike = granularity is Granularity.CHANNEL or len(place) < len(shape) - 1
    if are_alike or isinstance(last, int):
        return place
    return (*outer, slice(last.start // BLOCK, last.stop // BLOCK))


def quantize(x: Float32[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Quantises to the nearest FP8 value, ties to even; larger values saturate."""
    positive = VALUES[:_NAN]
    between = (positive[:-1] + positive[1:]) / 2
    size = np.abs(x)
    codes = np.searchsorted(between, size)
    is_halfway = np.append(between, np.inf)[codes] == size
    codes = np.where(np.isnan(x), _NAN, codes + (is_halfway & (codes % 2 == 1)))
    return (codes + 0x80 * np.signbit(x)).astype(np.uint8)


def expand_scales(
    scales: Shaped[np.ndarray, "..."], shape: tuple[int, ...], granularity: Granularity
) -> Shaped[np.ndarray, "*stack scales scales_in"]:
    """Expands stored scales to a granularity that is the same or finer, for a weight of a shape."""
    stored = scale_shape(shape, stored_shapes(shape)[scales.shape])
    return np.broadcast_to(scales.reshape(stored), scale_shape(shape, granularity))


def has_nan(codes: UInt8[np.ndarray, "..."]) -> bool:
    """Returns True if an FP8 value is NaN: all bits below the sign are set."""
    return bool(((codes & _NAN) == _NAN).any())


def dequantize(
    codes: UInt8[np.ndarray, "*stack rows columns"], scales: Shaped[np.ndarray, "..."]
) -> Float32[np.ndarray, "*stack rows columns"]:
    """Dequantises FP8 values; see `apply_scales`."""
    return apply_scales(VALUES[codes], scales)


def apply_scales(
    wide: Float32[np.ndarray, "*stack rows columns"], scales: Shaped[np.ndarray, "..."]
) -> Float32[np.ndarray, "*stack rows columns"]:
    """Multiplies values by their scales, in place.

    Args:
      wide: FP8 values as float32.
      scales: Scales in one of `stored_shapes`.
    """
    granularity, scales = stored_shapes(wide.shape)[scales.shape], scales.astype(np.float32)
    if granularity is not Granularity.BLOCK:
        wide *= scales.reshape(scale_shape(wide.shape, granularity))
        return wide
    across = np.repeat(scales, BLOCK, axis=-1)[..., : wide.shape[-1]]
    for block in range(scales.shape[-2]):
        wide[..., block * BLOCK : (block + 1) * BLOCK, :] *= across[..., block : block + 1, :]
    return wide


def cuts_blocks(source: CheckpointTensor) -> bool:
    """Returns True if the outputs that a rank reads of a tensor are not whole blocks."""
    return source.shape[-2] % BLOCK > 0 or not source.takes_whole(BLOCK)


def kept_granularity(stored: Granularity) -> Granularity:
    """Returns the granularity in memory of stored scales: a tensor's scale is repeated for each
    output.
    """
    return Granularity.CHANNEL if stored is Granularity.TENSOR else stored


def taken_scales(
    source: CheckpointTensor,
    scales: Shaped[np.ndarray, "..."],
    granularity: Granularity,
    shape: tuple[int, ...],
) -> Float32[np.ndarray, "*stack scales scales_in"]:
    """Returns the scales of a slice of a tensor.

    Args:
      source: The slice, which consists of whole blocks.
      scales: Scales of the whole tensor, as stored.
      granularity: Granularity of the result, block or channel; not finer than the stored one.
      shape: Shape of the slice in the parameter.
    """
    wide = expand_scales(scales, source.shape, granularity).astype(np.float32)
    share = BLOCK if granularity is Granularity.BLOCK else 1
    return slice_tensor(source.every(share), wide).reshape(scale_shape(shape, granularity))


def taken_scales_of_outputs(
    source: CheckpointTensor, scales: Shaped[np.ndarray, "..."], shape: tuple[int, ...]
) -> Float32[np.ndarray, "*stack outputs scales_in"]:
    """Returns the block scales of each output of a slice of a tensor, which may cut blocks.

    Args:
      source: The slice.
      scales: Scales of the whole tensor, as stored.
      shape: Shape of the slice in the parameter.
    """
    wide = expand_scales(scales, source.shape, Granularity.BLOCK).astype(np.float32)
    taken = slice_tensor(source, scales_of_outputs(wide, source.shape[-2]))
    return taken.reshape(*shape[:-1], taken.shape[-1])


def rounded(x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Rounds finite values to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)
