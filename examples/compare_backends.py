"""Compares sampled outputs of both backends token by token.

`python -m examples.compare_backends` runs torch and JAX with speculation, and torch without.
"""

from collections.abc import Sequence
from importlib import import_module

# One request, one prefill chunk size and no prefix cache: JAX compiles two programs.
FEW_PROGRAMS = {
    "max_running_requests": 1,
    "context_length": 256,
    "chunked_prefill_size": 64,
    "disable_radix_cache": True,
    "log_level": "info",  # shows the progress of compilation in JAX (about a minute)
    "grammar_backend": "none",
}
QUESTIONS = ["Ann has 7 bags of 12 nuts. How many nuts?", "Tom reads 9 pages a day for 14 days."]


def tokens_of(backend: str, drafter: Sequence[str]) -> list[list[int]]:
    """Returns the output tokens of one backend."""
    module = import_module(f"{backend}_impl")
    options = {"speculative_algorithm": drafter[0]} if drafter else {}
    sampling = module.SamplingParams(temperature=0.8, seed=1, max_tokens=48)
    with module.LLM(**FEW_PROGRAMS, **options) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [answer.outputs[0].token_ids for answer in llm.chat(chats, sampling)]


def main() -> None:
    """Compares torch and JAX with NEXTN against plain decoding in torch."""
    plain = tokens_of("torch", [])
    for backend in ("torch", "jax"):
        is_equal = tokens_of(backend, ["NEXTN"]) == plain
        print(f"{backend} with NEXTN: {'equal to' if is_equal else 'NOT EQUAL TO'} plain decoding")


if __name__ == "__main__":
    main()
