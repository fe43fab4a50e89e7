"""Adaptive controller: uses the tier with the most expected tokens per second in each step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import StepKind
from shared.engine.adaptive.acceptance import AcceptanceModel
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.policy import Policy, PolicyInput
from shared.engine.adaptive.tiers import Shapes, Tier
from shared.engine.adaptive.trace import TraceWriter
from shared.engine.controller import Gauges, Reserve
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows

MOST_STEPS_AHEAD = 25
"""Maximum steps within which a switch must pay; acceptance rates are not assumed to stay valid
longer."""


class _AdaptiveStep(NamedTuple):
    """A decode step in flight.

    Attributes:
      batch, tier: Its program.
      is_whole: True if its time is that of its tier. Rows after a plain step verify only their
        root, and read fewer experts.
      hopes: Expected accepted draft tokens of a chain, per row, for the trace.
    """

    batch: int
    tier: int
    is_whole: bool
    hopes: list[float]


class AdaptiveController:
    """Drafts with the device's drafter, with the tier that a policy chooses for each step.

    Args:
      capacity: Limits of the backend; its decode programs, with and without drafting, are the
        tiers.
      policy: The policy.
      table: Measured seconds of a step for each batch bucket, by tier; see `Costs`. If empty, the
        widest tier is used.
      trace: Trace file of all steps; None for none.
      has_experts: True for an MoE model, in which a step costs less if some rows do not draft.

    Attributes:
      has_experts: See above.
      shapes: Tiers and their shapes.
      costs: Current cost of each tier.
      acceptance: Acceptance estimates of requests.
      index: Always None: the device drafts.

    Raises:
      ValueError: See `Shapes.of`.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        policy: Policy,
        table: Mapping[int, Sequence[float]],
        trace: TraceWriter | None = None,
        *,
        has_experts: bool,
    ) -> None:
        self.shapes = Shapes.of(capacity, host_draft=False)
        self.costs = Costs(table, self.shapes.batches, last_waits=True)
        self.acceptance = AcceptanceModel(self.shapes.tiers)
        self.acceptance.warm_up()
        self.max_rows = self.shapes.batches[-1]
        self.has_experts, self._policy = has_experts, policy
        self._trace, self.index = trace, None
        self._planned = self.max_rows, 0  # batch bucket and tier of the last returned rows
        self._hopes: dict[int, float] = {}  # expected accepted tokens of a chain, per request
        self._flights: deque[_AdaptiveStep] = deque()
        self._after_off: set[int] = set()
        self._chosen, self.steps = 0, Counter[int]()
        self.gauges: Gauges = gauges_of(self.shapes, self.steps, self.costs, lambda: self._chosen)

    @property
    def notes(self) -> Sequence[str]:
        """Step times of the tiers, one line for each batch bucket."""
        return step_time_notes(self.shapes, self.costs)

    @property
    def needs_last_result(self) -> bool:
        """Always False: rows continue from the device's state."""
        return False

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests that have pages, with the tier that the policy chooses."""
        batch = self.shapes.bucket(len(ready))
        situation, survivals = self.situation(ready)
        self._planned = batch, self._policy.choose(situation)
        shape = self.shapes.by_size[self._planned]
        requests = reserve(ready, shape.scratch)
        if not requests:
            return None
        if self._trace is not None:
            ids = [request.request_id for request in ready]
            self._hopes = dict(zip(ids, survivals.sum(axis=1).tolist(), strict=True))
        calibration = None
        if shape.shares_rows(batch):
            # Drafts of the batch compete for its verify rows.
            place = {request.request_id: i for i, request in enumerate(ready)}
            kept = survivals[[place[request.request_id] for request in requests]]
            calibration = np.log(kept).astype(np.float32)
        return ScheduledRows.decode(requests, shape, calibration=calibration)

    def situation(self, ready: Sequence[Request]) -> tuple[PolicyInput, Float64[np.ndarray, "B D"]]:
        """Returns the policy's input for these requests, and their chains' acceptance probability
        by depth.
        """
        ids, count = [request.request_id for request in ready], len(ready)
        left = [max_left(request) for request in ready]
        limits = [request.sampling.max_draft_tokens for request in ready]
        most = [
            num - 1 if limit is None else min(num - 1, limit)
            for num, limit in zip(left, limits, strict=True)
        ]
        after_off = [i in self._after_off for i in ids]
        batch = self.shapes.bucket(count)
        seconds = self.costs.of(batch, count)
        expected, survivals = self.acceptance.predict(
            self.acceptance.rows_of(ids),
            np.array(most, np.int64),
            np.array(after_off),
            batch,
            seconds or [1.0] * len(self.shapes.tiers),
        )
        situation = PolicyInput(
            seconds=seconds,
            expected=expected,
            num_rows=count,
            after_off=sum(after_off) / count,
            steps_ahead=min(sum(left) / count, MOST_STEPS_AHEAD),
        )
        return situation, survivals

    def on_submit(self, rows: ScheduledRows) -> None:
        """Records the tier, and that rows of a plain step draft nothing in their next one."""
        ids = [request.request_id for request in rows.requests]
        if rows.work is StepKind.DRAFT:
            return
        if rows.work is not StepKind.DECODE or rows.masks is not None:
            # Draft extend has run: for a resumed request, or for steps with a grammar, whose shape
            # another controller chooses.
            self._after_off.difference_update(ids)
            return
        batch, self._chosen = self._planned
        self.steps[self._chosen] += 1
        is_off = self.shapes.tiers[self._chosen].is_off
        is_whole = is_off or not self.has_experts or self._after_off.isdisjoint(ids)
        hopes = [self._hopes.get(i, 0.0) for i in ids] if self._trace is not None else []
        self._flights.append(_AdaptiveStep(batch, self._chosen, is_whole, hopes))
        self._after_off.update(ids) if is_off else self._after_off.difference_update(ids)

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Updates costs from the step's time, and acceptance from draft tokens of running
        requests.
        """
        if rows.work is not StepKind.DECODE or rows.masks is not None:
            return
        batch, tier, is_whole, hopes = self._flights.popleft()
        if is_whole:
            self.costs.observe(batch, len(rows.requests), tier, result.device_seconds)
        if self._trace is not None:
            self._trace.step(batch, tier, rows, result, hopes, result.device_seconds)
        alive = [i for i, request in enumerate(rows.requests) if request.finish_reason is None]
        places = self.acceptance.rows_of([rows.requests[i].request_id for i in alive])
        kept = slice(len(alive)) if len(alive) == len(rows.requests) else alive
        drafted = np.subtract(result.num_nodes[kept], 1, dtype=np.int64)
        accepted = np.subtract(result.counts[kept], 1, dtype=np.int64)  # -1 for a failed row
        self.acceptance.learn(places, tier, drafted, accepted)

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Does nothing: `on_result` has processed the tokens."""

    def on_finish(self, request: Request) -> None:
        """Drops the request's estimates; its effect on the population stays."""
        self.acceptance.forget(request.request_id)
        self._after_off.discard(request.request_id)
        if self._trace is not None and self.acceptance.is_empty:
            self._trace.flush()

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Does nothing: no data is kept of a finished request."""


def max_left(request: Request) -> int:
    """Returns the maximum tokens that a request can use after the steps in flight; at least 1."""
    return max(request.sampling.max_tokens - len(request.output) - request.min_in_flight_tokens, 1)


def gauges_of(
    shapes: Shapes, steps: Mapping[int, int], costs: Costs, chosen: Callable[[], int]
) -> Gauges:
    """Returns the gauges of the tiers: steps and seconds of each, and draft nodes of the last
    one.
    """

    def seconds(batch: int, tier: int) -> float:
        known = costs.of(batch, batch)
        return float("nan") if known is None else known[tier]

    def name(tier: Tier) -> str:
        return f'tier="{tier}"'

    gauges: dict[str, Callable[[], float]] = {
        "spec_decode_adaptive_draft_tokens": lambda: shapes.tiers[chosen()].nodes - 1
    }
    for number, tier in enumerate(shapes.tiers):
        key = f"spec_decode_adaptive_steps_total{{{name(tier)}}}"
        gauges[key] = lambda number=number: steps[number]
        for batch in shapes.batches:
            key = f'spec_decode_adaptive_step_seconds{{batch="{batch}",{name(tier)}}}'
            gauges[key] = lambda batch=batch, number=number: seconds(batch, number)
    return gauges


def step_time_notes(shapes: Shapes, costs: Costs) -> list[str]:
    """Returns the step times of each batch bucket as lines for the startup log."""
    names = [*map(str, shapes.tiers), "none without waiting"]
    lines: list[str] = []
    for batch, seconds in costs.table.items():
        times = [f"{name} {1000 * each:.2f}" for name, each in zip(names, seconds, strict=False)]
        lines.append(f"step time at batch {batch}: {', '.join(times)} ms")
    return lines
