"""Engine core: accepts requests, schedules steps with overlap, and returns tokens; one thread.

Policy, what may not be added here: choices of drafts (controllers), of rows (`scheduler`) and of
pages (`prefix_cache`), text and messages (the server), names of models, drafters and frameworks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan, StepResult
from shared.boundary.transfer_spec import TRANSFERS
from shared.engine.adapter_slots import AdapterSlots, HostAdapter
from shared.engine.allocator import Allocator
from shared.engine.cache_policy import CachePolicy
from shared.engine.checks import check
from shared.engine.controller import Controller, Gauges
from shared.engine.encoder_cache import EncoderCache
from shared.engine.image_inputs import MropePositions
from shared.engine.kv_transfer import KVTransfer
from shared.engine.metrics import REQUESTS, Metrics
from shared.engine.planner import Planner
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Event, FinishReason, InvalidRequestError, Request
from shared.engine.request_limits import request_limits
from shared.engine.rows import ScheduledRows
from shared.engine.scheduler import Scheduler
from shared.engine.step_trace import trace_of
from shared.spec.logprobs import PromptLogprobs


@dataclass(frozen=True)
class InFlightStep:
    """A step in flight, and its rows.

    Attributes:
      future: Result of the step.
      rows: Rows of the step.
      number: Number of the step since the engine's start.
      began: Time of submission, by the monotonic clock.
    """

    future: StepFuture
    rows: ScheduledRows
    number: int
    began: float


@dataclass(frozen=True)
class InFlightTransfer:
    """A step of an export, an import or the load of an adapter in flight.

    Attributes:
      future: Result of the step.
      end: Function to call with the result; None for a load.
    """

    future: StepFuture
    end: Callable[[StepResult], None] | None


class Engine:
    """Serves requests on one backend.

    Args:
      backend: The device.
      controller: Chooses how requests decode.
      overlap: Steps in flight while the host plans the next; at most the backend's.
      chunked_prefill_size: Maximum prompt tokens of a step.
      cache: Settings of the prefix cache.
      transfer_fingerprint: See `KVTransfer`; required if the backend has its programs.
      adapters: LoRA adapters at the start.

    Attributes:
      transfer: Exports and imports of cached prefixes; None if the backend has no programs for it.

    Raises:
      ValueError: The overlap exceeds the backend's, or no prefill program fits; or see
        `CachePolicy.check`.
    """

    def __init__(
        self,
        backend: Backend,
        controller: Controller,
        *,
        overlap: int,
        chunked_prefill_size: int,
        cache: CachePolicy,
        transfer_fingerprint: str = "",
        adapters: Iterable[HostAdapter] = (),
    ) -> None:
        capacity = backend.capacity
        if not 0 <= overlap <= capacity.overlap:
            raise ValueError(f"overlap must be in 0..{capacity.overlap}, got {overlap}")
        self.backend, self.controller, self._overlap = backend, controller, overlap
        self.adapters = AdapterSlots(capacity, adapters)
        self._request_limits = request_limits(capacity, capacity.context_length)
        self.allocator = Allocator(capacity)
        self.planner = Planner(capacity, self.allocator)
        self.cache = PrefixCache(capacity, self.allocator, cache, overlap)
        self.images = (
            None if capacity.images is None else EncoderCache(capacity.images, capacity.programs)
        )
        self.scheduler = Scheduler(
            capacity,
            self.allocator,
            self.cache,
            controller,
            self.images,
            self.adapters,
            overlap=overlap,
            chunked_prefill_size=chunked_prefill_size,
        )
        self.transfer = None
        if any(program.work in TRANSFERS for program in capacity.programs):
            reserved = self.scheduler.num_missing_pages
            self.transfer = KVTransfer(capacity, self.cache, transfer_fingerprint, reserved)
        self.metrics = Metrics(
            {
                "num_requests_running": lambda: len(self.scheduler.running),
                "num_requests_waiting": lambda: len(self.scheduler.waiting),
                "kv_cache_usage_perc": lambda: self.cache.usage,
                "kv_pages_free": lambda: self.cache.num_available,
                "prefix_cache_pages": lambda: self.cache.num_pages,
                "prefix_cache_state_snapshots": lambda: self.cache.num_states,
                "prefix_cache_queries_total": lambda: self.cache.num_queried,
                "prefix_cache_hits_total": lambda: self.cache.num_hit,
                "request_slots_free": lambda: self.allocator.num_free_slots,
                "num_preemptions_total": lambda: self.scheduler.num_preemptions,
                **controller.gauges,
                **_simulated_acceptance(capacity),
                **_image_gauges(self.images),
                **_transfer_gauges(self.transfer),
                **_adapter_gauges(self.adapters),
            },
            capacity.max_depth,
        )
        self._requests: dict[int, Request] = {}
        self.flights: deque[InFlightStep | InFlightTransfer] = deque()
        self._num_steps, self._transferred_last = 0, False

    @property
    def busy(self) -> bool:
        """True if `step` has work to do."""
        is_transferring = self.transfer is not None and self.transfer.busy
        return bool(self._requests or self.flights) or is_transferring

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: The request is invalid or unsupported.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError("request_id", f"request_id {request.request_id} is taken")
        limits = self._request_limits
        check(request.prompt, request.sampling, limits, images=request.images)
        if request.sampling.lora:
            request.adapter = self.adapters.find(request.sampling.lora)
        if request.images:
            assert limits.image_token is not None  # checked above
            request.mrope = MropePositions.of(request.prompt, limits.image_token, request.images)
        self.scheduler.add(request)
        self.adapters.join(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """Ends a request without an event, also one that was not added.

        Does nothing if it has ended.
        """
        self.cache.transfers.leave(request_id)
        if request_id in self._requests:
            self._end(self._requests[request_id], FinishReason.ABORT)

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request whose output was found to stop after `num_tokens` tokens.

        No event follows. For a request that ended before, its stored tokens are truncated too.
        """
        if request := self._requests.get(request_id):
            self._end(request, FinishReason.STOP)
            request.truncate(num_tokens)
        self.controller.on_truncate(request_id, num_tokens)

    def step(self) -> list[Event]:
        """Submits the next step, then processes the result of the oldest step beyond the overlap.

        A step that waits for those tokens is submitted before the events are returned.
        """
        is_submitted = self._submit_next()
        if not self.flights or (is_submitted and len(self.flights) <= self._overlap):
            return []
        events = self._retire(self.flights.popleft())
        if not is_submitted and self._overlap:
            self._submit_next()
        return events

    def close(self) -> None:
        """Ends all requests and closes the backend."""
        for request_id in tuple(self._requests):
            self.abort(request_id)
        if self.transfer is not None:
            self.transfer.cancel_all()
        self.flights.clear()
        self.backend.close()

    def _submit_next(self) -> bool:
        """Submits the next step; returns False if there is none.

        Steps of a transfer or load and other steps take turns, except exports while none decodes: a
        part is sent while the next chunk of its prompt runs.
        """
        for request in self.scheduler.admit():
            self.cache.transfers.leave(request.request_id)
            self.planner.write_request_row(request)
        is_exporting = self.transfer is not None and self.transfer.is_exporting
        is_first = not self._transferred_last or (is_exporting and not self.scheduler.is_decoding)
        if is_first and self._submit_transfer():
            return True
        rows = self.scheduler.next_rows()
        if rows is not None:
            self._submit(rows)
            self._transferred_last = False
            return True
        # Rows that wait for a result come first once it is there.
        is_idle = not (self.scheduler.running and self.flights)
        return is_idle and self._submit_transfer()

    def _submit_transfer(self) -> bool:
        """Submits the next load step, or the next step of an export or import; returns False if
        there is none.
        """
        if (load := self.adapters.next_step()) is not None:
            self.flights.append(InFlightTransfer(self._launch(load), None))
        elif self.transfer is not None and (step := self.transfer.next_step()) is not None:
            self.flights.append(InFlightTransfer(self._launch(step.plan), step.end))
        else:
            return False
        self._transferred_last = True
        return True

    def _launch(self, plan: StepPlan) -> StepFuture:
        program = plan.program
        self.metrics.count_step(program.work, self.backend.launch(program))
        return self.backend.submit(plan)

    def _submit(self, rows: ScheduledRows) -> None:
        plan = self.planner.plan(rows)
        self.cache.assign_snapshots(rows, plan)
        began = time.monotonic()
        self._num_steps += 1
        self.flights.append(InFlightStep(self._launch(plan), rows, self._num_steps, began))
        for request, most in zip(rows.requests, rows.max_tokens, strict=True):
            request.step_submitted(most)
        self.planner.prepare_next(plan.program)
        self.controller.on_submit(rows)

    def _retire(self, flight: InFlightStep | InFlightTransfer) -> list[Event]:
        result = flight.future.result()
        if isinstance(flight, InFlightTransfer):
            if flight.end is not None:
                flight.end(result)
            return []
        rows, events = flight.rows, []
        self.controller.on_result(rows, result)
        counts, failed, texts = (x.tolist() for x in (result.counts, result.failed, result.tokens))
        saved = result.snapshot_saved.tolist()
        leaves_hole = self.cache.skips_draft_kv(rows)
        committed: list[int] = []
        for row, (request, most) in enumerate(zip(rows.requests, rows.max_tokens, strict=True)):
            request.step_finished(most)
            if self.is_stale(request):
                self.metrics.count("overlap_stale_rows_total", 1)
                continue
            if failed[row]:
                events.append(self._fail(request))
                continue
            if (fault := request.fault) is not None:
                events.append(self._refuse(request, fault))
                continue
            if rows.chunks and not _take_scores(request, rows, row, result):
                events.append(self._fail(request))
                continue
            if rows.chunks:
                self.cache.on_prefill(request, rows.chunks[row], bool(saved[row]))
                self.allocator.free_outside_window(request.slot, rows.chunks[row].end)
            if counts[row]:
                tokens = texts[row][: counts[row]]
                took_state = bool(saved[row]) and not rows.chunks
                events.append(self._commit(flight, result, row, tokens, leaves_hole, took_state))
                committed.append(row)
        self.metrics.count("generation_tokens_total", sum(len(event.tokens) for event in events))
        if rows.shape is not None and not rows.shape.is_plain:
            nodes = result.num_nodes.tolist()
            drafted, accepted = ([of[row] - 1 for row in committed] for of in (nodes, counts))
            self.metrics.count_drafts(drafted, accepted)
            adapters = [rows.requests[row].adapter for row in committed]
            self.metrics.count_adapter_drafts(adapters, drafted, accepted)
        return events

    @staticmethod
    def is_stale(request: Request) -> bool:
        """Returns True for a stale row: its request ended after the row was submitted."""
        return request.finish_reason is not None

    def _commit(
        self,
        flight: InFlightStep,
        result: StepResult,
        row: int,
        tokens: list[int],
        leaves_hole: bool,
        saved: bool,
    ) -> Event:
        rows = flight.rows
        request, step = rows.requests[row], None
        if request.sampling.traces:
            step = trace_of(rows, result, row, tokens, flight.number, flight.began)
        kept = request.append_tokens(tokens)
        if kept == len(request.output):  # its first tokens
            self.metrics.count("prompt_tokens_total", len(request.prompt))
        if leaves_hole or saved:
            self.cache.on_decode(request, kept, leaves_hole, saved)
        self.controller.on_tokens(request, tokens[:kept])
        if request.finish_reason is not None:
            self._let_go(request, request.finish_reason)
        else:
            self.allocator.free_outside_window(request.slot, request.length - 1)
        return Event(
            request_id=request.request_id,
            tokens=tokens[:kept],
            accepted=rows.accepted(len(tokens)),
            finish_reason=request.finish_reason,
            error=request.fault,
            logprobs=_logprobs(request, result, row, kept),
            cached_tokens=request.cached_tokens or 0,
            step=step,
            scores=request.take_scores(),
        )

    def _fail(self, request: Request) -> Event:
        self._end(request, FinishReason.ERROR)
        return _last_event(request, "the logits of this request are not finite")

    def _refuse(self, request: Request, fault: str) -> Event:
        self._end(request, FinishReason.REFUSED)
        return _last_event(request, fault)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish(reason)
        self._let_go(request, reason)

    def _let_go(self, request: Request, reason: FinishReason) -> None:
        """Releases everything that an ended request holds; all requests leave the engine here."""
        del self._requests[request.request_id]
        self.controller.on_finish(request)
        self.scheduler.release(request)
        self.adapters.leave(request)
        self.cache.transfers.leave(request.request_id)
        self.metrics.count_end(reason)
        if request.adapter is not None:
            self.metrics.count_adapter(REQUESTS, request.adapter, 1)


def _last_event(request: Request, error: str) -> Event:
    """Returns the event of a request that ends without more tokens."""
    return Event(
        request_id=request.request_id,
        tokens=[],
        accepted=None,
        finish_reason=request.finish_reason,
        error=error,
        logprobs=None,
    )


def _take_scores(request: Request, rows: ScheduledRows, row: int, result: StepResult) -> bool:
    """Stores the prompt logprobs of a chunk if requested; returns False if they are not finite."""
    if not request.wants_scores:
        return True
    assert result.scores is not None, (
        "the planner selects a program with prompt logprobs if a row requests them"
    )
    chunk = rows.chunks[row]
    first = sum(other.end - other.first for other in rows.chunks[:row])
    span = slice(first, first + chunk.end - chunk.first)
    return request.score(chunk.first, PromptLogprobs(*(part[span] for part in result.scores)))


def _logprobs(
    request: Request, result: StepResult, row: int, count: int
) -> list[tuple[float, list[tuple[int, float]]]] | None:
    """Returns the logprobs of the first `count` tokens of a row if requested."""
    best, logprobs = request.sampling.logprobs, result.logprobs
    if best is None:
        return None
    assert logprobs is not None, (
        "the planner selects a program with logprobs if a row requests them"
    )
    return [
        (
            float(logprobs.chosen[row, index]),
            list(
                zip(
                    logprobs.top_ids[row, index, :best].tolist(),
                    logprobs.top_values[row, index, :best].tolist(),
                    strict=True,
                )
            ),
        )
        for index in range(count)
    ]


def _image_gauges(images: EncoderCache | None) -> Gauges:
    if images is None:
        return {}
    return {
        "mm_encoder_images_total": lambda: images.num_encoded,
        "mm_encoder_cache_tokens": lambda: images.num_held,
    }


def _transfer_gauges(transfer: KVTransfer | None) -> Gauges:
    if transfer is None:
        return {}
    return {
        "kv_transfer_exported_tokens_total": lambda: transfer.num_exported,
        "kv_transfer_imported_tokens_total": lambda: transfer.num_imported,
    }


def _adapter_gauges(adapters: AdapterSlots) -> Gauges:
    if not adapters.has_slots:
        return {}
    return {
        "lora_adapters": lambda: len(adapters.folders),
        "lora_loads_total": lambda: adapters.num_loads,
    }


def _simulated_acceptance(capacity: BackendLimits) -> Gauges:
    """Returns the gauge of simulated acceptance, if it is enabled."""
    length = capacity.simulated_accept_length
    return {} if length is None else {"spec_decode_simulated_accept_length": lambda: length}
