"""What decode steps cost, measured with real steps before anything is served.

Random prompts fill as many slots as a batch has rows, and each shape decodes a few steps of them.
The device is then as if nothing had been: every request starts its slot anew with its prefill.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from shared.boundary.backend import Backend, Capacity, HostDraft, StepResult
from shared.boundary.program import Work
from shared.engine.adaptive.tiers import Shapes
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Gauges, Reserve
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import Rows
from shared.spec.draft_tree import TreeShape

WARM_UP_STEPS, TIMED_STEPS = 2, 8
ENOUGH_STEPS, ENOUGH_SECONDS = 3, 0.5
"""A slow device is timed by few steps, once they have taken so long together."""

MOST_STEPS, LEAST_SECONDS = 64, 0.02
"""A fast one is timed by more: a millisecond or two tells more of the host's start than of it."""

ROUNDS = 3
"""All programs are timed so often, one after the other, and the least time is believed: what slows
a machine down for a second is not held against the one program that it met, nor the clocks of an
idle GPU against the first ones."""

PROMPT_TOKENS = 16


class _OneShape:
    """A controller that takes the shape that it is told, and writes down what its steps took.

    Attributes:
      steps_wait: Whether a step waits for the result of the one before.
      seconds: Of each decode step: as the device says, or else, and where the host has a part in
        it, between two results.
    """

    def __init__(self, shapes: Shapes, host_draft: bool) -> None:
        self.max_rows, self.steps_wait, self._host_draft = shapes.batches[-1], False, host_draft
        self._decoded_last: list[Request] = []
        self.gauges: Gauges = {}
        self.begin(shapes.by_size[shapes.batches[-1], 0])

    def begin(self, shape: TreeShape) -> None:
        """Takes this shape from now on."""
        self._shape, self._last, self.seconds = shape, None, list[float]()

    @property
    def waits(self) -> bool:
        """Whether the step before is still on its way, where steps wait for each other."""
        return self.steps_wait and not all(r.is_settled for r in self._decoded_last)

    def rows_for(self, ready: Sequence[Request], reserve: Reserve) -> Rows | None:
        """Decodes every ready request, with trees of the host where the host drafts."""
        if self.waits:
            return None
        requests = self._decoded_last = reserve(ready, self._shape.scratch)
        is_tree = self._host_draft and not self._shape.is_plain
        drafts = _chains(len(requests), self._shape) if is_tree else None
        return Rows.decode(requests, self._shape, drafts=drafts) if requests else None

    def learned(self, rows: Rows, result: StepResult) -> None:
        """Notes a decode step that came after another one."""
        now, last = time.perf_counter(), self._last
        self._last = now if rows.work is Work.DECODE else None
        if self._last is not None and last is not None:
            seconds = None if self._host_draft else result.device_seconds
            self.seconds.append(now - last if seconds is None else seconds)

    def submitted(self, rows: Rows) -> None:
        """Nothing to do."""

    def saw(self, request: Request, tokens: Sequence[int]) -> None:
        """Nobody reads the texts."""

    def ended(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def cut(self, request_id: int, num_tokens: int) -> None:
        """Nothing is kept of a request."""


def _chains(count: int, shape: TreeShape) -> HostDraft:
    """Trees of the host's, as many nodes as there are verify rows for."""
    tokens = np.tile(np.arange(shape.nodes, dtype=np.int32), (count, 1))
    return HostDraft(
        tokens=tokens,
        parents=np.maximum(tokens - 1, 0),
        num_nodes=np.full(count, min(shape.nodes, shape.rows // count), np.int32),
        forced=np.zeros(count, np.int32),
    )


def step_seconds(
    backend: Backend, *, host_draft: bool, overlap: int, chunked_prefill_size: int
) -> dict[int, list[float]]:
    """Measures the decode programs whose trees come from the host or the device, and plain ones.

    Args:
      host_draft: From the host: then steps wait for each other, and plain ones that do not are
        measured too.
      backend: With all programs ready, and nothing running.
      overlap, chunked_prefill_size: As they will be served with.

    Returns:
      Seconds of a step for each batch bucket, by the tiers of `Shapes`, and last of plain steps
      that do not wait where others do. Nothing where texts are too short to time a step.

    Raises:
      ValueError: See `Shapes.of`.
    """
    shapes = Shapes.of(backend.capacity, host_draft=host_draft)
    controller = _OneShape(shapes, host_draft)
    engine = Engine(
        backend,
        controller,
        overlap=overlap,
        chunked_prefill_size=chunked_prefill_size,
        cache=NO_CACHE,
    )
    rounds = [_round(engine, controller, shapes, host_draft) for _ in range(ROUNDS)]
    if not all(rounds):
        return {}
    return {b: list(map(min, *(times[b] for times in rounds))) for b in shapes.batches}


def _round(
    engine: Engine, controller: _OneShape, shapes: Shapes, host_draft: bool
) -> dict[int, list[float]]:
    """Each program once; nothing where texts are too short for one of them."""
    seconds: dict[int, list[float]] = {batch: [] for batch in shapes.batches}
    controller.steps_wait = host_draft
    for (batch, _), shape in shapes.by_size.items():  # by batch, then by tier
        seconds[batch] += _timed(engine, controller, shape, batch)
    if host_draft:
        controller.steps_wait = False
        for batch in shapes.batches:
            seconds[batch] += _timed(engine, controller, shapes.by_size[batch, 0], batch)
    is_whole = all(len(each) == len(shapes.tiers) + host_draft for each in seconds.values())
    return seconds if is_whole else {}


def _requests(capacity: Capacity, shape: TreeShape, count: int) -> list[Request]:
    """Short random prompts, with outputs of as many tokens as the steps may give."""
    growth = capacity.overlap * (capacity.max_depth + 1)
    held = (capacity.num_pages - 1) * capacity.page_size + 1 - growth - capacity.scratch
    room = min(capacity.context_length, held)
    prompt = min(PROMPT_TOKENS, room // 2)
    steps = WARM_UP_STEPS + MOST_STEPS + capacity.overlap + 1
    sampling = SamplingParams(
        temperature=0.0, max_tokens=min(room - prompt, steps * shape.max_tokens)
    )
    rng = np.random.default_rng(count)
    return [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(0, capacity.vocab, prompt).tolist()),
            sampling=sampling,
        )
        for number in range(count)
    ]


def _is_enough(seconds: Sequence[float]) -> bool:
    took = sum(seconds)
    least = TIMED_STEPS if took > LEAST_SECONDS else MOST_STEPS
    return len(seconds) >= (ENOUGH_STEPS if took > ENOUGH_SECONDS else least)


def _timed(engine: Engine, controller: _OneShape, shape: TreeShape, batch: int) -> list[float]:
    """The median of some steps after the first, of fewer where texts are short; none of none."""
    controller.begin(shape)
    for request in _requests(engine.allocator.capacity, shape, batch):
        engine.add(request)
    while engine.busy and not _is_enough(controller.seconds[WARM_UP_STEPS:]):
        engine.step()
    for number in range(batch):
        engine.abort(number)
    while engine.busy:
        engine.step()
    seconds = controller.seconds[WARM_UP_STEPS:] or controller.seconds
    return [statistics.median(seconds)] if seconds else []
