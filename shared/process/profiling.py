"""Profiling of decode steps at startup, with real steps on random prompts.

Random prompts fill one slot per row of the batch, and each shape decodes some steps. With an
MoE model outputs are sampled with different seeds: greedy outputs soon repeat, and similar rows use
the same experts, which is faster than real outputs. Other models decode greedily, because sampling
takes time on a CPU. No state remains on the device: every request resets its slot in its prefill.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shared.boundary.backend import Backend, BackendLimits, HostDraft, StepResult
from shared.boundary.program import StepKind
from shared.engine.adaptive.tiers import Shapes
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Gauges, Reserve
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape
from shared.spec.merge_drafts import NgramTrees

WARM_UP_STEPS, TIMED_STEPS = 2, 8
ENOUGH_STEPS, ENOUGH_SECONDS = 3, 0.5
"""Minimum steps, and total time after which they suffice on a slow device."""

MOST_STEPS, LEAST_SECONDS = 64, 0.02
"""Maximum steps, and minimum total time on a fast device: a few milliseconds would mostly measure
host overhead."""

ROUNDS = 3
"""Number of rounds over all programs; the minimum counts. Short disturbances of the machine, and
low clocks of an idle GPU, then do not affect single programs."""

PROMPT_TOKENS = 16


class FixedShapeController:
    """Controller with a fixed shape that records the times of its steps.

    Attributes:
      steps_wait: True if a step waits for the result of the previous one.
      temperature: Temperature of the outputs.
      index: Always None: host-built trees are random.
      seconds: Time of each decode step: device time, or the time between two results if the host is
        involved.
    """

    def __init__(self, shapes: Shapes, host_draft: bool, vocab: int, temperature: float) -> None:
        self.max_rows, self.steps_wait = shapes.batches[-1], False
        self.temperature, self.index = temperature, None
        self._host_draft, self._vocab = host_draft, vocab
        self._decoded_last: list[Request] = []
        self._rng = np.random.default_rng(0)
        self.gauges: Gauges = {}
        self.notes: Sequence[str] = ()
        self.begin(shapes.by_size[shapes.batches[-1], 0])

    def begin(self, shape: TreeShape) -> None:
        """Sets the shape."""
        self._shape, self._last, self.seconds = shape, None, list[float]()

    @property
    def needs_last_result(self) -> bool:
        """True if steps wait for each other and the previous one is in flight."""
        return self.steps_wait and not all(r.has_no_step_in_flight for r in self._decoded_last)

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Decodes all ready requests, with host-built trees if the host drafts."""
        if self.needs_last_result:
            return None
        requests = self._decoded_last = reserve(ready, self._shape.scratch)
        if not requests:
            return None
        if self._shape.copied:
            return ScheduledRows.decode(requests, self._shape, copies=self._copies(requests))
        is_tree = self._host_draft and not self._shape.is_plain
        drafts = self._chains(len(requests)) if is_tree else None
        return ScheduledRows.decode(requests, self._shape, drafts=drafts)

    def _chains(self, count: int) -> HostDraft:
        """Returns host-built chains of random tokens, as long as the verify budget allows."""
        nodes = self._shape.nodes
        chain = np.tile(np.arange(nodes, dtype=np.int32), (count, 1))
        return HostDraft(
            tokens=self._rng.integers(0, self._vocab, (count, nodes), dtype=np.int32),
            parents=np.maximum(chain - 1, 0),
            num_nodes=np.full(count, min(nodes, self._shape.rows // count), np.int32),
            forced=np.zeros(count, np.int32),
        )

    def _copies(self, requests: Sequence[Request]) -> NgramTrees:
        """Returns a long n-gram chain of random tokens for each request."""
        count, nodes = len(requests), self._shape.copied
        chain = np.tile(np.arange(nodes, dtype=np.int32), (count, 1))
        ends = [len(request.prompt) + len(request.output) - 1 for request in requests]
        return NgramTrees(
            tokens=self._rng.integers(0, self._vocab, (count, nodes), dtype=np.int32),
            parents=np.maximum(chain - 1, 0),
            num_nodes=np.full(count, nodes, np.int32),
            weights=(-0.1 * chain).astype(np.float32),
            at=np.array(ends, np.int32),
        )

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Records the time of a decode step that follows another one."""
        now, last = time.perf_counter(), self._last
        self._last = now if rows.work is StepKind.DECODE else None
        if self._last is not None and last is not None:
            seconds = None if self._host_draft else result.device_seconds
            self.seconds.append(now - last if seconds is None else seconds)

    def on_submit(self, rows: ScheduledRows) -> None:
        """Does nothing."""

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Does nothing: outputs are discarded."""

    def on_finish(self, request: Request) -> None:
        """Does nothing: no data is stored per request."""

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        """Does nothing: no data is stored per request."""


def step_seconds(
    backend: Backend,
    *,
    host_draft: bool,
    has_experts: bool,
    overlap: int,
    chunked_prefill_size: int,
) -> dict[int, list[float]]:
    """Measures the decode programs with trees from the host or from the device, and plain ones.

    Args:
      backend: Backend with all programs ready, and idle.
      host_draft: True for host-built trees: steps then wait for each other, and plain steps that do
        not wait are measured too.
      has_experts: True for an MoE model, where padding reads almost no experts: each bucket is then
        also measured with the fewest requests that use it, and outputs are sampled.
      overlap, chunked_prefill_size: Values used for serving.

    Returns:
      Seconds of a step for each number of requests, by the tiers of `Shapes`, and last of plain
      steps without waiting if others wait. Empty if outputs are too short to time a step.

    Raises:
      ValueError: See `Shapes.of`.
    """
    shapes = Shapes.of(backend.capacity, host_draft=host_draft)
    vocab, temperature = backend.capacity.vocab, 1.0 if has_experts else 0.0
    controller = FixedShapeController(shapes, host_draft, vocab, temperature)
    engine = Engine(
        backend,
        controller,
        overlap=overlap,
        chunked_prefill_size=chunked_prefill_size,
        cache=NO_CACHE,
    )
    counts = _counts(shapes, has_experts)
    rounds = [_round(engine, controller, shapes, counts, host_draft) for _ in range(ROUNDS)]
    if not all(rounds):
        return {}
    return {count: list(map(min, *(times[count] for times in rounds))) for count in counts}


def _counts(shapes: Shapes, has_experts: bool) -> dict[int, int]:
    """Returns the numbers of requests to measure, ascending, with their buckets."""
    found: dict[int, int] = {}
    for before, batch in zip((0, *shapes.batches), shapes.batches, strict=False):
        fewest = before + 1 if has_experts else batch
        found |= {fewest: batch, batch: batch}
    return found


def _round(
    engine: Engine,
    controller: FixedShapeController,
    shapes: Shapes,
    counts: Mapping[int, int],
    host_draft: bool,
) -> dict[int, list[float]]:
    """Measures each program once; returns nothing if outputs are too short for one of them."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    controller.steps_wait = host_draft
    for count, batch in counts.items():
        for tier in range(len(shapes.tiers)):
            seconds[count] += _timed(engine, controller, shapes.by_size[batch, tier], count)
    if host_draft:
        controller.steps_wait = False
        for count, batch in counts.items():
            seconds[count] += _timed(engine, controller, shapes.by_size[batch, 0], count)
    is_whole = all(len(each) == len(shapes.tiers) + host_draft for each in seconds.values())
    return seconds if is_whole else {}


def _requests(
    capacity: BackendLimits, shape: TreeShape, count: int, temperature: float
) -> list[Request]:
    """Returns short random prompts, with outputs long enough for all steps."""
    growth = capacity.overlap * (capacity.max_depth + 1)
    held = (capacity.num_pages - 1) * capacity.page_size + 1 - growth - capacity.scratch
    room = min(capacity.context_length, held)
    prompt = min(PROMPT_TOKENS, room // 2)
    steps = WARM_UP_STEPS + MOST_STEPS + capacity.overlap + 1
    sampling = SamplingParams(
        temperature=temperature, max_tokens=min(room - prompt, steps * shape.max_tokens)
    )
    rng = np.random.default_rng(count)
    return [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(0, capacity.vocab, prompt).tolist()),
            sampling=replace(sampling, seed32=number),
        )
        for number in range(count)
    ]


def _is_enough(seconds: Sequence[float]) -> bool:
    took = sum(seconds)
    least = TIMED_STEPS if took > LEAST_SECONDS else MOST_STEPS
    return len(seconds) >= (ENOUGH_STEPS if took > ENOUGH_SECONDS else least)


def _timed(
    engine: Engine, controller: FixedShapeController, shape: TreeShape, count: int
) -> list[float]:
    """Returns the median of some steps after the first; of fewer steps if outputs are short, none
    without any.
    """
    controller.begin(shape)
    capacity = engine.allocator.capacity
    for request in _requests(capacity, shape, count, controller.temperature):
        engine.add(request)
    while engine.busy and not _is_enough(controller.seconds[WARM_UP_STEPS:]):
        engine.step()
    for number in range(count):
        engine.abort(number)
    while engine.busy:
        engine.step()
    seconds = controller.seconds[WARM_UP_STEPS:] or controller.seconds
    return [statistics.median(seconds)] if seconds else []
