"""A model in Python, run by JAX: `from jax_impl import LLM`."""

from jax_impl import platform
from shared.offline import llm
from shared.offline.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


class LLM(llm.LLM):
    """A model on this machine, run by JAX; see `shared.offline.llm.LLM`."""

    PLATFORM = platform.PLATFORM
    RANK_MODULE = None
