"""The lossless certificate: some requests that have ended are run once more plainly, and compared.

A replay is the same request without drafts, alone and with KV of its own. It runs where the engine
has nothing else to do, a step at a time, and whoever comes ends it at once: its slot and its pages
are free before the next step, and it begins anew when the engine is idle again. It leaves nothing
to the prefix cache. Where no page is free it takes those that were used longest ago, and gives them
back free: that is all that traffic can notice of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from shared.boundary.backend import Backend
from shared.engine.engine import Engine
from shared.engine.metrics import Metrics
from shared.engine.replay import Divergence, PlainRunner
from shared.engine.request import Event, FinishReason, Request

MOST_WAITING = 64
"""Texts that wait to be checked; one more is dropped."""

MOST_PICTURE_BYTES = 1 << 28
"""Of the pixels of what waits, which nothing else needs any more; what has more is dropped."""

MOST_STARTS = 4
"""Times that a check begins, as traffic interrupts it; then it is dropped."""

MATCH, MISMATCH, DROPPED = RESULTS = ("match", "mismatch", "dropped")
"""Values of the label `result` of `shadow_verify_requests_total`, next to "skipped"."""


class Skip(Enum):
    """Why a text that was chosen has no plain one to be compared with."""

    ABORTED = "aborted"
    FAILED = "failed"
    REJECTION = "rejection"
    GRAMMAR = "grammar"
    EMPTY = "empty"


def is_chosen(request_id: int, rate: float) -> bool:
    """Whether a request is among the share that is checked, which its number alone decides."""
    digest = blake2b(str(request_id).encode(), key=b"shadow check", digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


@dataclass
class _Case:
    """A text that waits to be checked, and how often that has begun."""

    request: Request
    served: tuple[int, ...]
    num_starts: int = 0


class ShadowCheck:
    """An engine that checks a share of its texts while nobody asks it for anything.

    Args:
      engine: Serves.
      backend: Its device.
      rate: Share of the requests that are checked.
      report: Told of each text that differs.

    Raises:
      ValueError: See `PlainRunner`.
    """

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        *,
        rate: float,
        report: Callable[[Divergence], None],
    ) -> None:
        self._engine, self._rate, self._report = engine, rate, report
        self._runner = PlainRunner(
            backend, engine.planner, engine.allocator, engine.cache, engine.pictures
        )
        self._may_redraw = backend.capacity.accept_rule != "exact"
        self._open: dict[int, Request] = {}
        self._waiting: deque[_Case] = deque()
        self._case: _Case | None = None
        self._counts, self._num_steps = Counter[str](), 0
        self._skipped = Counter[Skip]()
        engine.metrics.show(self._gauges())

    def _gauges(self) -> dict[str, Callable[[], float]]:
        total = "shadow_verify_requests_total"
        shown: dict[str, Callable[[], float]] = {
            f'{total}{{result="{result}"}}': lambda result=result: self._counts[result]
            for result in RESULTS
        }
        shown[f'{total}{{result="skipped"}}'] = self._skipped.total
        for reason in Skip:
            name = f'shadow_verify_skipped_total{{reason="{reason.value}"}}'
            shown[name] = lambda reason=reason: self._skipped[reason]
        shown["shadow_verify_steps_total"] = lambda: self._num_steps
        return {**shown, "shadow_verify_requests_waiting": lambda: self.num_waiting}

    @property
    def num_waiting(self) -> int:
        """Texts that are yet to be checked, or are being."""
        return len(self._waiting) + (self._case is not None)

    @property
    def metrics(self) -> Metrics:
        """The engine's, and what was checked."""
        return self._engine.metrics

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._engine.busy or self.num_waiting > 0

    def add(self, request: Request) -> None:
        """Takes a request in, as `Engine.add`; what is being checked gives way to it."""
        self._engine.add(request)
        self._interrupt()
        if is_chosen(request.request_id, self._rate):
            self._open[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """As `Engine.abort`."""
        self._engine.abort(request_id)
        if self._open.pop(request_id, None) is not None:
            self._skipped[Skip.ABORTED] += 1

    def finish(self, request_id: int, num_tokens: int) -> None:
        """As `Engine.finish`."""
        self._engine.finish(request_id, num_tokens)
        self._ended(request_id)

    def step(self) -> list[Event]:
        """A step of the engine; where it has nothing to do, one of a check."""
        if not self._engine.busy:
            self._check()
            return []
        events = self._engine.step()
        for event in events:
            if event.finish_reason is not None:
                self._ended(event.request_id)
        return events

    def close(self) -> None:
        """Ends every request, every check and the backend."""
        self._interrupt()
        self._waiting.clear()
        self._engine.close()

    def _ended(self, request_id: int) -> None:
        """Queues the text of a request that has just ended, if it is to be checked."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        if (reason := self._cannot_be_checked(request)) is not None:
            self._skipped[reason] += 1
        elif self._may_wait(request):
            self._waiting.append(_Case(request, tuple(request.output)))
        else:
            self._counts[DROPPED] += 1

    def _may_wait(self, request: Request) -> bool:
        """Whether a text and its pictures may be kept beside those that wait."""
        cases = self._waiting if self._case is None else (*self._waiting, self._case)
        pixels = sum(_picture_bytes(each) for each in (request, *(case.request for case in cases)))
        return len(cases) < MOST_WAITING and pixels <= MOST_PICTURE_BYTES

    def _cannot_be_checked(self, request: Request) -> Skip | None:
        """Why plain decoding need not give the text of a request that has ended."""
        sampling = request.sampling
        if request.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
            return Skip.FAILED
        if request.constraint is not None:  # a replay has no masks
            return Skip.GRAMMAR
        if not request.output:
            return Skip.EMPTY
        is_drawn = sampling.temperature > 0 and sampling.max_draft_tokens != 0
        return Skip.REJECTION if self._may_redraw and is_drawn else None

    def _check(self) -> None:
        """One step of the check that is under way, or of the next one."""
        if self._case is None:
            if not self._waiting:
                return
            self._case = self._waiting.popleft()
            self._case.num_starts += 1
            self._runner.start(self._case.request, len(self._case.served))
        self._num_steps += 1
        divergence = self._runner.step(self._case.served)
        if not self._runner.ended and divergence is None:
            return
        self._runner.stop()
        self._case = None
        self._counts[MATCH if divergence is None else MISMATCH] += 1
        if divergence is not None:
            self._report(divergence)

    def _interrupt(self) -> None:
        """Ends a check at once; it begins anew after the others, or was interrupted too often."""
        if self._case is None:
            return
        self._runner.stop()
        case, self._case = self._case, None
        if case.num_starts < MOST_STARTS:
            self._waiting.append(case)
        else:
            self._counts[DROPPED] += 1


def _picture_bytes(request: Request) -> int:
    return sum(picture.pixels.nbytes for picture in request.pictures)
