"""A model in Python, run by torch: `from torch_impl import LLM`."""

from shared.offline import llm
from shared.offline.params import SamplingParams
from torch_impl.platform import PLATFORM

__all__ = ["LLM", "SamplingParams"]


class LLM(llm.LLM):
    """A model on this machine, run by torch; see `shared.offline.llm.LLM`."""

    PLATFORM = PLATFORM
