"""Tandem: `from tandem import LLM, SamplingParams`, and the command `tandem`.

`LLM` runs on the default backend (`backends.default`); `tandem.torch_impl` and `tandem.jax_impl` of
an installed wheel have the same names for one backend each.
"""

from importlib import import_module
from typing import Any

from shared import VERSION as __version__
from tandem.backends import default

_OF_BACKEND = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    """Imports a framework where its backend is used, not where the version is read."""
    if name not in _OF_BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{default()}_impl.llm"), name)


__all__ = ["__version__"]
