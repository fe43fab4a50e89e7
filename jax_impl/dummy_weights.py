"""Same as `shared.models.dummy_elements`; one compiled pass generates an array on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32, UInt32

from shared.models.dummy_elements import LAST_SHIFT, ROUNDS, InitSpec, keys_of
from shared.models.parameter import Parameter
from shared.models.parameter_arrays import shard_outputs


def mixed(words: UInt32[jax.Array, "..."]) -> UInt32[jax.Array, "..."]:
    for shift, factor in ROUNDS:
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> LAST_SHIFT)


def elements(
    law: InitSpec, key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> Float[jax.Array, "..."]:
    """Same as the specification; the shapes of key and places must be broadcastable."""
    tops = top_bits(law, key, places)
    whole = 2 * tops.astype(jnp.int32) + (1 - 2**law.bits)
    return whole.astype(jnp.float32) * np.float32(law.step) + np.float32(law.centre)


def word_array(
    parameter: Parameter,
    codes: Callable[[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]], UInt32[jax.Array, "..."]],
    parts: int,
    block: int,
    device: jax.Device,
) -> Int32[jax.Array, "..."]:
    """Generates a packed parameter or a rank's shard, without temporary memory.

    Args:
      parameter: The parameter.
      codes: Returns the quantised elements of a layer's key and of indices in the layer.
      parts: Elements of an int32, the first in its lowest bits.
      block: Inputs that are packed together: part i of element j is input `block // parts` i + j.
      device: Device of the array.
    """
    keys, outputs = jax.device_put((keys_of(parameter), _outputs(parameter)), device)
    shape = (*parameter.shape[:-1], parameter.shape[-1] // parts)
    return _words_made(keys, outputs, _ShardLayout.of(parameter, shape), codes, parts, block)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _words_made(
    keys: UInt32[jax.Array, " layers"],
    outputs: Int32[jax.Array, " outputs"],
    form: "_ShardLayout",
    codes: Callable[..., UInt32[jax.Array, "..."]],
    parts: int,
    block: int,
) -> Int32[jax.Array, "..."]:
    number, key, is_filled = _numbered(keys, outputs, form)
    count = block // parts
    first = number // count * block + number % count
    words = jnp.zeros((), jnp.uint32)
    for part in range(parts):
        words |= codes(key, first + count * part) << (32 // parts * part)
    words = jnp.where(is_filled, words, np.uint32(0))
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def parameter_array(
    parameter: Parameter, law: InitSpec, dtype: np.dtype | type, device: jax.Device
) -> Float[jax.Array, "..."]:
    """Generates a parameter or a rank's shard, without temporary memory."""
    keys, outputs = jax.device_put((keys_of(parameter), _outputs(parameter)), device)
    return _made(keys, outputs, _ShardLayout.of(parameter, parameter.shape), law, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _made(
    keys: UInt32[jax.Array, " layers"],
    outputs: Int32[jax.Array, " outputs"],
    form: "_ShardLayout",
    law: InitSpec,
    dtype: np.dtype,
) -> Float[jax.Array, "..."]:
    places, key, is_filled = _numbered(keys, outputs, form)
    return jnp.where(is_filled, elements(law, key, places), np.float32(0)).astype(dtype)


@dataclass(frozen=True)
class _ShardLayout:
    """Layout of an array, with the size of the whole parameter along the sharded axis."""

    shape: tuple[int, ...]
    is_stacked: bool
    axis: int
    whole: int

    @classmethod
    def of(cls, parameter: Parameter, shape: tuple[int, ...]) -> "_ShardLayout":
        axis = _axis_of(parameter)
        whole = shape[axis] if parameter.whole is None else parameter.whole.shape[axis]
        return cls(shape, parameter.stacked, axis, whole)


def _axis_of(parameter: Parameter) -> int:
    """Returns the sharded axis; for replicated parameters any axis after the layers."""
    return max(len(parameter.shape) + parameter.axis, int(parameter.stacked))


def _outputs(parameter: Parameter) -> Int32[np.ndarray, " outputs"]:
    """Returns the index of each of a rank's outputs in the whole parameter; -1 for padding."""
    outputs = np.full(parameter.shape[_axis_of(parameter)], -1, np.int32)
    taken = np.arange(len(outputs)) if parameter.whole is None else shard_outputs(parameter)
    outputs[: len(taken)] = taken
    return outputs


def _numbered(
    keys: UInt32[jax.Array, " layers"], outputs: Int32[jax.Array, " outputs"], form: _ShardLayout
) -> tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."], Bool[jax.Array, "..."]]:
    """Returns the index of each element in its layer of the whole, the layer's key, and a mask.

    The mask is False for padding.
    """
    shape, places, stride = form.shape, jnp.zeros((), jnp.uint32), 1
    outputs = jnp.expand_dims(outputs, [i for i in range(len(shape)) if i != form.axis])
    for axis in range(len(shape) - 1, int(form.is_stacked) - 1, -1):
        own = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        own = outputs.astype(jnp.uint32) if axis == form.axis else own
        places += own * np.uint32(stride)
        stride *= form.whole if axis == form.axis else shape[axis]
    key = keys.reshape(-1, *[1] * (len(shape) - 1)) if form.is_stacked else keys[0]
    return jnp.broadcast_to(places, shape), key, outputs >= 0


def top_bits(
    law: InitSpec, key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """Returns the highest `law.bits` bits of the hash."""
    return mixed(mixed(places) ^ key) >> (32 - law.bits)
