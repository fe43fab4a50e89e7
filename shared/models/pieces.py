"""An array of a model, the tensors of a checkpoint it is made of, and a rank's share of both."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Shaped

from shared.models.ranks import Section, vocab_section

Array = Shaped[np.ndarray, "..."]


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint: its name without prefix, and its shape.

    Attributes:
      parts: Tensors that stand for it, one behind the other, in a checkpoint that has no such one.
      axis, runs: What a rank takes of it: along this axis from the first to before the second
        number of each pair, one behind the other; None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple["Source", ...] = ()
    axis: int = 0
    runs: tuple[tuple[int, int], ...] | None = None

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """The shape of what is taken of it."""
        if self.runs is None:
            return self.shape
        taken = sum(end - first for first, end in self.runs)
        return (*self.shape[: self.axis], taken, *self.shape[self.axis + 1 :])

    def taken(self, values: Array) -> Array:
        """What is taken of the tensor's values."""
        if self.runs is None:
            return values
        return np.concatenate([values[self.index(run)] for run in self.runs], self.axis)

    def takes_whole(self, block: int) -> bool:
        """Whether what is taken are whole blocks of so many numbers along the axis."""
        return all(number % block == 0 for run in self.runs or () for number in run)

    def every(self, share: int) -> "Source":
        """What is taken of numbers that each belong to so many of the tensor's along the axis."""
        if self.runs is None:
            return self
        return replace(self, runs=tuple((a // share, b // share) for a, b in self.runs))

    def index(self, run: tuple[int, int]) -> tuple[slice, ...]:
        """Where a run lies in the tensor."""
        return (*[slice(None)] * self.axis, slice(*run))


@dataclass(frozen=True)
class Parameter:
    """One array of ours and the tensors it is made of.

    Attributes:
      name: Our name.
      shape: Our shape.
      pieces: Per layer of a stack (or once) the tensors that fill it, one behind the other.
      stacked: Axis 0 of `shape` counts layers.
      float32: Kept in float32 whatever the dtype of the model.
      centre: What a backend adds to the stored numbers, as norms have it whose scale is 1 more.
      tied_to: The parameter whose numbers it has, where it is that one once more.
      axis: The one of its outputs, counted from the end, along which ranks divide it.
      sections: How they do; nothing: each has all of it.
      whole, runs: Of a rank's share, or of rows that stand again, what it is a share of, and from
        which of the whole's outputs to before which each part of it reaches; None: it is whole.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Source, ...], ...]
    stacked: bool
    float32: bool = False
    centre: float = 0.0
    tied_to: str | None = None
    axis: int = -2
    sections: tuple[Section, ...] = ()
    whole: "Parameter | None" = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """All tensors of the checkpoint that this parameter needs."""
        return tuple(source for piece in self.pieces for source in piece)

    def places(
        self, pieces: Sequence[Sequence[Source]]
    ) -> Iterator[tuple[Source, tuple[int | slice, ...], tuple[int, ...]]]:
        """Where the tensors of each piece stand.

        Args:
          pieces: As `pieces`, or with the parts of some tensors in their place.

        Yields:
          A tensor, its place in the parameter, and its shape there.
        """
        for number, sources in enumerate(pieces):
            first, layer = 0, (number,) if self.stacked else ()
            for source in sources:
                if count := math.prod(source.taken_shape):
                    at, shape = _place(self.shape[len(layer) :], first, count)
                    yield source, (*layer, *at), shape
                    first += count

    def of_rank(self, rank: int, count: int) -> "Parameter":
        """What one of `count` ranks has of it.

        Its tensors fill its first outputs; of a vocabulary, the last ranks may have more outputs
        than there are tokens, which nothing fills.
        """
        if count == 1 or not self.sections:
            return self
        runs = self._runs(rank, count)
        if self.whole is None:
            return self._taking(runs, self._local_shape(count))
        share = self.whole._taking(within(self.runs, runs), self._local_shape(count))
        return replace(share, name=self.name, tied_to=self.tied_to)

    def rows(self, name: str, ids: Sequence[int]) -> "Parameter":
        """Rows of the whole weight of a head, which score a vocabulary of their own.

        Args:
          name: Theirs.
          ids: Tokens of the whole vocabulary, ascending.
        """
        ends = [i for i, (a, b) in enumerate(pairwise(ids), 1) if b != a + 1]
        firsts, lasts = [0, *ends], [*ends, len(ids)]
        runs = tuple((ids[a], ids[b - 1] + 1) for a, b in zip(firsts, lasts, strict=True))
        taken = self._taking(runs, (len(ids), *self.shape[1:]))
        sections, tied_to = (vocab_section(len(ids)),), self.tied_to or self.name
        return replace(taken, name=name, tied_to=tied_to, sections=sections)

    def _taking(self, runs: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> "Parameter":
        """A share of this whole parameter, which has those of its outputs."""
        pieces = tuple(tuple(self._cut(sources, runs)) for sources in self.pieces)
        return replace(self, shape=shape, pieces=pieces, sections=(), whole=self, runs=runs)

    @property
    def outputs(self) -> Int[np.ndarray, " outputs"]:
        """Of a rank's share the numbers of its outputs in the whole; those nothing fills are not
        among them."""
        return np.concatenate([np.arange(first, end) for first, end in self.runs])

    def share(self, array: Array) -> Array:
        """What a rank's share has of the whole array."""
        if self.whole is None:
            return array
        taken = np.take(array, self.outputs, self.axis)
        spare = [(0, 0)] * array.ndim
        spare[self.axis] = (0, self.shape[self.axis] - taken.shape[self.axis])
        return np.pad(taken, spare)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Where the numbers of a layer lie in that of the whole.

        Yields:
          The place of a span's first number here, its place there, and how many follow each other.
        """
        if self.whole is None:
            yield 0, 0, math.prod(self.shape[self.stacked :])
            return
        axis = len(self.shape) + self.axis
        inner = math.prod(self.shape[axis + 1 :])
        for outer in range(math.prod(self.shape[self.stacked : axis])):
            at, of_whole = (outer * shape[axis] for shape in (self.shape, self.whole.shape))
            for first, end in self.runs:
                yield at * inner, (of_whole + first) * inner, (end - first) * inner
                at += end - first

    @property
    def is_filled(self) -> bool:
        """Whether its tensors fill it."""
        shape = self.shape[1:] if self.stacked else self.shape
        numbers = sum(math.prod(source.taken_shape) for source in self.pieces[0])
        return numbers == math.prod(shape)

    def _local_shape(self, count: int) -> tuple[int, ...]:
        share = sum(section.share(count) for section in self.sections)
        axis = len(self.shape) + self.axis
        return (*self.shape[:axis], share, *self.shape[axis + 1 :])

    def _runs(self, rank: int, count: int) -> tuple[tuple[int, int], ...]:
        """The outputs of a rank."""
        first, runs = 0, []
        for section in self.sections:
            begin, end = section.run(rank, count)
            runs.append((first + begin, first + end))
            first += section.size
        return tuple(runs)

    def _cut(
        self, sources: Sequence[Source], outputs: Sequence[tuple[int, int]]
    ) -> Iterator[Source]:
        """The tensors of a layer, each with what a rank takes of it."""
        first, num_outputs = 0, self.shape[self.axis]
        inner = math.prod(self.shape[len(self.shape) + self.axis + 1 :])
        for source in sources:
            axis = next(
                i for i in range(len(source.shape)) if math.prod(source.shape[i + 1 :]) == inner
            )
            offset = first // inner % num_outputs
            runs = [(begin - offset, end - offset) for begin, end in outputs]
            inside = [(max(0, begin), min(source.shape[axis], end)) for begin, end in runs]
            parts = tuple(self._cut(source.parts, outputs))
            taken = tuple(run for run in inside if run[0] < run[1])
            yield replace(source, parts=parts, axis=axis, runs=taken)
            first += math.prod(source.shape)


def within(
    runs: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Parts of what runs reach over, where these stand one behind the other; at least one run.

    Args:
      parts: From which of all their numbers to before which, one behind the other.
    """
    found = []
    for begin, end in parts:
        passed = 0
        for first, last in runs:
            low, high = max(begin, passed), min(end, passed + last - first)
            if low < high:
                found.append((first + low - passed, first + high - passed))
            passed += last - first
    return tuple(found) or ((0, 0),)


def of_rank(wanted: Sequence[Parameter], rank: int, count: int) -> list[Parameter]:
    """What one of `count` ranks has of each parameter."""
    return [parameter.of_rank(rank, count) for parameter in wanted]


def _place(
    shape: tuple[int, ...], first: int, count: int
) -> tuple[tuple[int | slice, ...], tuple[int, ...]]:
    """Where `count` numbers stand in an array from its number `first` on, and their shape."""
    row = math.prod(shape[1:])
    if count % row == 0:
        return (slice(first // row, (first + count) // row),), (count // row, *shape[1:])
    at, inner = _place(shape[1:], first % row, count)
    return (first // row, *at), inner
