"""FP8 parameters on a device, packed as in `shared.models.formats.fp8_w8a16`.

They are read tensor by tensor and packed on the device, without dequantisation.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float8e4m3fn, Float32, Int, Int32, Shaped, UInt8

from jax_impl import dummy_weights
from shared.models.checkpoint import Checkpoint
from shared.models.dummy_weights import DummyCheckpoint, Stored, code_scales, scales_of_outputs
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, packed_scales, shape_of_words
from shared.models.parameters import Parameter


def packed(codes: UInt8[jax.Array, "*stack N K"]) -> Int32[jax.Array, "*stack N words"]:
    """Same as `shared.models.formats.fp8_w8a16.packed`, for FP8 values without NaN."""
    blocks = codes.reshape(*codes.shape[:-1], -1, 4, FP8_BLOCK // 4).swapaxes(-1, -2)
    return lax.bitcast_convert_type(blocks, jnp.int32).reshape(shape_of_words(codes.shape))


def read(
    checkpoint: Stored,
    parameter: Parameter,
    granularity: Granularity,
    device: jax.Device,
    progress: Callable[[int], None],
) -> tuple[Int32[jax.Array, "*stack N words"], Float[jax.Array, "*stack scales scales_in"]]:
    """Reads a packed parameter and its scales; see `shared.models.checkpoint.Checkpoint.codes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        scales = packed_scales(code_scales(parameter, granularity))
        words = dummy_weights.word_array(parameter, device)
        progress(checkpoint.num_bytes([parameter]))
        return words, _placed(scales, device)
    return _from_files(checkpoint, parameter, granularity, device, progress)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    granularity: Granularity,
    device: jax.Device,
    progress: Callable[[int], None],
) -> tuple[Int32[jax.Array, "*stack N words"], Float[jax.Array, "*stack scales scales_in"]]:
    words = jnp.zeros(shape_of_words(parameter.shape), jnp.int32, device=device)
    scales = np.empty(fp8.scale_shape(parameter.shape, granularity), np.float32)
    for piece in checkpoint.codes(parameter, granularity, progress):
        first = [each.start if isinstance(each, slice) else each for each in piece.place]
        codes = piece.codes.reshape((1,) * (words.ndim - piece.codes.ndim) + piece.codes.shape)
        words = _written(words, codes, jnp.asarray(first, np.int32))
        scales[piece.place_of_scales] = packed_scales(piece.scales)
    return words, _placed(scales, device)


@partial(jax.jit, donate_argnums=0)
def _written(
    words: Int32[jax.Array, "..."], codes: UInt8[jax.Array, "..."], first: Int[jax.Array, " axes"]
) -> Int32[jax.Array, "..."]:
    """Writes a packed piece into a parameter, in place (donated).

    `first` has the indices of its first element on the outer axes; the piece spans the others.
    """
    start = [*first, *[0] * (words.ndim - len(first))]
    return lax.dynamic_update_slice(words, packed(codes), start)


def read_codes(
    checkpoint: Stored,
    parameter: Parameter,
    device: jax.Device,
    progress: Callable[[int], None],
) -> tuple[Float8e4m3fn[jax.Array, "*stack N K"], Float32[jax.Array, "*stack outputs blocks_in"]]:
    """Reads the FP8 values and scales of a W8A8 parameter.

    The scales are per block on a GPU, and per output and block elsewhere; see `Matrix`.
    """
    by_output = device.platform != "gpu"
    if isinstance(checkpoint, DummyCheckpoint):
        codes = unpacked(dummy_weights.word_array(parameter, device))
        scales = (scales_of_outputs if by_output else code_scales)(parameter, Granularity.BLOCK)
        progress(checkpoint.num_bytes([parameter]))
        return codes, jax.device_put(scales, device)
    codes = jnp.zeros(parameter.shape, jnp.float8_e4m3fn, device=device)
    shape = fp8.code_scale_shape(parameter.shape, by_output=by_output)
    scales = np.empty(shape, np.float32)
    for piece in checkpoint.codes(parameter, Granularity.BLOCK, progress, by_output=by_output):
        first = [each.start if isinstance(each, slice) else each for each in piece.place]
        part = piece.codes.reshape((1,) * (codes.ndim - piece.codes.ndim) + piece.codes.shape)
        codes = _written_codes(codes, part, jnp.asarray(first, np.int32))
        scales[piece.place_of_scales] = piece.scales
    return codes, jax.device_put(scales, device)


@partial(jax.jit, donate_argnums=0)
def _written_codes(
    codes: Float8e4m3fn[jax.Array, "..."],
    part: UInt8[jax.Array, "..."],
    first: Int[jax.Array, " axes"],
) -> Float8e4m3fn[jax.Array, "..."]:
    """Same as `_written`, for unpacked FP8 values."""
    start = [*first, *[0] * (codes.ndim - len(first))]
    part = lax.bitcast_convert_type(part, codes.dtype)
    return lax.dynamic_update_slice(codes, part, start)


@jax.jit
def unpacked(words: Int32[jax.Array, "*stack N words"]) -> Float8e4m3fn[jax.Array, "*stack N K"]:
    """Same as `shared.models.formats.fp8_w8a16.unpacked`."""
    codes = lax.bitcast_convert_type(words, jnp.float8_e4m3fn)  # [.., N, words, 4]
    blocks = codes.reshape(*words.shape[:-1], -1, FP8_BLOCK // 4, 4)
    return blocks.swapaxes(-1, -2).reshape(*words.shape[:-1], -1)


def _placed(scales: Shaped[np.ndarray, "..."], device: jax.Device) -> Float[jax.Array, "..."]:
    return jax.device_put(scales.astype(jnp.bfloat16), device)


def scaled(
    numbers: Float[jax.Array, "*stack N K"], parameter: Parameter, granularity: Granularity
) -> Float[jax.Array, "*stack N K"]:
    """Multiplies dummy FP8 values by their scales."""
    return _scaled(numbers, scales_of_outputs(parameter, granularity))


@partial(jax.jit, donate_argnums=0)
def _scaled(
    numbers: Float[jax.Array, "*stack N K"], scales: Float[jax.Array, "*stack N scales_in"]
) -> Float[jax.Array, "*stack N K"]:
    across = scales
    if scales.shape[-1] > 1:
        across = jnp.repeat(scales, FP8_BLOCK, axis=-1)[..., : numbers.shape[-1]]
    return (numbers.astype(jnp.float32) * across).astype(numbers.dtype)
