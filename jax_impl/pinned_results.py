"""Results in pinned host memory: the program writes them there, and the host reads them in place.

Other results are copied to pageable memory, which is allocated and mapped for each.
"""

import jax
import numpy as np
from jaxtyping import Int32

PINNED = "pinned_host"
"""JAX's name of the memory."""


class _View:
    """Array interface of a result, which stays as long as a numpy array on it."""

    def __init__(self, result: jax.Array) -> None:
        self._result = result
        self.__array_interface__ = {
            "version": 3,
            "shape": result.shape,
            "typestr": np.dtype(result.dtype).str,
            "data": (result.unsafe_buffer_pointer(), True),
        }


def has_pinned_memory(device: jax.Device) -> bool:
    """Returns True if programs of the device can write to pinned memory."""
    return PINNED in {memory.kind for memory in device.addressable_memories()}


def pinned(result: Int32[jax.Array, " words"]) -> Int32[jax.Array, " words"]:
    """Moves a result of a program to pinned memory."""
    return jax.device_put(result, jax.memory.Space.Host)


def is_pinned(result: jax.Array) -> bool:
    """Returns True for a result in pinned memory."""
    return result.sharding.memory_kind == PINNED


def read_pinned(result: jax.Array) -> Int32[np.ndarray, " words"]:
    """Waits for a result in pinned memory, and returns it without a copy."""
    return np.asarray(_View(result.block_until_ready()))
