"""Merged drafting: extends the trees of a model-based drafter with n-gram drafts if the gain covers
their cost.

Unlike NGRAM alone, no step waits. The n-gram drafts of a step are built from the tokens known when
it is planned, while the previous step runs. They extend as far ahead as the steps in flight may
get, and the device aligns them to the newest token (`shared.spec.merge_drafts`). Each step is of
the kind with the most expected tokens for its cost: the drafter alone, merged drafts, or n-gram
drafts alone. In the last kind the drafter drafts nothing, which saves its passes, but draft extend
runs as always. If step times were measured, they are the cost, and plain steps are a fourth kind,
used while nothing pays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import StepKind
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes
from shared.engine.controller import Gauges, Reserve, shapes_by_batch, smallest_that_holds
from shared.engine.ngram.acceptance_estimate import NodeAcceptance
from shared.engine.ngram.backoff import Backoff
from shared.engine.ngram.drafter_acceptance import DrafterAcceptance, drafter_levels
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.tree import NgramTreeBatch, corpus_nodes
from shared.engine.ngram_controllers.controller import index_gauges
from shared.engine.request import CORPUS, DRAFT, NGRAM, Request
from shared.engine.rows import ScheduledRows
from shared.engine.step_trace import accepted_path, origins_of
from shared.spec.draft_tree import TreeShape
from shared.spec.merge_drafts import NgramTrees

ROW_COST = 1 / 256
"""Cost of a verify row as a fraction of a step's time, for small batches limited by weight reads:
with Qwen3-8B on an H200 a step of 32 rows takes 5.0 ms, of 96 rows 6.3 ms (`bench/results`)."""


KINDS = "model", "merged", "ngram"
"""Kinds of decode steps: the drafter alone, merged drafts, and n-gram drafts alone."""

OFF = "none"
"""Kind of plain steps, which skip draft extend: the drafter's next step has no draft tokens."""


@dataclass(frozen=True)
class _MergedStep:
    """A decode step in flight.

    Attributes:
      trees: N-gram drafts built for it, verified or not.
      known: Output tokens of each request when they were built.
      kind: Kind of the step.
    """

    trees: NgramTreeBatch
    known: list[int]
    kind: str


class MergedDraftController:
    """Drafts on the device, and merges n-gram drafts of the index.

    Args:
      capacity: Limits and programs of the backend.
      index: N-gram index; its trees have the nodes of the programs that merge n-gram drafts.
      draft_share: Time of the drafter's passes as a fraction of a step without drafting.
      table: Measured seconds of a step for each batch bucket, by tier; see `Costs`. If empty, no
        step is plain.

    Attributes:
      index, draft_share: See above.
      pause: Backoff of drafting.
      measured: Times of steps; None if not measured.
      evidence, worth: Acceptance estimates of n-gram drafts, and of the drafter.
      steps, drafts, accepted: Steps of each kind, and draft tokens of each source, proposed and
        accepted.

    Raises:
      ValueError: The backend lacks decode programs of one of the `KINDS`.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        index: NgramIndex,
        draft_share: float,
        table: Mapping[int, Sequence[float]],
    ) -> None:
        def shapes(is_wanted: Callable[[TreeShape], bool]) -> dict[int, TreeShape]:
            return shapes_by_batch(capacity, host_draft=False, is_wanted=is_wanted)

        joined = shapes(lambda s: s.copied == index.nodes and not s.drafter.is_plain)
        own = {shape.drafter.tree for shape in joined.values()}
        drafted = shapes(lambda s: not s.copied and s.tree in own)
        copied = shapes(lambda s: s.copied == index.nodes and s.drafter.is_plain)
        if not (joined and drafted and copied):
            raise ValueError(
                "merged drafting requires decode programs for the drafter alone, for merged "
                f"trees with {index.nodes} n-gram nodes, and for n-gram drafts alone"
            )
        widest = next(iter(joined.values()))
        self._shapes: dict[str, dict[int, TreeShape]] = {
            "model": drafted,
            "merged": joined,
            "ngram": copied,
        }
        self.index, self.evidence, self.draft_share = index, NodeAcceptance(), draft_share
        self.worth = DrafterAcceptance(widest.drafter.depth, widest.depth)
        self.max_rows = min(max(of_kind) for of_kind in self._shapes.values())
        self.measured = MeasuredStepTimes.of(capacity, self._shapes, table) if table else None
        if self.measured is not None:
            self._shapes[OFF] = shapes(lambda s: s.is_plain)
        self.pause = Backoff()
        self._planned: _MergedStep | None = None
        self._flights = deque[_MergedStep]()
        self.steps, self.drafts, self.accepted = Counter[str](), Counter[str](), Counter[str]()
        self.gauges: Gauges = {**index_gauges(index), **_gauges(self)}
        self.notes: Sequence[str] = ()

    def warm_up(self) -> None:
        """Compiles the loops in advance."""
        self.index.warm_up()
        self.evidence.warm_up()
        none = np.zeros((1, 1), np.int32)
        root = NgramTreeBatch(none, none, np.ones(1, np.int32), none)
        self.worth.expected_tokens_of_tree(root, np.ones((1, 1)), np.zeros(1, np.int64))

    @property
    def needs_last_result(self) -> bool:
        """Always False: rows continue from the device's state."""
        return False

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns all ready requests that have pages, with n-gram drafts if they pay."""
        widest = smallest_that_holds(self._shapes["merged"], len(ready))
        requests = reserve(ready, widest.scratch)
        if not requests:
            return None
        trees = self.index.trees(requests)
        chances = self.evidence.weights(trees, np.full(len(requests), trees.tokens.shape[1]))
        ahead = np.array([self._ahead(request) for request in requests])
        tokens = self.worth.expected_tokens_of_tree(trees, chances, ahead)
        kind = self.kind_of(dict(zip(KINDS, tokens, strict=True)), len(requests))
        self._planned = _MergedStep(trees, [len(request.output) for request in requests], kind)
        shape = smallest_that_holds(self._shapes[kind], len(requests))
        if not shape.copied:
            return ScheduledRows.decode(requests, shape)
        return ScheduledRows.decode(
            requests,
            shape,
            copies=NgramTrees(
                tokens=trees.tokens,
                parents=trees.parents,
                num_nodes=trees.num_nodes,
                weights=np.log(np.maximum(chances, np.exp(-60.0))).astype(np.float32),
                at=self.index.last_positions(requests),
            ),
            corpus_nodes=partial(corpus_nodes, trees),
        )

    def kind_of(self, tokens: Mapping[str, float], num_requests: int) -> str:
        """Returns the kind of step with the most tokens for its cost; ties go to the first.

        Args:
          tokens: Expected tokens per request in a step of each kind.
          num_requests: Requests of the step.
        """

        if (measured := self.measured) is not None:
            return self._kind_by(measured.seconds(num_requests), tokens)

        def speed(kind: str) -> float:
            rows = smallest_that_holds(self._shapes[kind], num_requests).rows
            seconds = 1 + ROW_COST * rows + self.draft_share * (kind != "ngram")
            return tokens[kind] / seconds

        return max(KINDS, key=speed)

    def _kind_by(self, seconds: Mapping[str, float], tokens: Mapping[str, float]) -> str:
        """Returns the kind with the most tokens per second; plain steps while no other kind is
        faster.
        """
        is_paused = self.pause.left > 0
        # During a pause only the n-gram drafts can still be evaluated.
        kinds = ("ngram",) if is_paused else KINDS
        best = max(kinds, key=lambda kind: tokens[kind] / seconds[kind])
        if tokens[best] / seconds[best] > 1 / seconds[OFF]:
            self.pause.on_success()
            return best
        if not is_paused:
            self.pause.begin()
        if self.pause.on_plain_step():
            self.worth.decay_confidence()
        return OFF

    def _ahead(self, request: Request) -> int:
        """Returns the tokens that the steps in flight must add for the n-gram drafts to be useful
        after them.

        A step that verifies n-gram drafts ends at their end, or at a token that they do not
        contain; then they no longer match. A step of the drafter adds its expected tokens.
        """
        if request.max_in_flight_tokens <= 1:
            return request.max_in_flight_tokens
        steps = request.min_in_flight_tokens  # each adds at least one
        kinds = [flight.kind for flight in self._flights][-steps:]
        reach = self._reach
        return max(1, sum(reach[kind] for kind in kinds))

    @property
    def _reach(self) -> dict[str, int]:
        """Tokens that a step of each kind must add for that."""
        whole = self.worth.depth + 1
        return {"model": round(self.worth.expected_tokens), "merged": whole, "ngram": whole, OFF: 1}

    def on_submit(self, rows: ScheduledRows) -> None:
        """Inserts prompts and outputs into the index while the device runs."""
        for chunk in rows.chunks:
            self.index.add_prompt(chunk.request, chunk.end)
        self.index.learn()
        if _is_own(rows):
            assert self._planned is not None  # set by `select_rows`
            self._flights.append(self._planned)
            self.steps[self._planned.kind] += 1

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Updates the acceptance estimates of n-gram drafts and of the drafter."""
        if not _is_own(rows):
            return
        flight = self._flights.popleft()
        if self.measured is not None:
            self.measured.observe(len(rows.requests), flight.kind, result.device_seconds)
        counts, texts = result.counts.tolist(), result.tokens.tolist()
        alive = [i for i, r in enumerate(rows.requests) if r.finish_reason is None and counts[i]]
        for row in alive:
            self._learn_row(rows, result, row, texts[row][: counts[row]])
        if not alive:
            return
        said = [
            [*rows.requests[i].output[flight.known[i] :], *texts[i][: counts[i]]] for i in alive
        ]
        longest = max(map(len, said))
        padded = np.array([text + [0] * (longest - len(text)) for text in said], np.int32)
        lengths = np.array([len(text) for text in said], np.int32)
        self.evidence.learn(flight.trees, np.array(alive), padded, lengths)

    def _learn_row(
        self, rows: ScheduledRows, result: StepResult, row: int, tokens: list[int]
    ) -> None:
        count = int(result.num_nodes[row])
        parents, drafts = (each[row, 1:count].tolist() for each in (result.parents, result.drafts))
        path, origins = accepted_path(drafts, parents, tokens[:-1]), origins_of(rows, result, row)
        drafted, by_drafter = drafter_levels(parents, [each == DRAFT for each in origins], path)
        self.worth.learn(drafted, by_drafter)
        self.drafts.update(origins)
        self.accepted.update(origins[node - 1] for node in path)

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds new output tokens of a request."""
        self.index.add_tokens(request, tokens)

    def on_finish(self, request: Request) -> None:
        """Inserts the output of a finished request."""
        self.index.end(request, is_learnt=True)

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Removes tokens that do not belong to the output."""
        self.index.truncate(request_id, num_tokens)


class MeasuredStepTimes:
    """Times of steps by kind, measured at startup and tracked.

    Args:
      costs: Costs by tier.
      tiers: For each batch bucket, the tier of each kind.
    """

    def __init__(self, costs: Costs, tiers: Mapping[int, Mapping[str, int]]) -> None:
        self._costs, self._tiers = costs, tiers

    @classmethod
    def of(
        cls,
        capacity: BackendLimits,
        shapes: Mapping[str, Mapping[int, TreeShape]],
        table: Mapping[int, Sequence[float]],
    ) -> MeasuredStepTimes:
        """Creates the times of a backend's programs.

        Args:
          capacity: Limits and programs of the backend.
          shapes: Shapes of all batch buckets, by kind.
          table: See `MergedDraftController`.
        """
        found = Shapes.of(capacity, host_draft=False)
        tiers: dict[int, dict[str, int]] = {batch: {OFF: 0} for batch in found.batches}
        for (batch, tier), shape in found.by_size.items():
            tiers[batch] |= {kind: tier for kind, own in shapes.items() if own[batch] == shape}
        return cls(Costs(table, found.batches, last_waits=True), tiers)

    def seconds(self, num_requests: int) -> dict[str, float]:
        """Returns the seconds of a step of `num_requests` requests, by kind."""
        batch = self._bucket(num_requests)
        by_tier = self._costs.of(batch, num_requests)
        assert by_tier is not None  # all buckets were measured
        return {kind: by_tier[tier] for kind, tier in self._tiers[batch].items()}

    def observe(self, num_requests: int, kind: str, seconds: float | None) -> None:
        """Updates the times from a step; None is ignored."""
        batch = self._bucket(num_requests)
        self._costs.observe(batch, num_requests, self._tiers[batch][kind], seconds)

    def _bucket(self, num_requests: int) -> int:
        return next(batch for batch in self._tiers if batch >= num_requests)


def _gauges(controller: MergedDraftController) -> dict[str, Callable[[], float]]:
    """Returns the gauges: steps of each kind, and proposed and accepted draft tokens of each
    source.
    """
    gauges: dict[str, Callable[[], float]] = {}
    for kind in (*KINDS, OFF):
        name = f'spec_decode_merged_steps_total{{source="{kind}"}}'
        gauges[name] = partial(controller.steps.__getitem__, kind)
    for source, label in ((DRAFT, "model"), (NGRAM, NGRAM), (CORPUS, CORPUS)):
        for what, counter in (("draft", controller.drafts), ("accepted", controller.accepted)):
            name = f'spec_decode_source_{what}_tokens_total{{source="{label}"}}'
            gauges[name] = partial(counter.__getitem__, source)
    return gauges


def _is_own(rows: ScheduledRows) -> bool:
    """Returns True if this controller chose the rows; rows with a grammar are another
    controller's.
    """
    return rows.work is StepKind.DECODE and rows.masks is None
