"""Model parameters: mapping from checkpoint tensors to arrays, and the tensor-parallel shard of
each.

The module imports no array library, because `--help` reads model configs, which import it. The
arrays are sliced in `shared.models.parameter_arrays`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shared.models.sharded_range import ShardedRange, vocab_section

EXPERTS = ("experts.gate_up", "experts.down")
"""Suffixes of the names of the parameters of selected experts."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of the checkpoint: its name without prefix, and its shape.

    Attributes:
      name: Name without prefix.
      shape: Shape of the whole tensor.
      parts: Tensors that replace it, concatenated, in a checkpoint without it.
      axis, ranges: Slice of a TP rank, or another order of the outputs: concatenated ranges (first,
        end) along the axis; None for the whole tensor in the order of the file.
      is_transposed: True if an unquantised file has the last two axes in reverse.
      is_interleaved: True if the gate and up outputs of the file, on axis 1, alternate.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[CheckpointTensor, ...] = ()
    axis: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    is_transposed: bool = False
    is_interleaved: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in an unquantised file."""
        *lead, outputs, inputs = self.shape if self.is_transposed else (*self.shape, 0, 0)
        return (*lead, inputs, outputs) if self.is_transposed else self.shape

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.ranges is None:
            return self.shape
        taken = sum(end - first for first, end in self.ranges)
        return (*self.shape[: self.axis], taken, *self.shape[self.axis + 1 :])

    @property
    def whole(self) -> CheckpointTensor:
        """The tensor without a slice."""
        return replace(self, ranges=None)

    def takes_whole(self, block: int) -> bool:
        """Returns True if the slice consists of whole blocks along the axis."""
        return all(number % block == 0 for run in self.ranges or () for number in run)

    def sliced(self, axis: int, runs: tuple[tuple[int, int], ...]) -> CheckpointTensor:
        """Returns the slice of the given ranges of the current slice."""
        taken = runs if self.ranges is None else slice_runs(self.ranges, runs)
        return replace(self, axis=axis, ranges=taken)

    def every(self, share: int) -> CheckpointTensor:
        """Returns the slice of an array with one entry per `share` entries along the axis, such as
        scales.
        """
        if self.ranges is None:
            return self
        return replace(self, ranges=tuple((a // share, b // share) for a, b in self.ranges))

    def index(self, run: tuple[int, int]) -> tuple[slice, ...]:
        """Returns the index of a range in the tensor."""
        return (*[slice(None)] * self.axis, slice(run[0], run[1]))


@dataclass(frozen=True)
class Parameter:
    """One array of the model and the checkpoint tensors that fill it.

    Attributes:
      name: Name of the parameter.
      shape: Shape of the parameter.
      pieces: Per layer of a stack (or once), the tensors that fill it, concatenated.
      stacked: True if axis 0 of `shape` is the layer.
      float32: True if stored in float32 whatever the dtype of the model.
      is_dequantized: True if quantised tensors are dequantised when loaded, whatever the formats of
        other parameters.
      centre: Constant that a backend adds to the stored values, for norms that scale by 1 + weight.
      tied_to: Parameter with the same values, if this one is a copy.
      axis: Axis of its outputs, counted from the end, along which it is sharded.
      sections: TP sections along the axis; empty for a replicated parameter.
      whole, runs: For a shard or a copy of rows: the whole parameter, and the ranges (first, end)
        of its outputs in the shard; None for a whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[CheckpointTensor, ...], ...]
    stacked: bool
    float32: bool = False
    is_dequantized: bool = False
    centre: float = 0.0
    tied_to: str | None = None
    axis: int = -2
    sections: tuple[ShardedRange, ...] = ()
    whole: Parameter | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> tuple[CheckpointTensor, ...]:
        """All checkpoint tensors that this parameter is loaded from."""
        return tuple(source for piece in self.pieces for source in piece)

    def places(
        self, pieces: Sequence[Sequence[CheckpointTensor]]
    ) -> Iterator[tuple[CheckpointTensor, tuple[int | slice, ...], tuple[int, ...]]]:
        """Yields the position of each tensor in the parameter.

        Args:
          pieces: `pieces`, possibly with some tensors replaced by their parts.

        Yields:
          A tensor, its index in the parameter, and its shape there.
        """
        for number, sources in enumerate(pieces):
            first, layer = 0, (number,) if self.stacked else ()
            for source in sources:
                if count := math.prod(source.taken_shape):
                    at, shape = _place(self.shape[len(layer) :], first, count)
                    yield source, (*layer, *at), shape
                    first += count

    def shard(self, rank: int, count: int) -> Parameter:
        """Returns the shard of one of `count` ranks.

        The shard's tensors fill its first outputs. In a sharded vocabulary the last ranks may have
        padding outputs, which no tensor fills.
        """
        if count == 1 or not self.sections:
            return self
        runs = self._runs(rank, count)
        if self.whole is None:
            return self._taking(runs, self._local_shape(count))
        share = self.whole._taking(slice_runs(self.runs, runs), self._local_shape(count))
        return replace(share, name=self.name, tied_to=self.tied_to)

    def rows(self, name: str, ids: Sequence[int]) -> Parameter:
        """Returns rows of an LM head as a separate parameter, for a reduced vocabulary.

        Args:
          name: Name of the new parameter.
          ids: Token ids of the full vocabulary, in ascending order.
        """
        ends = [i for i, (a, b) in enumerate(pairwise(ids), 1) if b != a + 1]
        firsts, lasts = [0, *ends], [*ends, len(ids)]
        runs = tuple((ids[a], ids[b - 1] + 1) for a, b in zip(firsts, lasts, strict=True))
        taken = self._taking(runs, (len(ids), *self.shape[1:]))
        sections, tied_to = (vocab_section(len(ids)),), self.tied_to or self.name
        return replace(taken, name=name, tied_to=tied_to, sections=sections)

    def _taking(self, runs: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> Parameter:
        """Returns a shard with the given ranges of outputs."""
        pieces = tuple(tuple(self._cut(sources, runs)) for sources in self.pieces)
        return replace(self, shape=shape, pieces=pieces, sections=(), whole=self, runs=runs)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yields the contiguous runs of a layer's shard in the layer of the whole parameter.

        Yields:
          The flat index of a run's first element in the shard, its flat index in the whole, and the
          length.
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
        """True if the tensors fill it entirely."""
        shape = self.shape[1:] if self.stacked else self.shape
        numbers = sum(math.prod(source.taken_shape) for source in self.pieces[0])
        return numbers == math.prod(shape)

    def _local_shape(self, count: int) -> tuple[int, ...]:
        share = sum(section.share(count) for section in self.sections)
        axis = len(self.shape) + self.axis
        return (*self.shape[:axis], share, *self.shape[axis + 1 :])

    def _runs(self, rank: int, count: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of a rank's outputs."""
        first, runs = 0, []
        for section in self.sections:
            begin, end = section.run(rank, count)
            runs.append((first + begin, first + end))
            first += section.size
        return tuple(runs)

    def _cut(
        self, sources: Sequence[CheckpointTensor], outputs: Sequence[tuple[int, int]]
    ) -> Iterator[CheckpointTensor]:
        """Yields the tensors of a layer, each with its slice of the given outputs."""
        first, num_outputs = 0, self.shape[self.axis]
        inner = math.prod(self.shape[len(self.shape) + self.axis + 1 :])
        for source in sources:
            shape = source.taken_shape
            rows = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            axis = next(i for i, row in enumerate(rows) if inner % row == 0)
            share = inner // rows[axis]  # rows of the tensor in an output, if it has several
            offset = first // inner % num_outputs
            runs = [((begin - offset) * share, (end - offset) * share) for begin, end in outputs]
            inside = [(max(0, begin), min(shape[axis], end)) for begin, end in runs]
            parts = tuple(self._cut(source.parts, outputs))
            taken = tuple(run for run in inside if run[0] < run[1])
            yield replace(source.sliced(axis, taken), parts=parts)
            first += math.prod(shape)


def slice_runs(
    runs: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Slices the concatenation of `ranges`; returns at least one range.

    Args:
      runs: Ranges (first, end), which are concatenated.
      parts: Ranges of the concatenation.
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
    """Returns one rank's shard of each parameter."""
    return [parameter.shard(rank, count) for parameter in wanted]


def _place(
    shape: tuple[int, ...], first: int, count: int
) -> tuple[tuple[int | slice, ...], tuple[int, ...]]:
    """Returns the index and shape of `count` elements from flat index `first` on."""
    row = math.prod(shape[1:])
    if count % row == 0:
        return (slice(first // row, (first + count) // row),), (count // row, *shape[1:])
    at, inner = _place(shape[1:], first % row, count)
    return (first // row, *at), inner
