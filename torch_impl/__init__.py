"""The torch backend: `from torch_impl import LLM, SamplingParams`."""

from importlib import import_module
from typing import Any

_OF_LLM = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    """Loads the public names of the package on first use.

    `python -m torch_impl.serve` imports the package first, which must not import `serve` itself.
    """
    if name not in _OF_LLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.llm"), name)
