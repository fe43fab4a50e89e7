"""Python API with the torch backend: `from torch_impl import LLM`."""

from shared.offline import llm
from shared.offline.late_platform import LatePlatform
from shared.offline.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

MODULE = "torch_impl.platform"


class LLM(llm.LLM):
    """LLM with the torch backend; see `shared.offline.llm.LLM`."""

    PLATFORM = LatePlatform(MODULE)
    RANK_MODULE = MODULE
