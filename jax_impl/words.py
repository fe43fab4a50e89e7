"""Parameters that stay FP8, as `shared.models.fp8_words`, on a device.

They are read tensor by tensor and put in words there; no number is widened on the way.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int, Int32, Shaped, UInt8

from jax_impl import dummy
from shared.models import fp8
from shared.models.checkpoint import Checkpoint
from shared.models.dummy import DummyCheckpoint, Stored, code_scales
from shared.models.fp8_words import FP8_BLOCK, packed_scales, shape_of_words
from shared.models.parameters import Parameter


def packed(codes: UInt8[jax.Array, "*stack N K"]) -> Int32[jax.Array, "*stack N words"]:
    """As `shared.models.fp8_words.packed`, of codes that are numbers."""
    blocks = codes.reshape(*codes.shape[:-1], -1, 4, FP8_BLOCK // 4).swapaxes(-1, -2)
    return lax.bitcast_convert_type(blocks, jnp.int32).reshape(shape_of_words(codes.shape))


def read(
    checkpoint: Stored,
    parameter: Parameter,
    device: jax.Device,
    progress: Callable[[int], None],
) -> tuple[Int32[jax.Array, "*stack N words"], Float[jax.Array, "*stack blocks blocks_in"]]:
    """The words of a parameter and its scales; see `shared.models.checkpoint.Checkpoint.codes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        scales = packed_scales(code_scales(parameter))
        words = dummy.word_array(parameter, device)
        progress(checkpoint.num_bytes([parameter]))
        return words, _placed(scales, device)
    return _from_files(checkpoint, parameter, device, progress)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    device: jax.Device,
    progress: Callable[[int], None],
) -> tuple[Int32[jax.Array, "*stack N words"], Float[jax.Array, "*stack blocks blocks_in"]]:
    words = jnp.zeros(shape_of_words(parameter.shape), jnp.int32, device=device)
    scales = np.empty(fp8.scale_shape(parameter.shape), np.float32)
    for piece in checkpoint.codes(parameter, progress):
        first = [each.start if isinstance(each, slice) else each for each in piece.place]
        codes = piece.codes.reshape((1,) * (words.ndim - piece.codes.ndim) + piece.codes.shape)
        words = _written(words, codes, jnp.asarray(first, np.int32))
        scales[piece.place_of_scales] = piece.scales
    return words, _placed(scales, device)


@partial(jax.jit, donate_argnums=0)
def _written(
    words: Int32[jax.Array, "..."], codes: UInt8[jax.Array, "..."], first: Int[jax.Array, " axes"]
) -> Int32[jax.Array, "..."]:
    """The words with those of a piece, which begins at `first`; in their own memory.

    Args:
      first: On the outer axes; the piece spans the others.
    """
    start = [*first, *[0] * (words.ndim - len(first))]
    return lax.dynamic_update_slice(words, packed(codes), start)


def _placed(scales: Shaped[np.ndarray, "..."], device: jax.Device) -> Float[jax.Array, "..."]:
    return jax.device_put(scales.astype(jnp.bfloat16), device)


def scaled(
    numbers: Float[jax.Array, "*stack N K"], parameter: Parameter
) -> Float[jax.Array, "*stack N K"]:
    """The numbers of a dummy's codes times their scales."""
    return _scaled(numbers, code_scales(parameter))


@partial(jax.jit, donate_argnums=0)
def _scaled(
    numbers: Float[jax.Array, "*stack N K"], scales: Float[jax.Array, "*stack blocks blocks_in"]
) -> Float[jax.Array, "*stack N K"]:
    N, K = numbers.shape[-2:]
    across = jnp.repeat(jnp.repeat(scales, FP8_BLOCK, axis=-1), FP8_BLOCK, axis=-2)[..., :N, :K]
    return (numbers.astype(jnp.float32) * across).astype(numbers.dtype)
