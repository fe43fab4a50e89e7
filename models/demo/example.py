"""Training examples, and the assignment of examples to the train and held-out splits."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

Split = Literal["train", "held_out"]
Message = dict[str, str]

HELD_OUT_SHARE = 10  # one of this number of keys is held out
ANSWER_LINE = re.compile(r"^#### *(-?[\d,]+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A conversation that ends with a user turn or results of tools, and the reply.

    Attributes:
      kind: The generator, a key of `KINDS` in `models.demo.data`.
      messages: The conversation, each with `role` and `content`.
      answer: The reply, or calls in the form of the chat template.
      keys: The content without its wording; no key is in both splits.
      tools: Tools of the conversation, in the format of chat completions.
    """

    kind: str
    messages: list[Message]
    answer: str
    keys: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()


def split_of(key: str) -> Split:
    """Returns the split of a key; the same on every machine."""
    digest = blake2b(key.encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0 else "train"


def drawn(
    kind: str, draw: Callable[[random.Random], Example], split: Split, seed: int
) -> Iterator[Example]:
    """Yields examples of a split endlessly; a seed gives the same ones on every machine.

    Raises:
      ValueError: The split is unknown.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split must be train or held_out, got {split!r}")
    rng = random.Random(f"{kind}/{split}/{seed}")
    return _accepted(draw, split, rng)


def _accepted(
    draw: Callable[[random.Random], Example], split: Split, rng: random.Random
) -> Iterator[Example]:
    while True:
        example = draw(rng)
        if all(split_of(key) == split for key in example.keys):
            yield example


def user(content: str) -> Message:
    """Returns a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Returns an assistant message."""
    return {"role": "assistant", "content": content}


def answer_of(text: str) -> int | None:
    """Returns the number of the last `#### N` line; None if there is no such line."""
    numbers = ANSWER_LINE.findall(text)
    return int(numbers[-1].replace(",", "")) if numbers and numbers[-1].strip("-,") else None
