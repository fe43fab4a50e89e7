"""A model in Python, run by torch: `from torch_impl import LLM`."""

from shared.offline import llm
from shared.offline.params import SamplingParams
from torch_impl import platform

__all__ = ["LLM", "SamplingParams"]


class LLM(llm.LLM):
    """A model on this machine, run by torch; see `shared.offline.llm.LLM`."""

    PLATFORM = platform.PLATFORM
    RANK_MODULE = platform.__name__
