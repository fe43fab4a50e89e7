"""Which requests decode in a step, with which draft shape and whose drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shared.boundary.backend import Capacity, StepResult
from shared.boundary.program import Extra, Work
from shared.engine.request import Request
from shared.engine.rows import Rows
from shared.spec.draft_tree import TreeShape

Reserve = Callable[[Sequence[Request], int], list[Request]]
"""Those requests that have pages for the step when it writes so many positions past their length;
younger ones may lose theirs, and wait."""

Gauges = Mapping[str, Callable[[], float]]
"""What reads a gauge, by name."""


class Controller(Protocol):
    """Chooses how requests decode, and learns from what came of it.

    It is the only chooser of shapes: plain steps, trees of the device's drafter and trees of the
    host's are all its own. The text is the same whatever it chooses.

    Attributes:
      max_rows: Most requests that a decode step may have.
      gauges: What it counts, for the engine's metrics, by name.
    """

    max_rows: int
    gauges: Gauges

    @property
    def waits(self) -> bool:
        """Whether its next rows need tokens that are still on their way."""
        ...

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """The rows of the next decode step, or of one that drafts for it; None: not yet.

        Args:
          ready: Requests that can decode, oldest first; at least one, at most `max_rows`.
          reserve: Asked once the shape is known, for its `scratch`; whom it leaves out has no row.
        """
        ...

    def submitted(self, rows: Rows) -> None:
        """A step is on its way, and the host has time while the device runs it.

        It is the last that is done before the host asks for a result.
        """
        ...

    def learned(self, rows: Rows, result: StepResult) -> None:
        """What a step gave.

        Args:
          rows: As it was submitted: its shape, and the request of each row. A request may have
            ended since.
          result: Drafts and tokens of each row, and the time on the device. Row i of its arrays is
            that of request i; those past the last request are padding.
        """
        ...

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens were committed to a request's output."""
        ...

    def ended(self, request: Request) -> None:
        """A request ended, so nothing of it need be kept; late rows of it may follow."""
        ...

    def cut(self, request_id: int, num_tokens: int) -> None:
        """The output of a request that ended turned out to end after `num_tokens` tokens."""
        ...


def shapes_by_batch(
    capacity: Capacity,
    *,
    host_draft: bool,
    is_wanted: Callable[[TreeShape], bool],
    mask: bool = False,
) -> dict[int, TreeShape]:
    """The tree of each batch bucket, ascending, with most verify rows where there are several.

    Args:
      capacity: The backend's.
      host_draft: Looks among the decode programs that take the host's trees, or that do not.
      is_wanted: Picks the tree.
      mask: Looks among those that take masks of grammars, or that batches without any run.
    """
    programs = capacity.programs if mask else capacity.unmasked_programs
    shapes = {
        (program.batch, program.shape.rows): program.shape
        for program in programs
        if program.work is Work.DECODE
        and program.has(Extra.HOST_DRAFT) is host_draft
        and (program.has(Extra.MASK) or not mask)
        and is_wanted(program.shape)
    }
    # In ascending order the last entry of a batch has the most verify rows.
    return {batch: shapes[batch, rows] for batch, rows in sorted(shapes)}


def smallest_that_holds(shapes: Mapping[int, TreeShape], num_rows: int) -> TreeShape:
    """The shape of the smallest batch that holds `num_rows` requests."""
    return next(shape for batch, shape in shapes.items() if batch >= num_rows)


class StaticController:
    """The same tree of the device's drafter in every step; it learns nothing.

    Raises:
      ValueError: The backend has no decode program of this tree.
    """

    def __init__(self, capacity: Capacity, *, nodes: int, depth: int, width: int) -> None:
        wanted = (nodes, depth, width)
        self._shapes = shapes_by_batch(
            capacity, host_draft=False, is_wanted=lambda shape: shape.tree == wanted
        )
        if not self._shapes:
            raise ValueError(f"no decode program drafts {nodes} nodes, {depth} deep, {width} wide")
        self.max_rows = max(self._shapes)
        self.gauges: Gauges = {}

    @property
    def waits(self) -> bool:
        """A row goes on from what the device holds."""
        return False

    def shape_for(self, num_rows: int) -> TreeShape:
        """The shape of a decode step of `num_rows` requests; 1 <= num_rows <= `max_rows`."""
        return smallest_that_holds(self._shapes, num_rows)

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Every ready request that has room."""
        shape = self.shape_for(len(ready))
        requests = reserve(ready, shape.scratch)
        return Rows.decode(requests, shape) if requests else None

    def submitted(self, rows: Rows) -> None:
        """Nothing to do."""

    def learned(self, rows: Rows, result: StepResult) -> None:
        """The next step has the same tree."""

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """The device drafts."""

    def ended(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Nothing is kept of a request."""


class TextController(StaticController):
    """The same tree of the device's n-grams in every step; the device learns texts by itself."""

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Every ready request that has room; no draft is of a corpus."""
        rows = super().rows_for(ready, reserve)
        return rows and replace(rows, corpus_nodes=of_no_corpus)


def of_no_corpus(row: int) -> list[int]:
    """The nodes of a corpus in a tree of the device's n-grams."""
    return []
