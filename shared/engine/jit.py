"""Numba compilation of loops over many requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_ENGINE = Path(__file__).parent


class CompiledLoop(Generic[Parameters, Result]):
    """A loop that is compiled at its first call and runs without the GIL.

    Numba is imported then, so that a process without such a call starts sooner.
    """

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Calls the compiled loop."""
        return self.dispatcher(*args, **kwargs)

    @cached_property
    def dispatcher(self) -> Any:
        """Numba's function, which other loops call.

        The result is cached on disk, in the folder of `cache_folder`. If no folder is writable, as
        in a read-only installation without a home folder, each process compiles for itself.
        """
        numba = _numba()
        folder = cache_folder()
        if folder is None:
            return numba.njit(nogil=True)(self._function)
        config = numba.core.config
        other_cache = config.CACHE_DIR
        config.CACHE_DIR = str(folder)
        try:
            return numba.njit(cache=True, nogil=True)(self._function)
        finally:
            config.CACHE_DIR = other_cache


@cache
def _numba() -> Any:
    """Imports Numba, and registers the type of a loop that another one calls."""
    numba = import_module("numba")
    extending = import_module("numba.extending")
    extending.typeof_impl.register(CompiledLoop)(lambda loop, _: numba.typeof(loop.dispatcher))
    return numba


def compiled(loop: Callable[Parameters, Result]) -> CompiledLoop[Parameters, Result]:
    """Returns a loop that Numba compiles."""
    return CompiledLoop(loop)


@cache
def cache_folder() -> Path | None:
    """Returns the writable folder of the cached loops, or None.

    The parent is NUMBA_CACHE_DIR if it is set, else the bytecode folder next to the source, else
    the user's cache. The folder's name contains `revision`.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tandem"
    for parent in [Path(named)] if named else [_ENGINE / "__pycache__", user_cache]:
        folder = parent / f"loops-{revision(_ENGINE)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def revision(folder: Path) -> str:
    """Returns a digest of all files in a folder that use this module.

    Numba recompiles a loop if the loop's own file changes. It does not if a loop that it calls
    changes in another file, and a renamed argument type makes an entry unreadable.
    """
    digest = blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        if b"engine.jit import" in source:
            digest.update(source)
    return digest.hexdigest()
