"""NGRAM controller: verifies draft trees of the host's n-gram index; plain steps if nothing
matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shared.boundary.backend import BackendLimits, StepResult
from shared.engine.controller import Gauges, Reserve, shapes_by_batch, smallest_that_holds
from shared.engine.ngram.index import NgramIndex, host_draft_of
from shared.engine.ngram.tree import NgramTreeBatch, corpus_nodes
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape


def index_gauges(index: NgramIndex) -> Gauges:
    """Returns the gauges of an index."""
    return {
        'ngram_lookups_total{result="hit"}': lambda: index.num_rows - index.num_empty_rows,
        'ngram_lookups_total{result="miss"}': lambda: index.num_empty_rows,
        "ngram_index_entries": lambda: index.num_ngrams,
        "ngram_corpora": lambda: len(index.corpora.sizes),
        "ngram_corpus_tokens": lambda: sum(index.corpora.sizes.values()),
    }


def rows_with(requests: list[Request], shape: TreeShape, trees: NgramTreeBatch) -> ScheduledRows:
    """Returns the rows of a step that verifies trees of an index."""
    origin = partial(corpus_nodes, trees)
    return ScheduledRows.decode(requests, shape, drafts=host_draft_of(trees), corpus_nodes=origin)


class NgramController:
    """Drafts each request's tree from the n-gram index; plain decoding where nothing matches.

    A tree continues a request's newest token, so the whole batch waits for the previous decode
    step. Prefills do not wait.

    Args:
      capacity: Limits and programs of the backend.
      index: N-gram index; its trees have the shape of a program with host-built trees.

    Raises:
      ValueError: The backend has no plain decode program, or none for the index's trees.
    """

    def __init__(self, capacity: BackendLimits, index: NgramIndex) -> None:
        nodes, depth = index.nodes, index.depth
        self._trees = shapes_by_batch(
            capacity, host_draft=True, is_wanted=lambda s: (s.nodes, s.depth) == (nodes, depth)
        )
        self._plain = shapes_by_batch(capacity, host_draft=False, is_wanted=lambda s: s.is_plain)
        if not (self._trees and self._plain):
            raise ValueError(
                f"NGRAM requires decode programs for host-built trees ({nodes} nodes, depth "
                f"{depth}) and for plain steps"
            )
        self.index = index
        self._decoded_last: list[Request] = []
        self.max_rows = min(max(self._trees), max(self._plain))
        self.gauges: Gauges = index_gauges(index)
        self.notes: Sequence[str] = ()

    @property
    def needs_last_result(self) -> bool:
        """True if tokens of the previous decode step are not available yet."""
        return not all(request.has_no_step_in_flight for request in self._decoded_last)

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests with known tokens, once those of the previous step are
        known.
        """
        known = [request for request in ready if request.has_no_step_in_flight]
        if not known or self.needs_last_result:
            return None
        requests = reserve(known, smallest_that_holds(self._trees, len(known)).scratch)
        self._decoded_last = requests
        if not requests:
            return None
        # A tree is built only for a row with pages, because the index then inserts its tokens.
        trees = self.index.trees(requests)
        if trees.num_nodes.max() == 1:
            return ScheduledRows.decode(requests, smallest_that_holds(self._plain, len(requests)))
        return rows_with(requests, smallest_that_holds(self._trees, len(requests)), trees)

    def on_submit(self, rows: ScheduledRows) -> None:
        """Inserts prompts and outputs into the index while the device runs."""
        for chunk in rows.chunks:
            self.index.add_prompt(chunk.request, chunk.end)
        self.index.learn()

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Does nothing: the next trees depend on tokens only."""

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds new output tokens of a request."""
        self.index.add_tokens(request, tokens)

    def on_finish(self, request: Request) -> None:
        """Inserts the output of a finished request."""
        self.index.end(request, is_learnt=True)

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Removes tokens that do not belong to the output."""
        self.index.truncate(request_id, num_tokens)
