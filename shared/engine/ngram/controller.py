"""The drafter NGRAM as the engine's controller: trees from seen text, plain steps without them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shared.boundary.backend import Capacity, StepResult
from shared.engine.controller import Gauges, Reserve, shapes_by_batch, smallest_that_holds
from shared.engine.ngram.index import NgramIndex, host_draft_of
from shared.engine.ngram.tree import Trees, corpus_nodes
from shared.engine.request import Request
from shared.engine.rows import Rows
from shared.spec.draft_tree import TreeShape


def index_gauges(index: NgramIndex) -> Gauges:
    """What `/metrics` shows of an index."""
    return {
        'ngram_lookups_total{result="hit"}': lambda: index.num_rows - index.num_empty_rows,
        'ngram_lookups_total{result="miss"}': lambda: index.num_empty_rows,
        "ngram_index_entries": lambda: index.num_ngrams,
        "ngram_corpora": lambda: len(index.corpora),
        "ngram_corpus_tokens": lambda: sum(index.corpora.values()),
    }


def rows_with(requests: list[Request], shape: TreeShape, trees: Trees) -> Rows:
    """The rows of a step that verifies trees of an index."""
    origin = partial(corpus_nodes, trees)
    return Rows.decode(requests, shape, drafts=host_draft_of(trees), corpus_nodes=origin)


class NgramController:
    """Drafts each request's tree from what the index has seen; where nothing matches, none.

    A tree goes on from a request's newest token, so the whole batch waits for the decode step
    before it. Prompts do not wait.

    Args:
      capacity: The backend's.
      index: What was seen; its trees have the shape of a program that takes the host's.

    Raises:
      ValueError: The backend has no plain decode program, or none that takes the index's trees.
    """

    def __init__(self, capacity: Capacity, index: NgramIndex) -> None:
        nodes, depth = index.nodes, index.depth
        self._trees = shapes_by_batch(
            capacity, host_draft=True, is_wanted=lambda s: (s.nodes, s.depth) == (nodes, depth)
        )
        self._plain = shapes_by_batch(capacity, host_draft=False, is_wanted=lambda s: s.is_plain)
        if not (self._trees and self._plain):
            raise ValueError(
                f"no decode programs for trees of the host's, {nodes} nodes and {depth} deep, and "
                "for rows without one"
            )
        self.index = index
        self._decoded_last: list[Request] = []
        self.max_rows = min(max(self._trees), max(self._plain))
        self.gauges: Gauges = index_gauges(index)

    @property
    def waits(self) -> bool:
        """Whether tokens of the decode step before are still on their way."""
        return not all(request.is_settled for request in self._decoded_last)

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Every ready request whose tokens are known, once those of the step before are."""
        known = [request for request in ready if request.is_settled]
        if not known or self.waits:
            return None
        requests = reserve(known, smallest_that_holds(self._trees, len(known)).scratch)
        self._decoded_last = requests
        if not requests:
            return None
        # A tree is made only for a row that has room: the text it was made from is then learnt.
        trees = self.index.trees(requests)
        if trees.num_nodes.max() == 1:
            return Rows.decode(requests, smallest_that_holds(self._plain, len(requests)))
        return rows_with(requests, smallest_that_holds(self._trees, len(requests)), trees)

    def submitted(self, rows: Rows) -> None:
        """Enters prompts and outputs into the index while the device runs."""
        for chunk in rows.chunks:
            self.index.see_prompt(chunk.request, chunk.end)
        self.index.learn()

    def learned(self, rows: Rows, result: StepResult) -> None:
        """The next trees follow from the texts alone."""

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """Notes new tokens of a text."""
        self.index.see(request, tokens)

    def ended(self, request: Request) -> None:
        """Keeps the text, and lets go of the request."""
        self.index.end(request, is_learnt=True)

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Forgets what does not belong to the text."""
        self.index.cut(request_id, num_tokens)
