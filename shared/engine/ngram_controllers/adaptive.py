"""Adaptive NGRAM: verifies the n-gram draft nodes that pay, or disables drafting.

The host has every row's tree and the estimated acceptance probability of each node before it plans
a step. It verifies the best nodes of the batch in the program with the most tokens per second.

A tree needs the newest token of its request, so a drafting step waits for the previous step. If the
best trees are not worth that wait, the controller disables drafting: plain steps then overlap as
without a drafter. While disabled it builds trees every few steps as the device runs (a probe), and
enables drafting when they are worth it. It tolerates poor trees for a while before it disables
drafting, and compensates the lost time by fewer probes (`shared.engine.ngram.probe_schedule`). No
trial steps are needed.

Inserting tokens into the index takes host time. That is free if the host waits for the device. If
the device waits for the host, as with a small model, only probes insert tokens while drafting is
disabled, so that their cost is budgeted like the rest of a probe. Tokens that no probe has inserted
by the end of a request are dropped.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import StepKind
from shared.engine.adaptive.controller import gauges_of, max_left, step_time_notes
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes
from shared.engine.adaptive.trace import TraceWriter
from shared.engine.controller import Gauges, Reserve
from shared.engine.ngram.acceptance_estimate import NodeAcceptance, select_nodes
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.probe_schedule import LEAST_LOOK_SECONDS, ProbeSchedule
from shared.engine.ngram.tree import NgramTreeBatch, roots_of
from shared.engine.ngram_controllers.controller import index_gauges, rows_with
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape


@dataclass(frozen=True)
class BucketSizes:
    """Sizes of the programs of a batch bucket, by tier.

    Attributes:
      nodes, budgets: Maximum nodes of a row with its root, and of all rows without roots.
      scratch: Maximum positions past a row's length that a step of any tier writes.
    """

    nodes: Int64[np.ndarray, " tiers"]
    budgets: Int64[np.ndarray, " tiers"]
    scratch: int

    @classmethod
    def of(cls, shapes: Shapes, batch: int) -> BucketSizes:
        """Returns the sizes of the tiers in a batch bucket."""
        by_tier = [shapes.by_size[batch, tier] for tier in range(len(shapes.tiers))]
        nodes, budgets = ([s.nodes for s in by_tier], [s.rows - batch for s in by_tier])
        return cls(np.array(nodes), np.array(budgets), max(shape.scratch for shape in by_tier))


@dataclass(frozen=True)
class PreparedTrees:
    """Trees, and the row of each request in them, until the following tokens are known."""

    trees: NgramTreeBatch
    row_of: dict[int, int]


@dataclass(frozen=True)
class NgramStep:
    """A decode step in flight.

    Attributes:
      batch, tier: Its program.
      follows: True if it was planned with drafting disabled, and so did not wait for the previous
        step.
      hopes: Expected accepted draft tokens of each request's whole tree, for the trace.
    """

    batch: int
    tier: int
    follows: bool
    hopes: list[float]


@dataclass(frozen=True)
class FinishedStep:
    """A finished decode step, and the trees built for its requests before it ended.

    Attributes:
      flight, rows, result: The step, its rows and its result.
      seconds: Its time including the host; None if unknown.
      disabled: Median time of plain steps with drafting disabled, if this one completes a group.
      made: Trees for its requests, or None.
    """

    flight: NgramStep
    rows: ScheduledRows
    result: StepResult
    seconds: float | None
    disabled: float | None
    made: PreparedTrees | None


class AdaptiveNgramController:
    """Drafts the nodes of the index's trees that pay.

    It processes the result of a step after the next one has been submitted, so that no step waits
    for it.

    Args:
      capacity: Limits of the backend; its programs with host-built trees, and plain ones, are the
        tiers.
      index: N-gram index; its trees have the size of the largest tier.
      table: Measured seconds of a step for each batch bucket, see `Costs`: of each tier, where each
        step waits for the previous one, and last of plain steps that do not wait. If empty, all
        nodes of the trees are verified.
      clock: Returns the time.
      trace: Trace file of all steps; None for none.

    Raises:
      ValueError: See `Shapes.of`.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        index: NgramIndex,
        table: Mapping[int, Sequence[float]],
        clock: Callable[[], float] = time.perf_counter,
        trace: TraceWriter | None = None,
    ) -> None:
        self.shapes = Shapes.of(capacity, host_draft=True)
        self.costs = Costs(table, self.shapes.batches, last_waits=False)
        self.index, self.evidence, self._clock = index, NodeAcceptance(), clock
        self.evidence.warm_up()
        self.max_rows = self.shapes.batches[-1]
        self._sizes = {batch: BucketSizes.of(self.shapes, batch) for batch in self.shapes.batches}
        self._asleep = len(self.shapes.tiers)
        self.is_asleep, self.sleep = False, ProbeSchedule()
        self._submitted_at, self._is_host_late = 0.0, False
        self._decoded_last: list[Request] = []
        self._planned, self._follows = (self.max_rows, 0), False
        self._hopes: dict[int, float] = {}  # per running request, only with a trace
        self._flights, self._landings = deque[NgramStep](), deque[FinishedStep]()
        self._made: PreparedTrees | None = None
        self._trace = trace
        self._last: float | None = None
        self._chosen, self.steps = 0, Counter[int]()
        tiers = gauges_of(self.shapes, self.steps, self.costs, lambda: self._chosen)
        asleep = {
            'spec_decode_adaptive_steps_total{tier="disabled"}': lambda: self.steps[self._asleep]
        }
        self.gauges: Gauges = {**index_gauges(index), **tiers, **asleep}

    @property
    def notes(self) -> Sequence[str]:
        """Step times of the tiers, one line for each batch bucket."""
        return step_time_notes(self.shapes, self.costs)

    @property
    def needs_last_result(self) -> bool:
        """True if tokens for its next trees are not available yet."""
        return not self.is_asleep and not all(r.has_no_step_in_flight for r in self._decoded_last)

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests that have pages; while drafting, those with known tokens."""
        self._follows = self.is_asleep
        if self.is_asleep:
            self._planned = self.shapes.bucket(len(ready)), self._asleep
            return self._rows(reserve(ready, self._shape(self._planned[0], 0).scratch), None)
        known = [request for request in ready if request.has_no_step_in_flight]
        if not known or self.needs_last_result:
            return None
        batch = self.shapes.bucket(len(known))
        requests = reserve(known, self._sizes[batch].scratch)
        if not requests:
            self._decoded_last = []
            return None
        # A tree is built only for a row with pages, because the index then inserts its tokens.
        tier, trees = self._choose(requests, batch)
        self._planned = batch, self._asleep if self.is_asleep else tier
        return self._rows(requests, None if self.is_asleep else trees)

    def _rows(self, requests: list[Request], trees: NgramTreeBatch | None) -> ScheduledRows | None:
        self._decoded_last = requests
        if not requests:
            return None
        batch, tier = self._planned
        shape = self._shape(batch, 0 if tier == self._asleep else tier)
        return (
            ScheduledRows.decode(requests, shape)
            if trees is None
            else rows_with(requests, shape, trees)
        )

    def _shape(self, batch: int, tier: int) -> TreeShape:
        return self.shapes.by_size[batch, tier]

    def _choose(self, requests: Sequence[Request], batch: int) -> tuple[int, NgramTreeBatch | None]:
        """Returns the tier, and the trees pruned to it; None for a plain step."""
        trees, ids = self.index.trees(requests), [request.request_id for request in requests]
        self._made = PreparedTrees(trees, dict(zip(ids, range(len(ids)), strict=True)))
        most = np.array([max_left(request) - 1 for request in requests])
        weights = self.evidence.weights(trees, most)
        if self._trace is not None:
            self._hopes |= zip(ids, (weights.sum(axis=1) - 1).tolist(), strict=True)
        tier, cut = self._best(trees, weights, batch)
        if tier == 0:
            return 0, None
        nodes = self._shape(batch, tier).nodes
        return tier, NgramTreeBatch(
            cut.tokens[:, :nodes], cut.parents[:, :nodes], cut.num_nodes, cut.evidence[:, :nodes]
        )

    def _best(
        self, trees: NgramTreeBatch, weights: Float64[np.ndarray, "B N"], batch: int
    ) -> tuple[int, NgramTreeBatch]:
        """Returns the tier with the most tokens per second, and the nodes of the trees that it
        verifies.
        """
        sizes, (count, N) = self._sizes[batch], weights.shape
        seconds = self.costs.of(batch, count)
        costs = np.array([1.0] * self._asleep if seconds is None else seconds[: self._asleep])
        gains, cut = np.empty(self._asleep), roots_of(count, N)
        tier = select_nodes(trees, weights, sizes.nodes, sizes.budgets, costs, gains, cut)
        if seconds is not None:
            tokens, plain = 1 + float(gains[tier]) / count, seconds[self._asleep]
            saved, wait = tokens - seconds[tier] / plain, seconds[0] / plain - 1
            self.is_asleep = not self.sleep.should_draft(saved, wait, self.is_asleep)
        return tier, cut

    def on_submit(self, rows: ScheduledRows) -> None:
        """Processes results and tokens while the device runs."""
        self._learn_behind(rows)
        self._submitted_at = self._clock()

    def _learn_behind(self, rows: ScheduledRows) -> None:
        for chunk in rows.chunks:
            self.index.add_prompt(chunk.request, chunk.end)
        self._learn()
        if not _is_own(rows):
            if self._enters_at_once:
                self.index.learn()
            return
        batch, tier = self._planned
        hopes = self._hopes
        known = [hopes.get(r.request_id, 0.0) for r in rows.requests] if hopes else []
        self._flights.append(NgramStep(batch, tier, self._follows, known))
        self._chosen = 0 if tier == self._asleep else tier
        self.steps[tier] += 1
        if tier != self._asleep:
            self.index.learn()
            return
        seconds = self.costs.of(batch, len(rows.requests))
        assert seconds is not None, "without measured times drafting is never disabled"
        if self.sleep.is_due(seconds[self._asleep]):
            self._look(rows.requests, batch)

    @property
    def _enters_at_once(self) -> bool:
        """True if tokens are inserted into the index at once, not with the next probe."""
        return not (self.is_asleep and self._is_host_late)

    def _look(self, requests: Sequence[Request], batch: int) -> None:
        """Probe: builds trees while a plain step runs, and enables drafting if they pay."""
        began = self._clock()
        self._choose(requests, batch)
        self.index.learn()
        self.sleep.on_probe(self._clock() - began)

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Records the time of a step; the rest is processed after the next submission."""
        now, last, self._last = self._clock(), self._last, None
        if not _is_own(rows):
            return
        flight = self._flights.popleft()
        if flight.follows:
            self._is_host_late = now - self._submitted_at < LEAST_LOOK_SECONDS
        seconds, self._last = None if last is None else now - last, now
        # Excludes the step that disabled drafting, which waited for the previous one.
        asleep = self.sleep.on_step(flight.batch, seconds) if flight.follows else None
        made, self._made = self._made, None
        tells = not flight.follows or asleep is not None or made is not None
        if tells or self._trace is not None:
            self._landings.append(FinishedStep(flight, rows, result, seconds, asleep, made))

    def _learn(self) -> None:
        """Updates costs from step times, and acceptance estimates from the tokens that followed
        trees.
        """
        while self._landings:
            landing = self._landings.popleft()
            flight, rows, result = landing.flight, landing.rows, landing.result
            batch, num_rows = flight.batch, len(rows.requests)
            if flight.tier != self._asleep:
                self.costs.observe(batch, num_rows, flight.tier, landing.seconds)
            self.costs.observe(batch, num_rows, self._asleep, landing.disabled)
            if not flight.follows:
                self.sleep.on_gain(self._gain(landing))
            if self._trace is not None:
                self._trace.step(batch, flight.tier, rows, result, flight.hopes, landing.seconds)
            if landing.made is not None:
                self._score(landing.made, rows.requests, result)

    def _gain(self, landing: FinishedStep) -> float:
        """Returns the seconds saved by the step, compared with plain steps for the same tokens."""
        count = len(landing.rows.requests)
        seconds = self.costs.of(landing.flight.batch, count)
        if seconds is None or landing.seconds is None:
            return 0.0
        tokens = int(landing.result.counts[:count].sum())
        return tokens / count * seconds[self._asleep] - landing.seconds

    def _score(self, made: PreparedTrees, requests: Sequence[Request], result: StepResult) -> None:
        """Compares trees with the tokens of the first step after them."""
        ids = enumerate(request.request_id for request in requests)
        places = [(made.row_of[i], row) for row, i in ids if i in made.row_of]
        if places:
            trees, texts = np.ascontiguousarray(np.array(places).T)
            self.evidence.learn(made.trees, trees, result.tokens[texts], result.counts[texts])

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds new output tokens of a request."""
        self.index.add_tokens(request, tokens)

    def on_finish(self, request: Request) -> None:
        """Keeps the output of a finished request."""
        self.index.end(request, is_learnt=self._enters_at_once)
        if self._trace is not None:
            self._learn()
            self._hopes.pop(request.request_id, None)
            if not self._hopes:
                self._trace.flush()

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Removes tokens that do not belong to the output."""
        self.index.truncate(request_id, num_tokens)


def _is_own(rows: ScheduledRows) -> bool:
    """Returns True if this controller chose the rows; rows with a grammar are another
    controller's.
    """
    return rows.work is StepKind.DECODE and rows.masks is None
