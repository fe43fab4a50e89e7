"""NGRAM that drafts what pays: the best nodes of a batch, in the program that they are worth.

The host knows every row's tree and what speaks for each node before it plans a step, so it takes
the size that gives the most tokens a second. A tree needs its text's newest token, so a step waits
for the one before, whether it drafts or not. Where drafts do not pay for the waiting either, the
controller goes to sleep: plain steps follow each other as without a drafter. Trees are still made
every few steps then, while the device runs, and held against the text that follows; so it wakes by
what they would have given, and nothing is tried out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.boundary.backend import Limits, StepResult, Work
from shared.engine.adaptive.controller import gauges_of, most_left
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes
from shared.engine.adaptive.trace import Trace
from shared.engine.controller import Gauges, Reserve
from shared.engine.ngram.controller import index_gauges, rows_with
from shared.engine.ngram.evidence import Evidence, Selection
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.tree import Trees
from shared.engine.request import Request
from shared.engine.rows import DecodeRows, Rows
from shared.spec.draft_tree import TreeShape

SMOOTHING = 0.05
"""Weight of the newest step in what steps give and take on average."""

LOOK_EVERY = 4
"""Steps asleep for each in which trees are made: where steps are short the host must keep up."""


@dataclass
class Pace:
    """What steps give and take on average, as shares of a plain one that waits."""

    tokens: float = 1.0
    seconds: float = 1.0

    def note(self, tokens: float, seconds: float, steps: int) -> None:
        """Takes in a step, which stands for so many."""
        weight = 1 - (1 - SMOOTHING) ** steps
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def speed(self) -> float:
        """Tokens for the time of a plain step."""
        return self.tokens / self.seconds


class AdaptiveNgramController:
    """Drafts as many nodes as pay, of the trees of the index.

    Args:
      limits: The backend's; its programs that take the host's trees, and the plain ones, are the
        tiers.
      index: What was seen; its trees are as large as the largest tier.
      table: Measured seconds of a step for each batch bucket: by tier, of steps that wait for each
        other, and last of plain steps that do not. Empty: nothing is known, and every node of the
        trees is verified.
      clock: Tells the time.
      trace: Where every step is written down; None: nowhere.

    Raises:
      ValueError: See `Shapes.of`.
    """

    def __init__(
        self,
        limits: Limits,
        index: NgramIndex,
        table: Mapping[int, Sequence[float]],
        clock: Callable[[], float] = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        self.shapes, self.costs = Shapes.of(limits, host_draft=True), Costs(table)
        self.index, self.evidence, self._clock = index, Evidence(), clock
        self.evidence.warm_up()
        self.max_rows = self.shapes.batches[-1]
        self._asleep, self._pace = len(self.shapes.tiers), Pace()
        self.is_asleep = False
        self._decoded_last: list[Request] = []
        self._planned = self.max_rows, 0
        self._flights: deque[tuple[int, int, list[float]]] = deque()
        self._hopes: dict[int, float] = {}
        self._trace = trace
        self._last: float | None = None
        self._trees: Trees | None = None
        self._tree_of: dict[int, int] = {}
        self._chosen, self._steps = 0, Counter[int]()
        tiers = gauges_of(self.shapes, self._steps, self.costs, lambda: self._chosen)
        asleep = {
            'spec_decode_adaptive_steps_total{tier="asleep"}': lambda: self._steps[self._asleep]
        }
        self.gauges: Gauges = {**index_gauges(index), **tiers, **asleep}

    @property
    def waits(self) -> bool:
        """Whether tokens that its next trees need are still on their way."""
        return not self.is_asleep and not all(r.is_settled for r in self._decoded_last)

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> DecodeRows | None:
        """Every ready request that has room; while awake, those whose tokens are known."""
        if self.is_asleep:
            self._planned = self.shapes.bucket(len(ready)), self._asleep
            return self._rows(reserve(ready, self._shape(self._planned[0], 0).scratch), None)
        known = [request for request in ready if request.is_settled]
        if not known or self.waits:
            return None
        batch = self.shapes.bucket(len(known))
        largest = max(self._shape(batch, t).scratch for t in range(self._asleep))
        requests = reserve(known, largest)
        if not requests:
            self._decoded_last = []
            return None
        # A tree is made only for a row that has room: the text it was made from is then learnt.
        tier, trees = self._choose(requests, batch)
        self._planned = batch, tier
        return self._rows(requests, trees)

    def _rows(self, requests: list[Request], trees: Trees | None) -> DecodeRows | None:
        self._decoded_last = requests
        if not requests:
            return None
        batch, tier = self._planned
        shape = self._shape(batch, 0 if tier == self._asleep else tier)
        return DecodeRows(requests, shape) if trees is None else rows_with(requests, shape, trees)

    def _shape(self, batch: int, tier: int) -> TreeShape:
        return self.shapes.by_size[batch, tier]

    def _choose(self, requests: Sequence[Request], batch: int) -> tuple[int, Trees | None]:
        """The tier, and the trees cut to it; None of a plain step."""
        trees = self.index.trees(requests)
        self._trees = trees
        self._tree_of = {request.request_id: row for row, request in enumerate(requests)}
        most = np.array([most_left(request) - 1 for request in requests])
        weights = self.evidence.weights(trees, most)
        hopes = (weights.sum(axis=1) - 1).tolist()
        self._hopes = {
            request.request_id: hope for request, hope in zip(requests, hopes, strict=True)
        }
        selection = Selection(trees, weights)
        shapes = [self._shape(batch, tier) for tier in range(self._asleep)]
        found = [selection.take(shape.nodes, shape.rows - batch) for shape in shapes]
        tier = self._best([tokens for tokens, _ in found], len(requests), batch)
        if tier == 0:
            return 0, None
        return tier, selection.cut(found[tier][1], shapes[tier].nodes)

    def _best(self, gains: list[float], num_rows: int, batch: int) -> int:
        """The tier that gives the most tokens a second."""
        seconds = self.costs.of(batch)
        if seconds is None:
            return gains.index(max(gains))
        # Not what is most beyond the average pace: a text is of some length, so the tokens that a
        # small step leaves are still to be made, and what follows a poor tree is mostly poor too.
        speeds = [(num_rows + gain) / s for gain, s in zip(gains, seconds, strict=False)]
        tier = speeds.index(max(speeds))
        steps = LOOK_EVERY if self.is_asleep else 1
        self._pace.note(1 + gains[tier] / num_rows, seconds[tier] / seconds[0], steps)
        self.is_asleep = self._pace.speed / seconds[0] < 1 / seconds[self._asleep]
        return tier

    def submitted(self, rows: Rows) -> None:
        """Enters prompts and outputs into the index while the device runs."""
        for chunk in rows.chunks:
            self.index.see_prompt(chunk.request, chunk.end)
        if _is_own(rows):
            batch, tier = self._planned
            hopes = [self._hopes.get(request.request_id, 0.0) for request in rows.requests]
            self._flights.append((batch, tier, hopes))
            self._chosen = 0 if tier == self._asleep else tier
            self._steps[tier] += 1
            if tier == self._asleep and self._steps[tier] % LOOK_EVERY == 0:
                alive = [r for r in rows.requests if r.finish_reason is None]
                self._choose(alive, batch)
        self.index.learn()

    def learned(self, rows: Rows, result: StepResult) -> None:
        """What a step took, host included, and how texts went on after trees were made for them."""
        now, last = self._clock(), self._last
        self._last = now if _is_own(rows) else None
        if not _is_own(rows):
            return
        batch, tier, hopes = self._flights.popleft()
        seconds = None if last is None else now - last
        self.costs.observe(batch, tier, seconds)
        if self._trace is not None:
            self._trace.step(batch, tier, rows, result, hopes, seconds)
        if self._trees is None:
            return
        places = [
            (self._tree_of.pop(request.request_id), row)
            for row, request in enumerate(rows.requests)
            if request.request_id in self._tree_of
        ]
        if places:
            trees, texts = np.ascontiguousarray(np.array(places).T)
            self.evidence.learn(self._trees, trees, result.tokens[texts], result.counts[texts])

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """Notes new tokens of a text."""
        self.index.see(request, tokens)

    def ended(self, request: Request) -> None:
        """Keeps the text, and lets go of the request."""
        self.index.end(request)
        self._tree_of.pop(request.request_id, None)
        self._hopes.pop(request.request_id, None)
        if self._trace is not None and not self._hopes:
            self._trace.flush()

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Forgets what does not belong to the text."""
        self.index.cut(request_id, num_tokens)


def _is_own(rows: Rows) -> bool:
    """Whether the controller chose them: with a grammar among them another one did."""
    return rows.work is Work.DECODE and not rows.is_masked
