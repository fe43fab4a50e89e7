from torch_impl.llm import LLM as LLM
from torch_impl.llm import SamplingParams as SamplingParams
