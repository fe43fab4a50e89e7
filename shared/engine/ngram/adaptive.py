"""NGRAM that drafts as many nodes as pay, or none.

The host has every row's tree, and the chance of each node, before it plans a step. So it verifies
the best nodes of the batch, in the program that gives the most tokens a second.

A tree needs the newest token of its text, so a drafting step waits for the step before. Where the
best trees are not worth that wait, the controller goes to *sleep*: plain steps follow each other
without waiting, as without a drafter. While asleep it makes trees every few steps, as the device
runs, and wakes when they are worth it. Poor trees are borne for a while before it falls asleep, and
the time that they lose is made up by fewer looks (`shared.engine.ngram.sleep`). No trial steps are
needed.

Entering texts into the index takes the host's time. Where the host waits for the device, that is
free. Where the device waits for the host, as with a small model, only looks enter texts while the
controller is asleep, so that they are paid for like the rest of a look; what no look came to by the
end of a request is left out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from shared.boundary.backend import Capacity, StepResult
from shared.boundary.program import Work
from shared.engine.adaptive.controller import gauges_of, most_left
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes
from shared.engine.adaptive.trace import Trace
from shared.engine.controller import Gauges, Reserve
from shared.engine.ngram.controller import index_gauges, rows_with
from shared.engine.ngram.evidence import Evidence, select
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.sleep import LEAST_LOOK_SECONDS, Sleep
from shared.engine.ngram.tree import Trees, roots_of
from shared.engine.request import Request
from shared.engine.rows import Rows
from shared.spec.draft_tree import TreeShape


@dataclass(frozen=True)
class Sizes:
    """What the programs of a batch bucket verify, by tier.

    Attributes:
      nodes, budgets: Most nodes of a row with its root, and of all rows, roots apart.
      scratch: Most positions that a step of any of them writes past a row's length.
    """

    nodes: Int64[np.ndarray, " tiers"]
    budgets: Int64[np.ndarray, " tiers"]
    scratch: int

    @classmethod
    def of(cls, shapes: Shapes, batch: int) -> Sizes:
        """The sizes of the tiers in a batch bucket."""
        by_tier = [shapes.by_size[batch, tier] for tier in range(len(shapes.tiers))]
        nodes, budgets = ([s.nodes for s in by_tier], [s.rows - batch for s in by_tier])
        return cls(np.array(nodes), np.array(budgets), max(shape.scratch for shape in by_tier))


@dataclass(frozen=True)
class Made:
    """Trees, and the row of each request in them, until it is known how the texts go on."""

    trees: Trees
    row_of: dict[int, int]


@dataclass(frozen=True)
class Flight:
    """A decode step on its way.

    Attributes:
      batch, tier: Its program.
      follows: Whether it was planned asleep, and so did not wait for the step before.
      hopes: Drafts of its whole tree that each request is expected to accept, for the trace.
    """

    batch: int
    tier: int
    follows: bool
    hopes: list[float]


@dataclass(frozen=True)
class Landing:
    """A decode step that has ended, and the trees made for its texts before it ended.

    Attributes:
      seconds: That it took, host included; None where that is not known.
      asleep: The median step asleep, where this one was the last of those that it is taken of.
    """

    flight: Flight
    rows: Rows
    result: StepResult
    seconds: float | None
    asleep: float | None
    made: Made | None


class AdaptiveNgramController:
    """Drafts the nodes of the index's trees that pay.

    It learns from a step after the next one has been submitted, so that no step waits for that.

    Args:
      capacity: The backend's; its programs that take the host's trees, and the plain ones, are the
        tiers.
      index: Of seen texts; its trees are as large as the largest tier.
      table: Measured seconds of a step for each batch bucket, as `Costs` takes them: of each tier,
        where each step waits for the one before, and last of plain steps that do not wait. Empty
        where nothing was measured: then every node of the trees is verified.
      clock: Tells the time.
      trace: Where every step is written down; None: nowhere.

    Raises:
      ValueError: See `Shapes.of`.
    """

    def __init__(
        self,
        capacity: Capacity,
        index: NgramIndex,
        table: Mapping[int, Sequence[float]],
        clock: Callable[[], float] = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        self.shapes = Shapes.of(capacity, host_draft=True)
        self.costs = Costs(table, self.shapes.batches, last_waits=False)
        self.index, self.evidence, self._clock = index, Evidence(), clock
        self.evidence.warm_up()
        self.max_rows = self.shapes.batches[-1]
        self._sizes = {batch: Sizes.of(self.shapes, batch) for batch in self.shapes.batches}
        self._asleep = len(self.shapes.tiers)
        self.is_asleep, self.sleep = False, Sleep()
        self._submitted_at, self._is_host_late = 0.0, False
        self._decoded_last: list[Request] = []
        self._planned, self._follows = (self.max_rows, 0), False
        self._hopes: dict[int, float] = {}  # of requests that run, where there is a trace
        self._flights, self._landings = deque[Flight](), deque[Landing]()
        self._made: Made | None = None
        self._trace = trace
        self._last: float | None = None
        self._chosen, self.steps = 0, Counter[int]()
        tiers = gauges_of(self.shapes, self.steps, self.costs, lambda: self._chosen)
        asleep = {
            'spec_decode_adaptive_steps_total{tier="disabled"}': lambda: self.steps[self._asleep]
        }
        self.gauges: Gauges = {**index_gauges(index), **tiers, **asleep}

    @property
    def waits(self) -> bool:
        """Whether tokens that its next trees need are still on their way."""
        return not self.is_asleep and not all(r.is_settled for r in self._decoded_last)

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Every ready request that has room; while awake, those whose tokens are known."""
        self._follows = self.is_asleep
        if self.is_asleep:
            self._planned = self.shapes.bucket(len(ready)), self._asleep
            return self._rows(reserve(ready, self._shape(self._planned[0], 0).scratch), None)
        known = [request for request in ready if request.is_settled]
        if not known or self.waits:
            return None
        batch = self.shapes.bucket(len(known))
        requests = reserve(known, self._sizes[batch].scratch)
        if not requests:
            self._decoded_last = []
            return None
        # A tree is made only for a row that has room: the text it was made from is then learnt.
        tier, trees = self._choose(requests, batch)
        self._planned = batch, self._asleep if self.is_asleep else tier
        return self._rows(requests, None if self.is_asleep else trees)

    def _rows(self, requests: list[Request], trees: Trees | None) -> Rows | None:
        self._decoded_last = requests
        if not requests:
            return None
        batch, tier = self._planned
        shape = self._shape(batch, 0 if tier == self._asleep else tier)
        return Rows.decode(requests, shape) if trees is None else rows_with(requests, shape, trees)

    def _shape(self, batch: int, tier: int) -> TreeShape:
        return self.shapes.by_size[batch, tier]

    def _choose(self, requests: Sequence[Request], batch: int) -> tuple[int, Trees | None]:
        """The tier, and the trees cut to it; None of a plain step."""
        trees, ids = self.index.trees(requests), [request.request_id for request in requests]
        self._made = Made(trees, dict(zip(ids, range(len(ids)), strict=True)))
        most = np.array([most_left(request) - 1 for request in requests])
        weights = self.evidence.weights(trees, most)
        if self._trace is not None:
            self._hopes |= zip(ids, (weights.sum(axis=1) - 1).tolist(), strict=True)
        tier, cut = self._best(trees, weights, batch)
        if tier == 0:
            return 0, None
        nodes = self._shape(batch, tier).nodes
        return tier, Trees(
            cut.tokens[:, :nodes], cut.parents[:, :nodes], cut.num_nodes, cut.evidence[:, :nodes]
        )

    def _best(
        self, trees: Trees, weights: Float64[np.ndarray, "B N"], batch: int
    ) -> tuple[int, Trees]:
        """The tier that gives the most tokens a second, and what it verifies of the trees."""
        sizes, (count, N) = self._sizes[batch], weights.shape
        seconds = self.costs.of(batch, count)
        costs = np.array([1.0] * self._asleep if seconds is None else seconds[: self._asleep])
        gains, cut = np.empty(self._asleep), roots_of(count, N)
        tier = select(trees, weights, sizes.nodes, sizes.budgets, costs, gains, cut)
        if seconds is not None:
            tokens, plain = 1 + float(gains[tier]) / count, seconds[self._asleep]
            saved, wait = tokens - seconds[tier] / plain, seconds[0] / plain - 1
            self.is_asleep = not self.sleep.pays(saved, wait, self.is_asleep)
        return tier, cut

    def submitted(self, rows: Rows) -> None:
        """Learns from steps and texts while the device runs."""
        self._learn_behind(rows)
        self._submitted_at = self._clock()

    def _learn_behind(self, rows: Rows) -> None:
        for chunk in rows.chunks:
            self.index.see_prompt(chunk.request, chunk.end)
        self._learn()
        if not _is_own(rows):
            if self._enters_at_once:
                self.index.learn()
            return
        batch, tier = self._planned
        hopes = self._hopes
        known = [hopes.get(r.request_id, 0.0) for r in rows.requests] if hopes else []
        self._flights.append(Flight(batch, tier, self._follows, known))
        self._chosen = 0 if tier == self._asleep else tier
        self.steps[tier] += 1
        if tier != self._asleep:
            self.index.learn()
            return
        seconds = self.costs.of(batch, len(rows.requests))
        assert seconds is not None, "without measured seconds it never sleeps"
        if self.sleep.is_due(seconds[self._asleep]):
            self._look(rows.requests, batch)

    @property
    def _enters_at_once(self) -> bool:
        """Whether texts enter the index when they are seen, not with the next look."""
        return not (self.is_asleep and self._is_host_late)

    def _look(self, requests: Sequence[Request], batch: int) -> None:
        """Makes trees while a step asleep runs, and wakes if they pay."""
        began = self._clock()
        self._choose(requests, batch)
        self.index.learn()
        self.sleep.looked(self._clock() - began)

    def learned(self, rows: Rows, result: StepResult) -> None:
        """Notes when a step ended, for what it took; the next one need not wait for the rest."""
        now, last, self._last = self._clock(), self._last, None
        if not _is_own(rows):
            return
        flight = self._flights.popleft()
        if flight.follows:
            self._is_host_late = now - self._submitted_at < LEAST_LOOK_SECONDS
        seconds, self._last = None if last is None else now - last, now
        # Not of the step that fell asleep: it waited for the one before.
        asleep = self.sleep.stepped(flight.batch, seconds) if flight.follows else None
        made, self._made = self._made, None
        tells = not flight.follows or asleep is not None or made is not None
        if tells or self._trace is not None:
            self._landings.append(Landing(flight, rows, result, seconds, asleep, made))

    def _learn(self) -> None:
        """Learns what steps took, and whether trees were right about the texts that followed."""
        while self._landings:
            landing = self._landings.popleft()
            flight, rows, result = landing.flight, landing.rows, landing.result
            where = flight.batch, len(rows.requests)
            if flight.tier != self._asleep:
                self.costs.observe(*where, flight.tier, landing.seconds)
            self.costs.observe(*where, self._asleep, landing.asleep)
            if not flight.follows:
                self.sleep.gained(self._gain(landing))
            if self._trace is not None:
                self._trace.step(
                    flight.batch, flight.tier, rows, result, flight.hopes, landing.seconds
                )
            if landing.made is not None:
                self._score(landing.made, rows.requests, result)

    def _gain(self, landing: Landing) -> float:
        """Seconds that the step saved, against plain steps asleep for as many tokens."""
        count = len(landing.rows.requests)
        seconds = self.costs.of(landing.flight.batch, count)
        if seconds is None or landing.seconds is None:
            return 0.0
        tokens = int(landing.result.counts[:count].sum())
        return tokens / count * seconds[self._asleep] - landing.seconds

    def _score(self, made: Made, requests: Sequence[Request], result: StepResult) -> None:
        """Compares trees with the tokens of the first step after them."""
        ids = enumerate(request.request_id for request in requests)
        places = [(made.row_of[i], row) for row, i in ids if i in made.row_of]
        if places:
            trees, texts = np.ascontiguousarray(np.array(places).T)
            self.evidence.learn(made.trees, trees, result.tokens[texts], result.counts[texts])

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """Notes new tokens of a text."""
        self.index.see(request, tokens)

    def ended(self, request: Request) -> None:
        """Keeps the text, and lets go of the request."""
        self.index.end(request, is_learnt=self._enters_at_once)
        if self._trace is not None:
            self._learn()
            self._hopes.pop(request.request_id, None)
            if not self._hopes:
                self._trace.flush()

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Forgets what does not belong to the text."""
        self.index.cut(request_id, num_tokens)


def _is_own(rows: Rows) -> bool:
    """Whether the controller chose them: with a grammar among them another one did."""
    return rows.work is Work.DECODE and rows.masks is None
