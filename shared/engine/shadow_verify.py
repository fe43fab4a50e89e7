"""Shadow verification (lossless check): reruns some finished requests with plain decoding and
compares.

A check reruns the same request without draft tokens, alone and with its own KV. It runs one step at
a time while the engine is idle. It is cancelled as soon as a request arrives: its slot and pages
are released before the next step, and it restarts from the beginning when the engine is idle again.
It adds nothing to the prefix cache. If no page is free, it evicts the least recently used ones;
that is its only effect on other requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from shared.boundary.backend import Backend
from shared.engine.adapter_slots import AdapterSlots
from shared.engine.engine import Engine
from shared.engine.kv_transfer import KVTransfer
from shared.engine.metrics import Metrics
from shared.engine.reference_run import Divergence, ReferenceRunner
from shared.engine.request import Event, FinishReason, Request

MOST_WAITING = 64
"""Maximum outputs that wait to be checked; further ones are dropped."""

MOST_IMAGE_BYTES = 1 << 28
"""Maximum bytes of pixels held for waiting checks; further ones are dropped."""

MOST_STARTS = 4
"""Maximum starts of a check that is interrupted by requests; then it is dropped."""

MATCH, MISMATCH, DROPPED = RESULTS = ("match", "mismatch", "dropped")
"""Values of the label `result` of `shadow_verify_requests_total`, next to "skipped"."""


class SkipReason(Enum):
    """Reason why a selected output is not compared with plain decoding."""

    ABORTED = "aborted"
    FAILED = "failed"
    REJECTION = "rejection"
    GRAMMAR = "grammar"
    EMPTY = "empty"


def is_chosen(request_id: int, rate: float) -> bool:
    """Returns True if a request is in the checked fraction, which only its number decides."""
    digest = blake2b(str(request_id).encode(), key=b"shadow check", digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


@dataclass
class PendingCheck:
    """An output that waits to be checked, and the number of starts."""

    request: Request
    served: tuple[int, ...]
    num_starts: int = 0


class ShadowVerifier:
    """Engine wrapper that checks a fraction of its outputs while it is idle.

    Args:
      engine: The engine.
      backend: Its device.
      rate: Fraction of the requests that are checked.
      report: Called with each difference.

    Raises:
      ValueError: See `ReferenceRunner`.
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
        self._runner = ReferenceRunner(
            backend, engine.planner, engine.allocator, engine.cache, engine.images, engine.adapters
        )
        self._may_redraw = backend.capacity.accept_rule != "exact"
        self._open: dict[int, Request] = {}
        self._waiting: deque[PendingCheck] = deque()
        self._case: PendingCheck | None = None
        self._counts, self._num_steps = Counter[str](), 0
        self._skipped = Counter[SkipReason]()
        engine.metrics.show(self._gauges())

    def _gauges(self) -> dict[str, Callable[[], float]]:
        total = "shadow_verify_requests_total"
        shown: dict[str, Callable[[], float]] = {
            f'{total}{{result="{result}"}}': lambda result=result: self._counts[result]
            for result in RESULTS
        }
        shown[f'{total}{{result="skipped"}}'] = self._skipped.total
        for reason in SkipReason:
            name = f'shadow_verify_skipped_total{{reason="{reason.value}"}}'
            shown[name] = lambda reason=reason: self._skipped[reason]
        shown["shadow_verify_steps_total"] = lambda: self._num_steps
        return {**shown, "shadow_verify_requests_waiting": lambda: self.num_waiting}

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for a check, including the one in progress."""
        return len(self._waiting) + (self._case is not None)

    @property
    def metrics(self) -> Metrics:
        """Metrics of the engine, with those of the checks."""
        return self._engine.metrics

    @property
    def adapters(self) -> AdapterSlots:
        """LoRA adapters of the engine."""
        return self._engine.adapters

    @property
    def transfer(self) -> KVTransfer | None:
        """Exports and imports of the engine; see `Engine`."""
        return self._engine.transfer

    @property
    def busy(self) -> bool:
        """True if `step` has work to do."""
        return self._engine.busy or self.num_waiting > 0

    def add(self, request: Request) -> None:
        """Same as `Engine.add`; interrupts a check in progress."""
        self._engine.add(request)
        self._interrupt()
        if is_chosen(request.request_id, self._rate):
            self._open[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """Same as `Engine.abort`."""
        self._engine.abort(request_id)
        if self._open.pop(request_id, None) is not None:
            self._skipped[SkipReason.ABORTED] += 1

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Same as `Engine.finish`."""
        self._engine.finish(request_id, num_tokens)
        self._ended(request_id)

    def step(self) -> list[Event]:
        """Runs a step of the engine, or of a check if the engine is idle."""
        if not self._engine.busy:
            self._check()
            return []
        events = self._engine.step()
        for event in events:
            if event.finish_reason is not None:
                self._ended(event.request_id)
        return events

    def close(self) -> None:
        """Ends all requests and checks, and closes the backend."""
        self._interrupt()
        self._waiting.clear()
        self._engine.close()

    def _ended(self, request_id: int) -> None:
        """Queues the output of a finished request if it is selected."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        if (reason := self._cannot_be_checked(request)) is not None:
            self._skipped[reason] += 1
        elif self._may_wait(request):
            self._waiting.append(PendingCheck(request, tuple(request.output)))
        else:
            self._counts[DROPPED] += 1

    def _may_wait(self, request: Request) -> bool:
        """Returns True if an output and its images may be held in addition to those that wait."""
        cases = self._waiting if self._case is None else (*self._waiting, self._case)
        pixels = sum(_image_bytes(each) for each in (request, *(case.request for case in cases)))
        return len(cases) < MOST_WAITING and pixels <= MOST_IMAGE_BYTES

    def _cannot_be_checked(self, request: Request) -> SkipReason | None:
        """Returns the reason why plain decoding need not give the same output; None if it must."""
        sampling = request.sampling
        if request.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
            return SkipReason.FAILED
        if request.constraint is not None:  # a reference run has no masks
            return SkipReason.GRAMMAR
        if not request.output:
            return SkipReason.EMPTY
        is_drawn = sampling.temperature > 0 and sampling.max_draft_tokens != 0
        return SkipReason.REJECTION if self._may_redraw and is_drawn else None

    def _check(self) -> None:
        """Runs one step of the current check, or starts the next one."""
        if self._case is None:
            if not self._waiting:
                return
            case = self._waiting.popleft()
            if not self._runner.can_start(case.request):
                self._counts[DROPPED] += 1
                return
            self._case = case
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
        """Cancels a check at once; it restarts after the others, unless it was interrupted too
        often.
        """
        if self._case is None:
            return
        self._runner.stop()
        case, self._case = self._case, None
        if case.num_starts < MOST_STARTS:
            self._waiting.append(case)
        else:
            self._counts[DROPPED] += 1


def _image_bytes(request: Request) -> int:
    return sum(image.pixels.nbytes for image in request.images)
