"""Images of a request: position in the prompt, pixels, digest, and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Int32, UInt8

from shared.models.image_processor import DIGEST_BYTES
from shared.spec.mrope import mrope_positions


class CacheKeyImage(Protocol):
    """Image as the cache key contains it; see `PromptImage`."""

    @property
    def first(self) -> int:
        """Position of its first image token."""
        ...

    @property
    def end(self) -> int:
        """Position after its last image token."""
        ...

    @property
    def digest(self) -> bytes:
        """Digest of its size and pixels."""
        ...


KeyImage = TypeVar("KeyImage", bound=CacheKeyImage)


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptImage:
    """One image of a prompt.

    Its pixels are kept while its request is alive, because a preempted prompt may have to be
    encoded again. They take one byte per channel, far less than the encoder's inputs or outputs.

    Attributes:
      first: Position of its first image token in the expanded prompt.
      grid: Rows and columns of its image tokens.
      pixels: Pixels, resized by the image processor (`ImageConfig.fitted`).
      digest: Digest of its size and pixels; see `of`.
    """

    first: int
    grid: tuple[int, int]
    pixels: UInt8[np.ndarray, "height width 3"]
    digest: bytes

    @classmethod
    def of(cls, first: int, pixels: UInt8[np.ndarray, "height width 3"], factor: int) -> Self:
        """Creates an image from resized pixels; an image token is a square with sides of `factor`
        pixels.
        """
        height, width, _ = pixels.shape
        found = blake2b(np.array([height, width], np.int32).tobytes(), digest_size=DIGEST_BYTES)
        found.update(np.ascontiguousarray(pixels).data)
        grid = height // factor, width // factor
        return cls(first=first, grid=grid, pixels=pixels, digest=found.digest())

    @property
    def count(self) -> int:
        """Number of its image tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """Position after its last image token."""
        return self.first + self.count


@dataclass(frozen=True)
class MropePositions:
    """M-RoPE positions of a prompt with images; see `shared.spec.mrope`.

    Attributes:
      turns: M-RoPE positions of each token of the prompt.
      delta: M-RoPE position delta of later tokens.
    """

    turns: Int32[np.ndarray, "T 3"]
    delta: int

    @classmethod
    def of(cls, prompt: Sequence[int], image_token: int, images: Sequence[PromptImage]) -> Self:
        """Computes the positions of an expanded prompt with the image tokens of its images."""
        found, delta = mrope_positions(
            np.array(prompt), image_token, [each.grid for each in images]
        )
        return cls(found.astype(np.int32), delta)

    def between(self, first: int, end: int) -> Int32[np.ndarray, "n 3"]:
        """Returns the M-RoPE positions from `first` to `end`, also past the prompt."""
        behind = np.arange(max(first, len(self.turns)), end, dtype=np.int32) + self.delta
        return np.concatenate([self.turns[first:end], behind[:, None].repeat(3, axis=1)])


def overlapping(images: Sequence[KeyImage], first: int, end: int) -> Iterator[KeyImage]:
    """Yields the images with a token at positions `first` to `end`."""
    return (each for each in images if each.first < end and first < each.end)


def text_tokens(
    images: Sequence[PromptImage], tokens: Int32[np.ndarray, " n"], first: int
) -> Int32[np.ndarray, " some"]:
    """Removes image tokens from tokens that start at position `first`."""
    if not images:
        return tokens
    is_text = np.ones(len(tokens), bool)
    for each in overlapping(images, first, first + len(tokens)):
        is_text[max(0, each.first - first) : each.end - first] = False
    return tokens[is_text]


def cache_key(images: Sequence[CacheKeyImage], first: int, end: int) -> bytes:
    """Returns the cache key of the images that overlap a range of positions; empty for text.

    It contains each image's digest and the offset of the range in the image.
    """
    return b"".join(
        each.digest + (first - each.first).to_bytes(4, "little", signed=True)
        for each in overlapping(images, first, end)
    )


def first_difference(some: Sequence[PromptImage], others: Sequence[PromptImage]) -> int | None:
    """Returns the first position at which two prompts with the same tokens have different
    images.
    """
    for a, b in zip(some, others, strict=False):
        if (a.first, a.digest) != (b.first, b.digest):
            return min(a.first, b.first)
    longer = max(some, others, key=len)[min(len(some), len(others)) :]
    return longer[0].first if longer else None
