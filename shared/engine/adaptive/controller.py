"""The controller that takes, for each step, the tier with the most expected tokens a second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from shared.boundary.backend import Capacity, StepResult
from shared.boundary.program import Work
from shared.engine.adaptive.acceptance import Acceptance
from shared.engine.adaptive.choice import Policy, Situation
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes, Tier
from shared.engine.adaptive.trace import Trace
from shared.engine.controller import Gauges, Reserve
from shared.engine.request import Request
from shared.engine.rows import Rows

MOST_STEPS_AHEAD = 25
"""Going off or back must pay within so many steps: for longer rates are not trusted to hold."""


class _Flight(NamedTuple):
    """A decode step on its way.

    Attributes:
      batch, tier: Its program.
      is_whole: Whether it costs what its tier does. After off rows verify their root alone, and
        read fewer experts.
      hopes: Drafts of a chain that each row is expected to accept, for the trace.
    """

    batch: int
    tier: int
    is_whole: bool
    hopes: list[float]


class AdaptiveController:
    """Drafts with the device's drafter, in each step with the tier that a policy chooses.

    Args:
      capacity: The backend's; its decode programs that draft, and the plain ones, are the tiers.
      policy: Chooses.
      table: Measured seconds of a step for each batch bucket, by tier; see `Costs`. Empty: nothing
        is known of them, and the widest tier is taken.
      trace: Where every step is written down; None: nowhere.
      has_experts: Rows choose among experts, so that a step costs less where some do not draft.

    Attributes:
      has_experts: As above.
      shapes: What is chosen from.
      costs: What each tier costs now.
      acceptance: What was learnt of requests.

    Raises:
      ValueError: See `Shapes.of`.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        table: Mapping[int, Sequence[float]],
        trace: Trace | None = None,
        *,
        has_experts: bool,
    ) -> None:
        self.shapes = Shapes.of(capacity, host_draft=False)
        self.costs = Costs(table, self.shapes.batches, last_waits=True)
        self.acceptance = Acceptance(self.shapes.tiers)
        self.acceptance.warm_up()
        self.max_rows = self.shapes.batches[-1]
        self.has_experts, self._policy = has_experts, policy
        self._trace = trace
        self._planned = self.max_rows, 0  # batch bucket and tier of the rows that were given last
        self._hopes: dict[int, float] = {}  # drafts of a chain that each row is expected to accept
        self._flights: deque[_Flight] = deque()
        self._after_off: set[int] = set()
        self._chosen, self.steps = 0, Counter[int]()
        self.gauges: Gauges = gauges_of(self.shapes, self.steps, self.costs, lambda: self._chosen)

    @property
    def waits(self) -> bool:
        """A row goes on from what the device holds."""
        return False

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Every ready request that has room, with the tier that the policy chooses."""
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
        if shape.rows == batch * shape.nodes:
            return Rows.decode(requests, shape)
        # Drafts of the batch compete for its verify rows.
        place = {request.request_id: i for i, request in enumerate(ready)}
        kept = survivals[[place[request.request_id] for request in requests]]
        return Rows.decode(requests, shape, calibration=np.log(kept).astype(np.float32))

    def situation(self, ready: Sequence[Request]) -> tuple[Situation, Float64[np.ndarray, "B D"]]:
        """What is known before a step of these requests, and how their chains survive by depth."""
        rows = self.acceptance.rows_of([request.request_id for request in ready])
        left = np.array([most_left(request) for request in ready])
        capacity = [request.sampling.max_draft_tokens for request in ready]
        most = np.minimum(left - 1, [np.inf if m is None else m for m in capacity]).astype(np.int64)
        after_off = np.array([request.request_id in self._after_off for request in ready])
        batch = self.shapes.bucket(len(ready))
        seconds = self.costs.of(batch, len(ready))
        expected, survivals = self.acceptance.expect(
            rows, most, after_off, batch, seconds or [1.0] * len(self.shapes.tiers)
        )
        situation = Situation(
            seconds=seconds,
            expected=expected,
            num_rows=len(ready),
            after_off=float(after_off.mean()),
            steps_ahead=min(float(left.mean()), MOST_STEPS_AHEAD),
        )
        return situation, survivals

    def submitted(self, rows: Rows) -> None:
        """Notes the tier, and that rows of a plain step draft nothing in their next one."""
        ids = [request.request_id for request in rows.requests]
        if rows.work is Work.DRAFT:
            return
        if rows.work is not Work.DECODE or rows.masks is not None:
            # The drafter is fed: of a request that resumes, or that decodes with a grammar beside
            # it, whose steps are somebody else's choice.
            self._after_off.difference_update(ids)
            return
        batch, self._chosen = self._planned
        self.steps[self._chosen] += 1
        is_off = self.shapes.tiers[self._chosen].is_off
        is_whole = is_off or not self.has_experts or self._after_off.isdisjoint(ids)
        hopes = [self._hopes.get(i, 0.0) for i in ids]
        self._flights.append(_Flight(batch, self._chosen, is_whole, hopes))
        self._after_off.update(ids) if is_off else self._after_off.difference_update(ids)

    def learned(self, rows: Rows, result: StepResult) -> None:
        """Learns what the step took, and what its drafts showed of requests that still run."""
        if rows.work is not Work.DECODE or rows.masks is not None:
            return
        batch, tier, is_whole, hopes = self._flights.popleft()
        if is_whole:
            self.costs.observe(batch, len(rows.requests), tier, result.device_seconds)
        if self._trace is not None:
            self._trace.step(batch, tier, rows, result, hopes, result.device_seconds)
        alive = [i for i, request in enumerate(rows.requests) if request.finish_reason is None]
        accepted = result.counts[alive].astype(np.int64) - 1
        deepest = self.shapes.tiers[tier].depth
        drafted = np.minimum(result.num_nodes[alive] - 1, deepest).astype(np.int64)
        drafted[accepted < 0] = 0  # a row that failed shows nothing
        places = self.acceptance.rows_of([rows.requests[i].request_id for i in alive])
        self.acceptance.learn(places, tier, drafted, accepted)

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """The step's result has said it."""

    def ended(self, request: Request) -> None:
        """Forgets the request; what it showed of all stays."""
        self.acceptance.forget(request.request_id)
        self._after_off.discard(request.request_id)
        if self._trace is not None and self.acceptance.is_empty:
            self._trace.flush()

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Nothing is kept of a request that ended."""


def most_left(request: Request) -> int:
    """Most tokens that a request can still use once the steps in flight have ended; at least 1."""
    return max(request.sampling.max_tokens - len(request.output) - request.least_growth, 1)


def gauges_of(
    shapes: Shapes, steps: Mapping[int, int], costs: Costs, chosen: Callable[[], int]
) -> Gauges:
    """What `/metrics` shows of the tiers: steps and seconds of each, and nodes of the last."""

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
