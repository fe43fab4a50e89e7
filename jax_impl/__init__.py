"""The JAX backend: `from jax_impl import LLM, SamplingParams`."""

from importlib import import_module
from typing import Any

_OF_LLM = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    """What is imported from the package is loaded when it is asked for.

    `python -m jax_impl.serve` imports the package first, and must not find itself loaded by it.
    """
    if name not in _OF_LLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.llm"), name)
