"""Gathers of ranks: few rows and many, of words and of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels.tiles import LinearTiles
from shared.spec.reduction_order import chunks_of_squares


@dataclass(frozen=True)
class Case:
    """A gather.

    Attributes:
      rows, width: Of the array of all ranks.
      dtype: Of its values.
      chunks: Columns of the second array of all ranks; 0: there is none.
      largest_words_bytes: See `gathered`.
    """

    rows: int
    width: int
    dtype: str = "bfloat16"
    chunks: int = 0
    largest_words_bytes: int = 1 << 17

    def __str__(self) -> str:
        kind = "words" if self.largest_words_bytes else "blocks"
        return f"{self.rows} x {self.width} {self.dtype}, {self.chunks} sums, {kind}"

    def share(self, rank: int, ranks: int, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A rank's columns: random bits, some of which are no numbers; sums in float32."""
        rng = np.random.default_rng([rank, step, self.rows, self.width])
        kind = np.uint16 if self.dtype == "bfloat16" else np.uint32
        values = rng.integers(0, np.iinfo(kind).max, (self.rows, self.width // ranks), kind, True)
        if not self.chunks:
            return values, None
        sums = rng.integers(0, 1 << 32, (self.rows, self.chunks // ranks), np.uint32)
        return values, sums

    def whole(self, ranks: int, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the gathered arrays that every rank must have."""
        shares = [self.share(rank, ranks, step) for rank in range(ranks)]
        sums = [x for _, x in shares if x is not None]
        values = np.concatenate([x for x, _ in shares], axis=1)
        return values, np.concatenate(sums, axis=1) if sums else None


CASES = (
    Case(1, 4096, chunks=64),
    Case(8, 12288),
    Case(32, 4096, chunks=64),
    Case(37, 96, chunks=16),
    Case(5, 64, "float32"),
    Case(3, 4096, chunks=64, largest_words_bytes=0),
    Case(37, 96, chunks=16, largest_words_bytes=0),
    Case(512, 4096, chunks=64),
    Case(2048, 12288),
)
"""Few rows and many, of words and of blocks."""


class Arrays(NamedTuple):
    """Arguments of a product."""

    x: np.ndarray
    weight: np.ndarray
    squares: np.ndarray | None
    added: np.ndarray | None
    norm: np.ndarray | None


@dataclass(frozen=True)
class ProductCase:
    """A product with a gathered result.

    Attributes:
      kind: `normed`, `gated` or `added`.
      rows, inputs, outputs: Of all ranks.
      tiles: How the work is cut.
      segments: Segments of the inputs.
    """

    kind: str
    rows: int
    inputs: int
    outputs: int
    tiles: LinearTiles
    segments: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.inputs} x {self.outputs}"

    @property
    def is_gated(self) -> bool:
        return self.kind == "gated"

    def arrays(self, step: int, own: int | None, ranks: int) -> Arrays:
        """A rank's share of the outputs; all of them where `own` is None."""
        rng = np.random.default_rng([step + 1, self.rows, self.outputs])
        x = rng.standard_normal((self.rows, self.inputs), np.float32)
        halves = 2 if self.is_gated else 1
        weight = rng.standard_normal((halves, self.outputs, self.inputs), np.float32) / 8
        added = rng.standard_normal((self.rows, self.outputs), np.float32)
        norm = 1 + rng.standard_normal(self.outputs, np.float32) / 4
        mine = slice(None)
        if own is not None:
            share = self.outputs // ranks
            mine = slice(own * share, (own + 1) * share)
        is_added = self.kind == "added"
        return Arrays(
            x,
            weight[:, mine].reshape(-1, self.inputs),
            None if is_added else chunks_of_squares(x),
            np.ascontiguousarray(added[:, mine]) if is_added else None,
            norm[mine] if is_added else None,
        )

    def differing(self, got: Sequence[Any], want: Sequence[Any]) -> Iterator[str]:
        """Yields the names of gathered results that differ from one GPU, except for the rank's own
        shard.
        """
        names = ("the result", "what is read next", "the squares")
        for name, one, other in zip(names, got, want, strict=True):
            if name == "the result" and self.kind == "added":
                continue
            if (one is None) != (other is None) or not np.array_equal(one, other):
                yield name


_FEW = {"rows": 16, "depth": 128, "described": False, "persistent": False, "widens": True}
_FEW |= {"warps": 4, "stages": 4}
PRODUCT_CASES = tuple(
    ProductCase(kind, rows, 512, outputs, LinearTiles(columns=columns, swapped=swapped, **_FEW))
    for kind, rows, outputs, columns, swapped in (
        ("normed", 1, 2048, 64, True),
        ("gated", 1, 2048, 32, False),
        ("added", 1, 2048, 64, True),
        ("gated", 8, 1024, 32, False),
        ("added", 13, 1024, 128, True),
        ("normed", 16, 1088, 32, False),
        ("added", 128, 4096, 64, True),
        ("gated", 33, 12288, 32, False),
    )
)
PRODUCT_CASES += tuple(
    ProductCase(
        "added",
        rows,
        512,
        outputs,
        LinearTiles(columns=64, swapped=True, separate=True, **_FEW),
        segments=2,
    )
    for rows, outputs in ((1, 2048), (2, 32768))
)
"""One after the other, those of the few rows join the gather, and two have one behind. The last
two have segments in separate programs, and in one program, as not all programs would be resident.
"""
