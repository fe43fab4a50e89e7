"""How loops over many requests are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compiles a loop at its first call; it runs without the interpreter's lock.

    What was compiled is kept in a folder, beside the source or among the user's own. Where none can
    be written, as in an installation that is mounted read-only, each process compiles for itself.
    """
    on_disk: Any = numba.njit(cache=True, nogil=True)
    in_memory: Any = numba.njit(nogil=True)
    try:
        return on_disk(loop)
    except RuntimeError:  # numba looks for its folder at once, and says that there is none
        return in_memory(loop)
