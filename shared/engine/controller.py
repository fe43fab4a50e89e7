"""Which draft shape a step takes."""

from __future__ import annotations

from typing import Protocol

from shared.boundary.backend import Limits, Work
from shared.spec.draft_tree import TreeShape


class Controller(Protocol):
    """Chooses among the shapes that exist; the text is the same with any of them.

    Attributes:
      max_rows: Most requests that a decode step may have.
    """

    max_rows: int

    def shape_for(self, num_rows: int) -> TreeShape:
        """The shape of a decode step of `num_rows` requests; 1 <= num_rows <= `max_rows`."""
        ...


class StaticController:
    """The same tree in every step, with verify rows for the smallest batch that holds the step.

    Raises:
      ValueError: The backend has no decode program of this tree.
    """

    def __init__(self, limits: Limits, *, nodes: int, depth: int, width: int) -> None:
        shapes = {
            (program.batch, program.shape.rows): program.shape
            for program in limits.programs
            if program.work is Work.DECODE
            and not program.host_draft
            and (program.shape.nodes, program.shape.depth, program.shape.width)
            == (nodes, depth, width)
        }
        # In ascending order the last entry of a batch has the most verify rows.
        self._by_batch = {batch: shapes[batch, rows] for batch, rows in sorted(shapes)}
        if not self._by_batch:
            raise ValueError(f"no decode program drafts {nodes} nodes, {depth} deep, {width} wide")
        self.max_rows = max(self._by_batch)

    def shape_for(self, num_rows: int) -> TreeShape:
        """The tree, with the rows of the smallest batch that holds `num_rows` requests."""
        return next(shape for batch, shape in self._by_batch.items() if batch >= num_rows)


class HostDraftController:
    """The same tree of the host's in every step; the largest that the backend takes.

    Raises:
      ValueError: The backend has no decode program that takes trees of the host's.
    """

    def __init__(self, limits: Limits) -> None:
        shapes = [
            (program.batch, program.shape)
            for program in limits.programs
            if program.work is Work.DECODE and program.host_draft
        ]
        if not shapes:
            raise ValueError("no decode program takes drafts of the host")
        self.tree = max((shape for _, shape in shapes), key=lambda shape: shape.nodes)
        same = [(batch, shape) for batch, shape in shapes if shape.nodes == self.tree.nodes]
        self._by_batch = dict(sorted(same, key=lambda pair: pair[0]))
        self.max_rows = max(self._by_batch)

    def shape_for(self, num_rows: int) -> TreeShape:
        """The tree, with the rows of the smallest batch that holds `num_rows` requests."""
        return next(shape for batch, shape in self._by_batch.items() if batch >= num_rows)
