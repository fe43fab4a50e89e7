"""The operations of a step, one module for each specification.

This package is the one place that decides, once and at import, which operations are kernels: those
of `KERNELS` where there is a GPU. Elsewhere, as in programs for another device of such a machine,
every operation is plain jnp.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import jax

KERNELS: dict[str, ModuleType] = {}
"""The operations that are kernels on a GPU, by name."""

if jax.default_backend() == "gpu":
    from kernels.pallas_gpu import attention as pallas_attention

    KERNELS["attention"] = pallas_attention


@contextmanager
def plain() -> Iterator[None]:
    """Makes every operation the plain one of programs that are first run within it.

    For tests and benches, which compare; it holds for the whole process.
    """
    kernels = dict(KERNELS)
    KERNELS.clear()
    try:
        yield
    finally:
        KERNELS.update(kernels)
