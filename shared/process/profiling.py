"""What decode steps cost, measured with real steps before anything is served.

Random prompts fill as many slots as a batch has rows, and each shape decodes a few steps of them.
Texts of a mixture of experts are drawn, each from a seed of its own: greedy ones soon repeat
themselves, and rows that are alike visit the same experts, in less time than those of served texts.
Others are greedy, as to draw takes time of its own on a CPU.
The device is then as if nothing had been: every request starts its slot anew with its prefill.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from shared.spec.merge_drafts import Copies

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
      temperature: Of the texts.
      seconds: Of each decode step: as the device says, or else, and where the host has a part in
        it, between two results.
    """

    def __init__(self, shapes: Shapes, host_draft: bool, vocab: int, temperature: float) -> None:
        self.max_rows, self.steps_wait = shapes.batches[-1], False
        self.temperature = temperature
        self._host_draft, self._vocab = host_draft, vocab
        self._decoded_last: list[Request] = []
        self._rng = np.random.default_rng(0)
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
        if not requests:
            return None
        if self._shape.copied:
            return Rows.decode(requests, self._shape, copies=self._copies(requests))
        is_tree = self._host_draft and not self._shape.is_plain
        drafts = self._chains(len(requests)) if is_tree else None
        return Rows.decode(requests, self._shape, drafts=drafts)

    def _chains(self, count: int) -> HostDraft:
        """Trees of the host's, as many nodes as there are verify rows for, of any tokens."""
        nodes = self._shape.nodes
        chain = np.tile(np.arange(nodes, dtype=np.int32), (count, 1))
        return HostDraft(
            tokens=self._rng.integers(0, self._vocab, (count, nodes), dtype=np.int32),
            parents=np.maximum(chain - 1, 0),
            num_nodes=np.full(count, min(nodes, self._shape.rows // count), np.int32),
            forced=np.zeros(count, np.int32),
        )

    def _copies(self, requests: Sequence[Request]) -> Copies:
        """A long copy for each request, of any tokens."""
        count, nodes = len(requests), self._shape.copied
        chain = np.tile(np.arange(nodes, dtype=np.int32), (count, 1))
        ends = [len(request.prompt) + len(request.output) - 1 for request in requests]
        return Copies(
            tokens=self._rng.integers(0, self._vocab, (count, nodes), dtype=np.int32),
            parents=np.maximum(chain - 1, 0),
            num_nodes=np.full(count, nodes, np.int32),
            weights=(-0.1 * chain).astype(np.float32),
            at=np.array(ends, np.int32),
        )

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


def step_seconds(
    backend: Backend,
    *,
    host_draft: bool,
    has_experts: bool,
    overlap: int,
    chunked_prefill_size: int,
) -> dict[int, list[float]]:
    """Measures the decode programs whose trees come from the host or the device, and plain ones.

    Args:
      backend: With all programs ready, and nothing running.
      host_draft: From the host: then steps wait for each other, and plain ones that do not are
        measured too.
      has_experts: Rows choose among experts, and padding reads next to none: then each bucket is
        measured with the fewest requests that it is taken for, too, and texts are drawn.
      overlap, chunked_prefill_size: As they will be served with.

    Returns:
      Seconds of a step for each number of requests, by the tiers of `Shapes`, and last of plain
      steps that do not wait where others do. Nothing where texts are too short to time a step.

    Raises:
      ValueError: See `Shapes.of`.
    """
    shapes = Shapes.of(backend.capacity, host_draft=host_draft)
    vocab, temperature = backend.capacity.vocab, 1.0 if has_experts else 0.0
    controller = _OneShape(shapes, host_draft, vocab, temperature)
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
    """Numbers of requests that are timed, ascending, each with its bucket."""
    found: dict[int, int] = {}
    for before, batch in zip((0, *shapes.batches), shapes.batches, strict=False):
        fewest = before + 1 if has_experts else batch
        found |= {fewest: batch, batch: batch}
    return found


def _round(
    engine: Engine,
    controller: _OneShape,
    shapes: Shapes,
    counts: Mapping[int, int],
    host_draft: bool,
) -> dict[int, list[float]]:
    """Each program once; nothing where texts are too short for one of them."""
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
    capacity: Capacity, shape: TreeShape, count: int, temperature: float
) -> list[Request]:
    """Short random prompts, with outputs of as many tokens as the steps may give."""
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


def _timed(engine: Engine, controller: _OneShape, shape: TreeShape, count: int) -> list[float]:
    """The median of some steps after the first, of fewer where texts are short; none of none."""
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
