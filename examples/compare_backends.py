"""Asks both backends the same at a temperature; the texts are equal token for token.

`python -m examples.compare_backends`
"""

from collections.abc import Sequence
from importlib import import_module

# One prompt at a time, in pieces of one size, of which nothing is kept: JAX compiles two programs.
FEW_PROGRAMS = {
    "max_running_requests": 1,
    "context_length": 256,
    "chunked_prefill_size": 64,
    "disable_radix_cache": True,
    "log_level": "info",  # JAX compiles for a minute, and prints how far
    "grammar_backend": "none",
}
QUESTIONS = ["Ann has 7 bags of 12 nuts. How many nuts?", "Tom reads 9 pages a day for 14 days."]


def tokens_of(backend: str, drafter: Sequence[str]) -> list[list[int]]:
    """The tokens of the answers of one backend."""
    module = import_module(f"{backend}_impl")
    options = {"speculative_algorithm": drafter[0]} if drafter else {}
    sampling = module.SamplingParams(temperature=0.8, seed=1, max_tokens=48)
    with module.LLM(**FEW_PROGRAMS, **options) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [answer.outputs[0].token_ids for answer in llm.chat(chats, sampling)]


def main() -> None:
    """Compares torch with drafts, torch without, and JAX with drafts."""
    plain = tokens_of("torch", [])
    for backend in ("torch", "jax"):
        is_equal = tokens_of(backend, ["NEXTN"]) == plain
        print(f"{backend} with NEXTN: {'equal to' if is_equal else 'NOT EQUAL TO'} plain decoding")


if __name__ == "__main__":
    main()
