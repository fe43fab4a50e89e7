"""Load of the measurements of remote prefill, and its options."""

import argparse
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of both measurements: TTFT, and inter-token latency while prompts arrive.

    Attributes:
      prompt_tokens: Tokens of a long prompt.
      num_prompts: Long prompts that arrive at once.
      num_running: Requests that decode meanwhile.
      max_tokens: Their maximum output tokens.
      rounds: Long prompts of the measurement of TTFT.
    """

    prompt_tokens: int
    num_prompts: int
    num_running: int
    max_tokens: int
    rounds: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Returns the load of the options of `add_options`, and of those of a subclass."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})


def add_options(parser: argparse.ArgumentParser, max_tokens: int, rounds: int) -> None:
    """Adds an option for each attribute of `Load`.

    Args:
      parser: Parser of a bench.
      max_tokens, rounds: Defaults.
    """
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=8192)
    add("--num-prompts", type=int, default=32, help="long prompts that arrive at once")
    add("--num-running", type=int, default=16, help="requests that decode meanwhile")
    add("--max-tokens", type=int, default=max_tokens, help="their maximum output tokens")
    add("--rounds", type=int, default=rounds, help="prompts of the measurement of TTFT")
