"""Python API with the JAX backend: `from jax_impl import LLM`."""

from shared.offline import llm
from shared.offline.late_platform import LatePlatform
from shared.offline.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

MODULE = "jax_impl.platform"


class LLM(llm.LLM):
    """LLM with the JAX backend; see `shared.offline.llm.LLM`."""

    PLATFORM = LatePlatform(MODULE)
    RANK_MODULE = None
