from jax_impl.llm import LLM as LLM
from jax_impl.llm import SamplingParams as SamplingParams
