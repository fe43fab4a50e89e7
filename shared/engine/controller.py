"""Decode controllers: choose the requests of a decode step, their draft shape and their drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape

Reserve = Callable[[Sequence[Request], int], list[Request]]
"""Returns the requests that have pages for a step that writes a number of positions past their
length. Younger requests may be preempted."""

Gauges = Mapping[str, Callable[[], float]]
"""Functions that read gauges, by name."""


class Controller(Protocol):
    """Chooses how requests decode, and receives the results.

    Only the controller chooses shapes: plain steps, trees of the device's drafter and host-built
    trees. The output does not depend on its choices.

    Attributes:
      max_rows: Maximum requests of a decode step.
      gauges: Gauges for the engine's metrics, by name.
    """

    max_rows: int
    gauges: Gauges

    @property
    def index(self) -> NgramIndex | None:
        """N-gram index of the host; None if the host drafts nothing."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the startup log: measured step times, or the reason why nothing drafts."""
        ...

    @property
    def needs_last_result(self) -> bool:
        """True if its next rows need tokens of a step in flight."""
        ...

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns the rows of the next decode step, or of a draft step for it; None to wait.

        Args:
          ready: Requests that can decode, oldest first; at least one, at most `max_rows`.
          reserve: Reserves pages for the chosen shape's `scratch`; requests that it omits get no
            row.
        """
        ...

    def on_submit(self, rows: ScheduledRows) -> None:
        """Notifies that a step is submitted and the host has time while the device runs it.

        It is the last call before the host waits for a result.
        """
        ...

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Receives the result of a step.

        Args:
          rows: The submitted rows, with shape and requests. A request may have ended since.
          result: Draft trees and tokens of each row, and the device time. Row i belongs to request
            i; later rows are padding.
        """
        ...

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Notifies that tokens were committed to a request's output."""
        ...

    def on_finish(self, request: Request) -> None:
        """Notifies that a request ended, so its data can be dropped; stale rows of it may
        follow.
        """
        ...

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Notifies that the output of a finished request ends after `num_tokens` tokens."""
        ...


class DelegatingController:
    """Controller that passes on what a subclass does not handle itself.

    Args:
      inner: Controller to pass it on to.

    Attributes:
      inner: See above.
    """

    def __init__(self, inner: Controller) -> None:
        self.inner, self.max_rows = inner, inner.max_rows
        self.gauges: Gauges = inner.gauges

    @property
    def index(self) -> NgramIndex | None:
        """Same as that of the inner controller."""
        return self.inner.index

    @property
    def notes(self) -> Sequence[str]:
        """Same as those of the inner controller."""
        return self.inner.notes

    @property
    def needs_last_result(self) -> bool:
        """Same as that of the inner controller."""
        return self.inner.needs_last_result

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns the rows of the inner controller."""
        return self.inner.select_rows(ready, reserve)

    def on_submit(self, rows: ScheduledRows) -> None:
        """Notifies the inner controller, which has time while the device works."""
        self.inner.on_submit(rows)

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Notifies the inner controller of the result of a step."""
        self.inner.on_result(rows, result)

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Notifies the inner controller of tokens committed to a request's output."""
        self.inner.on_tokens(request, tokens)

    def on_finish(self, request: Request) -> None:
        """Notifies the inner controller that a request ended."""
        self.inner.on_finish(request)

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Notifies the inner controller that the output of a finished request ends after
        `num_tokens` tokens.
        """
        self.inner.on_truncate(request_id, num_tokens)


def shapes_by_batch(
    capacity: BackendLimits,
    *,
    host_draft: bool,
    is_wanted: Callable[[TreeShape], bool],
    mask: bool = False,
) -> dict[int, TreeShape]:
    """Returns the tree shape of each batch bucket, ascending, with the largest verify budget.

    Args:
      capacity: Limits and programs of the backend.
      host_draft: True for decode programs with host-built trees, False for the others.
      is_wanted: Filters the tree shapes.
      mask: True for programs that take grammar masks, False for programs of batches without a
        grammar.
    """
    programs = capacity.programs if mask else capacity.unmasked_programs
    shapes = {
        (program.batch, program.shape.rows): program.shape
        for program in programs
        if program.work is StepKind.DECODE
        and program.has(ProgramFeature.HOST_DRAFT) is host_draft
        and (program.has(ProgramFeature.MASK) or not mask)
        and is_wanted(program.shape)
    }
    # In ascending order the last entry of a batch has the most verify rows.
    return {batch: shapes[batch, rows] for batch, rows in sorted(shapes)}


def smallest_that_holds(shapes: Mapping[int, TreeShape], num_rows: int) -> TreeShape:
    """Returns the shape of the smallest batch bucket for `num_rows` requests."""
    return next(shape for batch, shape in shapes.items() if batch >= num_rows)


class StaticController:
    """Controller that uses the same tree of the device's drafter in every step.

    Args:
      capacity: Limits and programs of the backend.
      nodes, depth, width: The tree; 1, 0 and 0 for plain decoding.
      notes: See `Controller.notes`.

    Attributes:
      index: Always None: the device drafts.
      notes: See above.

    Raises:
      ValueError: The backend has no decode program of this tree.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        *,
        nodes: int,
        depth: int,
        width: int,
        notes: Sequence[str] = (),
    ) -> None:
        wanted = (nodes, depth, width)
        self._shapes = shapes_by_batch(
            capacity, host_draft=False, is_wanted=lambda shape: shape.tree == wanted
        )
        if not self._shapes:
            raise ValueError(f"no decode program drafts {nodes} nodes, {depth} deep, {width} wide")
        self.max_rows = max(self._shapes)
        self.gauges: Gauges = {}
        self.index, self.notes = None, notes

    @property
    def needs_last_result(self) -> bool:
        """Always False: rows continue from the device's state."""
        return False

    def shape_for(self, num_rows: int) -> TreeShape:
        """Returns the shape of a decode step of `num_rows` requests; 1 <= num_rows <=
        `max_rows`.
        """
        return smallest_that_holds(self._shapes, num_rows)

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests that have pages."""
        shape = self.shape_for(len(ready))
        requests = reserve(ready, shape.scratch)
        return ScheduledRows.decode(requests, shape) if requests else None

    def on_submit(self, rows: ScheduledRows) -> None:
        """Does nothing."""

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Does nothing: the shape is fixed."""

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Does nothing: the device drafts."""

    def on_finish(self, request: Request) -> None:
        """Does nothing: no data is stored per request."""

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Does nothing: no data is stored per request."""


class DeviceNgramController(StaticController):
    """Controller that uses the same tree from the device's n-gram table in every step."""

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests that have pages; no draft token comes from a corpus."""
        rows = super().select_rows(ready, reserve)
        return rows and replace(rows, corpus_nodes=of_no_corpus)


def of_no_corpus(row: int) -> list[int]:
    """Returns the corpus nodes of a tree from the device's n-gram table: none."""
    return []
