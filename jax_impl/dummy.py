"""As `shared.models.dummy`, on the device: a parameter is made there in one compiled pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt32

from shared.models.dummy import LAST_SHIFT, ROUNDS, Law, keys_of
from shared.models.parameters import Parameter


def mixed(words: UInt32[jax.Array, "..."]) -> UInt32[jax.Array, "..."]:
    for shift, factor in ROUNDS:
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> LAST_SHIFT)


def elements(
    law: Law, key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> Float[jax.Array, "..."]:
    """As the specification; key and places may have any shapes that go together."""
    tops = mixed(mixed(places) ^ key) >> (32 - law.bits)
    whole = 2 * tops.astype(jnp.int32) + (1 - 2**law.bits)
    return whole.astype(jnp.float32) * np.float32(law.step) + np.float32(law.centre)


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
    """All layers' arrays; a place is counted within its layer."""
    first = int(is_stacked)
    places, stride = jnp.zeros((), jnp.uint32), 1
    for axis in range(len(shape) - 1, first - 1, -1):
        places += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    key = keys.reshape(-1, *[1] * (len(shape) - 1)) if is_stacked else keys[0]
    return elements(law, key, places).astype(dtype)
