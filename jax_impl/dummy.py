"""As `shared.models.dummy`, on the device: a parameter is made there in one compiled pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32, UInt32

from shared.models.dummy import CODES, CODES_LAW, LAST_SHIFT, ROUNDS, Law, keys_of
from shared.models.fp8_words import FP8_BLOCK, shape_of_words
from shared.models.parameters import Parameter


def mixed(words: UInt32[jax.Array, "..."]) -> UInt32[jax.Array, "..."]:
    for shift, factor in ROUNDS:
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> LAST_SHIFT)


def elements(
    law: Law, key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> Float[jax.Array, "..."]:
    """As the specification; key and places may have any shapes that go together."""
    tops = _tops(law, key, places)
    whole = 2 * tops.astype(jnp.int32) + (1 - 2**law.bits)
    return whole.astype(jnp.float32) * np.float32(law.step) + np.float32(law.centre)


def codes(
    key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """The FP8 codes of the numbers that `elements` gives by `CODES_LAW`."""
    tops, half = _tops(CODES_LAW, key, places), np.uint32(2 ** (CODES_LAW.bits - 1))
    is_negative = tops < half
    place = jnp.where(is_negative, half - 1 - tops, tops - half)  # among 1, 3, 5 and so on
    fours = jnp.where(place < 4, np.uint32(CODES[0]), np.uint32(CODES[1]))
    return ((fours >> (8 * (place & 3))) & 0xFF) | (is_negative.astype(jnp.uint32) << 7)


def word_array(parameter: Parameter, device: jax.Device) -> Int32[jax.Array, "..."]:
    """A whole parameter in FP8, in words of four; nothing else is held while it is made."""
    keys = jax.device_put(keys_of(parameter), device)
    return _words_made(keys, shape_of_words(parameter.shape), parameter.stacked)


@partial(jax.jit, static_argnums=(1, 2))
def _words_made(
    keys: UInt32[jax.Array, " layers"], shape: tuple[int, ...], is_stacked: bool
) -> Int32[jax.Array, "..."]:
    number, key = _numbered(keys, shape, is_stacked)
    count = FP8_BLOCK // 4
    first = number // count * FP8_BLOCK + number % count
    words = jnp.zeros((), jnp.uint32)
    for byte in range(4):
        words |= codes(key, first + count * byte) << (8 * byte)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def share(parameter: Parameter, made: Float[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """What a rank's share has of the whole parameter, or of the scales of each of its outputs."""
    if parameter.whole is None:
        return made
    taken = jnp.take(made, parameter.outputs, axis=parameter.axis)
    spare = [(0, 0)] * made.ndim
    spare[parameter.axis] = (0, parameter.shape[parameter.axis] - taken.shape[parameter.axis])
    return jnp.pad(taken, spare)


def parameter_array(
    parameter: Parameter, law: Law, dtype: np.dtype | type, device: jax.Device
) -> Float[jax.Array, "..."]:
    """A whole parameter; nothing else is held while it is made."""
    keys = jax.device_put(keys_of(parameter), device)
    return _made(keys, parameter.shape, parameter.stacked, law, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _made(
    keys: UInt32[jax.Array, " layers"],
    shape: tuple[int, ...],
    is_stacked: bool,
    law: Law,
    dtype: np.dtype,
) -> Float[jax.Array, "..."]:
    places, key = _numbered(keys, shape, is_stacked)
    return elements(law, key, places).astype(dtype)


def _numbered(
    keys: UInt32[jax.Array, " layers"], shape: tuple[int, ...], is_stacked: bool
) -> tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]]:
    """The numbers of all elements, counted within their layer, and their layers' keys."""
    first = int(is_stacked)
    places, stride = jnp.zeros((), jnp.uint32), 1
    for axis in range(len(shape) - 1, first - 1, -1):
        places += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return places, keys.reshape(-1, *[1] * (len(shape) - 1)) if is_stacked else keys[0]


def _tops(
    law: Law, key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """The highest bits of the hash, as many as a law looks at."""
    return mixed(mixed(places) ^ key) >> (32 - law.bits)
