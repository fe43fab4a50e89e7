"""Device selection of the JAX backend."""

import os

import jax

from shared.options.flags import ConfigError
from shared.process.device import Device, check_gpu_environment

PLATFORM_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
"""Environment variables that select the platform; JAX also reads the second, an older name."""


def find_device() -> Device:
    """Returns the first GPU, or the CPU if there is none.

    Raises:
      ConfigError: The environment names a device that is not there.
    """
    asked = next(filter(None, map(os.environ.get, PLATFORM_VARIABLES)), "")
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # JAX asserts where CUDA is not installed
        reason = str(error).partition("\n")[0] or "its support is not installed"
        raise ConfigError(
            f"JAX has no device {asked!r}, which {' or '.join(PLATFORM_VARIABLES)} names "
            f"({reason}); name one that is there, or unset the variable"
        ) from error
    if device.platform == "cpu":
        if "cpu" not in asked.split(","):
            check_gpu_environment(os.environ)
        return Device.cpu()
    stats = device.memory_stats()
    return Device("gpu", device.device_kind, stats["bytes_limit"] - stats["bytes_in_use"])
