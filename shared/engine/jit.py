"""Numba compilation of loops over many requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compiles a loop at its first call; it runs without the GIL.

    The result is cached in a folder next to the source or in the user's cache. If neither is
    writable, as in a read-only installation, each process compiles for itself.
    """
    on_disk: Any = numba.njit(cache=True, nogil=True)
    in_memory: Any = numba.njit(nogil=True)
    try:
        return on_disk(loop)
    except RuntimeError:  # numba raises at once if it finds no writable folder
        return in_memory(loop)
