"""Decode steps with structured output: batches in which at least one request has a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shared.boundary.backend import BackendLimits, HostDraft, StepResult
from shared.boundary.grammar_bitmask import mask_words
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.controller import (
    Controller,
    DelegatingController,
    Reserve,
    of_no_corpus,
    shapes_by_batch,
    smallest_that_holds,
)
from shared.engine.grammar import BitmaskRows
from shared.engine.ngram.index import NgramIndex, host_draft_of
from shared.engine.ngram.tree import corpus_nodes
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape

Origin = Callable[[int], list[int]]
Tree = tuple[list[int], list[int]]
"""Tokens and parents of a tree's nodes."""


class GrammarController(DelegatingController):
    """Controller for batches in which a request has a grammar; delegates all other steps.

    The mask of a node depends on its path, so the host needs the trees before verification. With a
    drafter on the device a batch takes two steps: one that drafts, and one that sends the trees
    back with a mask for each node. Host-built trees, or a batch without draft tokens, take one
    step. In both cases the whole batch waits for the previous step; prefills overlap it where
    possible. Requests without a grammar sample from all tokens.

    Args:
      capacity: Limits and programs of the backend.
      inner: Controller of all other steps, which is notified of these too.
      index: N-gram index that drafts on the host; None if the device drafts, or nothing does.

    Raises:
      ValueError: The backend has no decode program that takes masks.
    """

    def __init__(
        self, capacity: BackendLimits, inner: Controller, index: NgramIndex | None
    ) -> None:
        super().__init__(inner)
        masked = [program for program in capacity.programs if program.has(ProgramFeature.MASK)]
        if not masked:
            raise ValueError("no decode program takes the masks of a grammar")
        self._trees = _widest(capacity, host_draft=True)
        self._plain = _widest(capacity, host_draft=False)
        drafts = [program for program in capacity.programs if program.work is StepKind.DRAFT]
        self._drafts = {program.batch: program.shape for program in drafts}
        self._index, self._words = index, mask_words(capacity.vocab)
        self._has_ngram_table = capacity.texts is not None
        self._decoded_last: Sequence[Request] = []
        self._drafted: dict[int, Tree] = {}
        self.max_rows = min(inner.max_rows, max(program.batch for program in masked))

    @property
    def needs_last_result(self) -> bool:
        """True if tokens or draft trees of the previous step are not available yet."""
        return (
            not all(request.has_no_step_in_flight for request in self._decoded_last)
            or self.inner.needs_last_result
        )

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests with known tokens, once those of the previous step are
        known.
        """
        if all(request.constraint is None for request in ready):
            self._decoded_last, self._drafted = [], {}
            return self.inner.select_rows(ready, reserve)
        if not all(request.has_no_step_in_flight for request in self._decoded_last):
            return None
        known = [request for request in ready if request.has_no_step_in_flight]
        drafted = [request for request in known if request.request_id in self._drafted]
        rows = self._verified(drafted, reserve) if drafted else self._begun(known, reserve)
        self._decoded_last = rows.requests if rows else []
        return rows

    def _begun(self, known: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns the first step of a round, which may be its only one."""
        if not known:
            return None
        if not self._drafts or all(r.sampling.max_draft_tokens == 0 for r in known):
            return self._verified(known, reserve)
        shape = smallest_that_holds(self._drafts, len(known))
        requests = reserve(known, shape.scratch)
        return ScheduledRows.draft(requests, shape) if requests else None

    def _verified(self, known: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns a decode step with the available trees and their masks."""
        shapes = self._trees or self._plain
        requests = reserve(known, smallest_that_holds(shapes, len(known)).scratch)
        if not requests:
            return None
        known_trees, origin = self._trees_of(requests)
        trees, masks = self._masked(requests, known_trees)
        is_plain = bool(self._plain) and all(len(tokens) == 1 for tokens, _ in trees)
        shape = smallest_that_holds(self._plain if is_plain else self._trees, len(requests))
        index = np.zeros((len(requests), shape.nodes), np.int32)
        bits = np.zeros((sum(map(len, masks)), self._words), np.int32)
        place = 0
        for row, mask_of in enumerate(masks):
            for node, mask in mask_of.items():
                bits[place] = mask
                place += 1
                index[row, node] = place
        drafts = None if is_plain else _laid_out(trees, shape)
        origin = None if is_plain else origin
        return ScheduledRows.decode(
            requests, shape, drafts=drafts, corpus_nodes=origin, masks=BitmaskRows(bits, index)
        )

    def _trees_of(self, requests: Sequence[Request]) -> tuple[list[Tree], Origin | None]:
        """Returns the available draft trees: the host's, those of the previous step, or roots.

        Also returns a function for the nodes that come from a corpus, see `ScheduledRows`.
        """
        if self._index is not None:
            grown = self._index.trees(requests)
            host_drafts = host_draft_of(grown)
            counts = np.maximum(host_drafts.num_nodes, 1).tolist()
            trees = [
                (
                    host_drafts.tokens[row, :count].tolist(),
                    host_drafts.parents[row, :count].tolist(),
                )
                for row, count in enumerate(counts)
            ]
            return trees, partial(corpus_nodes, grown)
        drafted, self._drafted = self._drafted, {}
        origin = of_no_corpus if self._has_ngram_table else None
        return [drafted.get(request.request_id, ([0], [0])) for request in requests], origin

    def _masked(
        self, requests: Sequence[Request], trees: Sequence[Tree]
    ) -> tuple[list[Tree], list[dict[int, np.ndarray]]]:
        """Returns the masks of each request's nodes; a request whose masks fail continues without
        draft tokens.
        """
        masks: list[dict[int, np.ndarray]] = []
        kept = list(trees)
        for row, request in enumerate(requests):
            mask_of = None
            if request.constraint is not None:
                mask_of = request.constraint.masks(*kept[row])
                if mask_of is None:
                    kept[row] = [0], [0]
                    mask_of = request.constraint.masks(*kept[row])
            masks.append(mask_of or {})
        return kept, masks

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Stores the trees of a draft step."""
        if rows.work is not StepKind.DRAFT:
            self.inner.on_result(rows, result)
            return
        for row, request in enumerate(rows.requests):
            count = max(1, int(result.num_nodes[row]))
            tree = result.drafts[row, :count].tolist(), result.parents[row, :count].tolist()
            self._drafted[request.request_id] = tree

    def on_finish(self, request: Request) -> None:
        """Discards the stored tree of the request."""
        self._drafted.pop(request.request_id, None)
        self.inner.on_finish(request)


def _widest(capacity: BackendLimits, *, host_draft: bool) -> dict[int, TreeShape]:
    return shapes_by_batch(capacity, host_draft=host_draft, is_wanted=lambda shape: True, mask=True)


def _laid_out(trees: Sequence[Tree], shape: TreeShape) -> HostDraft:
    """Converts the trees to the arrays of a plan."""
    size = (len(trees), shape.nodes)
    drafts = HostDraft(
        tokens=np.zeros(size, np.int32),
        parents=np.zeros(size, np.int32),
        num_nodes=np.array([len(tokens) for tokens, _ in trees], np.int32),
        forced=np.zeros(len(trees), np.int32),
    )
    for row, (tokens, parents) in enumerate(trees):
        drafts.tokens[row, : len(tokens)] = tokens
        drafts.parents[row, : len(tokens)] = parents
    return drafts
