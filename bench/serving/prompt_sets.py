"""Prompt sets: the tasks that ship with the project, or random tokens."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from models.demo.agents import with_call_fields
from models.demo.data import KINDS, TEXT_SHARES, examples

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIX, RANDOM = "mix", "random"
NAMES = (*KINDS, MIX, RANDOM)
"""Held-out word problems, copying, code, chats, tools, a mix without tools, random tokens."""

FIRST_ID = 2  # lower ids are often end tokens or unused


@dataclass(frozen=True)
class Ask:
    """A request: the route, and the fields of its body."""

    path: str
    body: Mapping[str, Any]

    def with_fields(self, **fields: Any) -> "Ask":
        """The same with more fields, or with others of a name."""
        return Ask(self.path, {**self.body, **fields})


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Prompts and answers of random tokens.

    Attributes:
      input, output: Most tokens of a prompt and of an answer, which nothing else ends.
      range_ratio: Each length is drawn from this share of the most up to the most.
      vocab: Ids are below it.
    """

    input: int
    output: int
    range_ratio: float
    vocab: int


def asks(name: str, count: int, seed: int, lengths: RandomLengths | None) -> list[Ask]:
    """Returns `count` requests of a set; equal seeds give equal requests.

    Args:
      lengths: Of random tokens; no other set has any.

    Raises:
      ValueError: There is no such set, or the lengths cannot be drawn; one sentence.
    """
    if name not in NAMES:
        raise ValueError(f"there is no set of prompts {name!r}, only {', '.join(NAMES)}")
    if name != RANDOM:
        return list(islice(_tasks(name, seed), count))
    if lengths is None:
        raise ValueError("random prompts need lengths")
    return list(islice(_random(seed, lengths), count))


def _tasks(name: str, seed: int) -> Iterator[Ask]:
    is_mix = name == MIX
    found = examples("held_out", seed, TEXT_SHARES) if is_mix else KINDS[name]("held_out", seed)
    for example in found:
        tools = {"tools": list(example.tools)} if example.tools else {}
        yield Ask(CHAT, {"messages": with_call_fields(example.messages), **tools})


def _random(seed: int, lengths: RandomLengths) -> Iterator[Ask]:
    if not 0 <= lengths.range_ratio <= 1:
        raise ValueError(f"the range ratio must be from 0 to 1, got {lengths.range_ratio}")
    if min(lengths.input, lengths.output) < 1 or lengths.vocab <= FIRST_ID:
        raise ValueError(f"random prompts need lengths of at least 1 and ids above {FIRST_ID}")
    rng = random.Random(f"random/{seed}")

    def drawn(most: int) -> int:
        return rng.randint(max(1, round(most * lengths.range_ratio)), most)

    while True:
        prompt = [rng.randrange(FIRST_ID, lengths.vocab) for _ in range(drawn(lengths.input))]
        body = {"prompt": prompt, "max_tokens": drawn(lengths.output), "ignore_eos": True}
        yield Ask(COMPLETIONS, body)
