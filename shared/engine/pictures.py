"""Pictures as a request brings them: where they stand in its prompt, and what they look like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np
from jaxtyping import Int32, UInt8

from shared.spec.turns import turns

DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture:
    """One picture of a prompt.

    Its pixels are kept as long as its request is alive, as a prompt that lost its pages may have to
    be read again. They are a byte each, far less than what a tower reads or makes of them.

    Attributes:
      first: Position of its first row in the expanded prompt.
      grid: Rows and columns of the prompt's rows that stand for it.
      pixels: At the size that the checkpoint wants (`PictureConfig.fitted`).
      digest: Of its sides and pixels; see `of`.
    """

    first: int
    grid: tuple[int, int]
    pixels: UInt8[np.ndarray, "height width 3"]
    digest: bytes

    @classmethod
    def of(cls, first: int, pixels: UInt8[np.ndarray, "height width 3"], factor: int) -> Self:
        """A picture of fitted pixels, `factor` of which are a side of what one row stands for."""
        height, width, _ = pixels.shape
        found = blake2b(np.array([height, width], np.int32).tobytes(), digest_size=DIGEST_BYTES)
        found.update(np.ascontiguousarray(pixels).data)
        grid = height // factor, width // factor
        return cls(first=first, grid=grid, pixels=pixels, digest=found.digest())

    @property
    def count(self) -> int:
        """Rows of the prompt that stand for it."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.first + self.count


@dataclass(frozen=True)
class Sight:
    """How the rows of a prompt with pictures turn; see `shared.spec.turns`.

    Attributes:
      turns: Of each row of the prompt.
      delta: What the turns of each later row are above its position.
    """

    turns: Int32[np.ndarray, "T 3"]
    delta: int

    @classmethod
    def of(cls, prompt: Sequence[int], image_token: int, pictures: Sequence[Picture]) -> Self:
        """Of an expanded prompt, whose image tokens are those of its pictures."""
        found, delta = turns(np.array(prompt), image_token, [each.grid for each in pictures])
        return cls(found.astype(np.int32), delta)

    def between(self, first: int, end: int) -> Int32[np.ndarray, "n 3"]:
        """The turns of positions `first` up to `end`, behind the prompt as well."""
        behind = np.arange(max(first, len(self.turns)), end, dtype=np.int32) + self.delta
        return np.concatenate([self.turns[first:end], behind[:, None].repeat(3, axis=1)])


def touched(pictures: Sequence[Picture], first: int, end: int) -> Iterator[Picture]:
    """The pictures of which a row lies at positions `first` up to `end`."""
    return (each for each in pictures if each.first < end and first < each.end)


def without(
    pictures: Sequence[Picture], tokens: Int32[np.ndarray, " n"], first: int
) -> Int32[np.ndarray, " some"]:
    """Tokens that begin at position `first`, but for those in whose place pictures stand."""
    if not pictures:
        return tokens
    is_text = np.ones(len(tokens), bool)
    for each in touched(pictures, first, first + len(tokens)):
        is_text[max(0, each.first - first) : each.end - first] = False
    return tokens[is_text]


def key_of(pictures: Sequence[Picture], first: int, end: int) -> bytes:
    """What tells positions with pictures from others with the same tokens; of text it is empty.

    It names each picture that is touched, and where in it the positions begin.
    """
    return b"".join(
        each.digest + (first - each.first).to_bytes(4, "little", signed=True)
        for each in touched(pictures, first, end)
    )


def parting(some: Sequence[Picture], others: Sequence[Picture]) -> int | None:
    """The position at which two texts with the same tokens begin to show different pictures."""
    for a, b in zip(some, others, strict=False):
        if (a.first, a.digest) != (b.first, b.digest):
            return min(a.first, b.first)
    longer = max(some, others, key=len)[min(len(some), len(others)) :]
    return longer[0].first if longer else None
