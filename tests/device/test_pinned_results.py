"""Results of JAX programs in pinned host memory."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.pinned_results import has_pinned_memory, is_pinned, pinned, read_pinned


def _result() -> jax.Array:
    device = jax.devices()[0]
    assert has_pinned_memory(device)
    words = jax.device_put(np.arange(1000, dtype=np.int32), device)
    return jax.jit(lambda words: pinned(words + 1))(words)


def test_read_pinned_returns_program_result_in_place():
    result = _result()
    assert is_pinned(result)
    words = read_pinned(result)
    assert words.ctypes.data == result.unsafe_buffer_pointer()
    np.testing.assert_array_equal(words, np.arange(1, 1001))
    assert not words.flags.writeable


def test_read_pinned_keeps_memory_of_result():
    result = _result()
    held = weakref.ref(result)
    words = read_pinned(result)[10:]
    del result
    assert held() is not None
    del words
    assert held() is None


def test_is_pinned_distinguishes_device_memory():
    assert not is_pinned(jnp.zeros(3, jnp.int32))
