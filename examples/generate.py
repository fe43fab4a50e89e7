"""Generates text in Python with speculation: `python -m examples.generate [torch|jax]`."""

import argparse
from importlib import import_module

QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there?"


def main(backend: str) -> None:
    """Runs a chat and two completions with the demo model, the default of `LLM`."""
    LLM = import_module(f"{backend}_impl").LLM  # or: from torch_impl import LLM, SamplingParams
    SamplingParams = import_module(f"{backend}_impl").SamplingParams
    options = {"speculative_algorithm": "NEXTN", "max_running_requests": 2, "context_length": 256}
    with LLM(**options, log_level="info") as llm:  # logs the progress of JAX compilation
        greedy = SamplingParams(temperature=0, max_tokens=64)
        (answer,) = llm.chat([{"role": "user", "content": QUESTION}], greedy)
        print(answer.text)
        print(f"acceptance length {answer.outputs[0].accept_length:.2f}")
        for result in llm.generate(["Tom has 3 apples", "Ann buys 2 pens"], greedy):
            print(repr(result.prompt), "->", repr(result.text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", nargs="?", default="torch", choices=["torch", "jax"])
    main(parser.parse_args().backend)
