"""One training example, and the rule that keeps train and held-out apart."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

Split = Literal["train", "held_out"]
Message = dict[str, str]

HELD_OUT_SHARE = 10  # one key in so many is held out
ANSWER_LINE = re.compile(r"^#### *(-?[\d,]+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A conversation up to the user's last turn, and the reply to it.

    Attributes:
      kind: Which generator made it: problems, copying, functions or chats.
      messages: The conversation, each with `role` and `content`; the last one is the user's.
      answer: The reply.
      keys: What the example is about, without its wording: no key is in both splits.
    """

    kind: str
    messages: list[Message]
    answer: str
    keys: tuple[str, ...]


def split_of(key: str) -> Split:
    """The part of the data that a key belongs to; the same on every machine."""
    digest = blake2b(key.encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0 else "train"


def drawn(
    kind: str, draw: Callable[[random.Random], Example], split: Split, seed: int
) -> Iterator[Example]:
    """Examples of one split without end; one seed gives the same ones on every machine.

    Raises:
      ValueError: There is no such split.
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
    """A turn of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content}


def answer_of(text: str) -> int | None:
    """The number of the last `#### N` line; None where there is no such line."""
    numbers = ANSWER_LINE.findall(text)
    return int(numbers[-1].replace(",", "")) if numbers and numbers[-1].strip("-,") else None
