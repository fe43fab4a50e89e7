"""Where a bench runs, and how it sees that nothing waits for the device."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import numpy as np


def versions(framework: str, device: str) -> dict[str, str]:
    """What ran where; only the framework that is measured is imported."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    module = import_module(framework)
    if framework == "jax":
        return found | {"jax": module.__version__, "device": module.devices()[0].device_kind}
    name = module.cuda.get_device_name() if device == "cuda" else platform.processor()
    return found | {"torch": module.__version__, "device": name}


@contextmanager
def nothing_waits(framework: str, on_gpu: bool) -> Iterator[None]:
    """Turns every hidden wait or transfer of a step into an error."""
    if framework == "jax":
        with import_module("jax").transfer_guard("disallow"):
            yield
    elif on_gpu:
        cuda = import_module("torch").cuda
        cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            cuda.set_sync_debug_mode("default")
    else:
        yield
