"""The engine: takes requests, keeps the device busy, gives tokens; one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.boundary.backend import Backend, StepFuture, StepResult
from shared.engine.allocator import Allocator
from shared.engine.controller import Controller, StaticController
from shared.engine.metrics import Metrics
from shared.engine.ngram.index import NgramIndex
from shared.engine.planner import DecodeRows, Planner, PrefillRows
from shared.engine.request import Event, FinishReason, Refusal, Request, check
from shared.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Flight:
    """A step on the device and the rows that it carries."""

    future: StepFuture
    rows: PrefillRows | DecodeRows


class Engine:
    """Serves requests on one backend.

    Args:
      backend: The device.
      controller: Chooses the draft shape of each decode step.
      overlap: Steps on the device while the host plans the next; at most the backend's.
      chunked_prefill_size: Most prompt tokens of a step.
      ngram: Drafts on the host from seen text; None where the device drafts, or nothing does.

    Raises:
      ValueError: The overlap is more than the backend was made for, or no prefill fits.
    """

    def __init__(
        self,
        backend: Backend,
        controller: Controller,
        *,
        overlap: int,
        chunked_prefill_size: int,
        ngram: NgramIndex | None = None,
    ) -> None:
        limits = backend.limits
        if not 0 <= overlap <= limits.overlap:
            raise ValueError(f"overlap must be in 0..{limits.overlap}, got {overlap}")
        self._backend, self._overlap, self.ngram = backend, overlap, ngram
        if ngram is not None:
            self._plain = StaticController(limits, nodes=1, depth=0, width=0)
        self.allocator = Allocator(limits)
        self.planner = Planner(limits, self.allocator)
        self.scheduler = Scheduler(
            limits,
            self.allocator,
            controller,
            overlap=overlap,
            chunked_prefill_size=chunked_prefill_size,
            drafts_on_host=ngram is not None,
        )
        self.metrics = Metrics(
            {
                "num_requests_running": lambda: len(self.scheduler.running),
                "num_requests_waiting": lambda: len(self.scheduler.waiting),
                "kv_cache_usage_perc": lambda: self.allocator.usage,
                "kv_pages_free": lambda: self.allocator.num_free_pages,
                "state_slots_free": lambda: self.allocator.num_free_slots,
                "num_preemptions_total": lambda: self.scheduler.num_preemptions,
            }
            | (_ngram_gauges(ngram) if ngram is not None else {})
        )
        self._requests: dict[int, Request] = {}
        self._flights: deque[Flight] = deque()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self._requests or self._flights)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
          Refusal: The request cannot be served; one sentence says why.
        """
        if request.request_id in self._requests:
            raise Refusal("request_id", f"request_id {request.request_id} is taken")
        check(request, self._backend.limits)
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """Ends a request that nobody waits for; no event follows, and an ended one stays ended."""
        if request_id in self._requests:
            self._end(self._requests[request_id], FinishReason.ABORT)

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request whose text was found to stop after `num_tokens` tokens of output.

        No event follows, and an ended request stays ended.
        """
        if request_id in self._requests:
            request = self._requests[request_id]
            late = request.cut(num_tokens)
            if self.ngram is not None:
                self.ngram.take_back(request, late)
            self._end(request, FinishReason.STOP)

    def step(self) -> list[Event]:
        """Submits the next step, then retires the oldest beyond the overlap."""
        for request in self.scheduler.admit():
            self.planner.bind(request)
        rows = self.scheduler.next_rows()
        if rows is not None:
            self._submit(rows if self.ngram is None else self._with_seen_text(rows, self.ngram))
        if self.ngram is not None:
            self.ngram.learn()
        if self._flights and (rows is None or len(self._flights) > self._overlap):
            return self._retire(self._flights.popleft())
        return []

    def close(self) -> None:
        """Ends every request and the backend."""
        for request_id in tuple(self._requests):
            self.abort(request_id)
        self._flights.clear()
        self._backend.close()

    def _with_seen_text(
        self, rows: PrefillRows | DecodeRows, ngram: NgramIndex
    ) -> PrefillRows | DecodeRows:
        """A prefill as it is, its tokens noted; decode rows with their drafts, or plain ones."""
        if isinstance(rows, PrefillRows):
            for chunk in rows.chunks:
                ngram.see_prompt(chunk.request, chunk.end)
            return rows
        drafts = ngram.draft(rows.requests)
        if drafts.num_nodes.max() > 1:
            return replace(rows, drafts=drafts)
        return replace(rows, shape=self._plain.shape_for(len(rows.requests)))

    def _submit(self, rows: PrefillRows | DecodeRows) -> None:
        plan = self.planner.plan(rows)
        self._flights.append(Flight(self._backend.submit(plan), rows))
        self.metrics.count_step(plan.program.work)
        for request, most in zip(rows.requests, rows.most_tokens, strict=True):
            request.launch(most)

    def _retire(self, flight: Flight) -> list[Event]:
        result, rows, events = flight.future.result(), flight.rows, []
        tokens, counts = result.tokens.tolist(), result.counts.tolist()
        for row, (request, most) in enumerate(zip(rows.requests, rows.most_tokens, strict=True)):
            request.land(most)
            if self.is_late(request):
                self.metrics.count("late_rows_total", 1)
            elif result.failed[row]:
                events.append(self._fail(request))
            elif counts[row]:
                events.append(
                    self._commit(request, tokens[row][: counts[row]], flight, result, row)
                )
        if isinstance(rows, PrefillRows):
            num_tokens = sum(chunk.end - chunk.first for chunk in rows.chunks)
            self.metrics.count("prompt_tokens_total", num_tokens)
        return events

    @staticmethod
    def is_late(request: Request) -> bool:
        """Whether a row was submitted before its request's end was known; nobody reads it."""
        return request.finish_reason is not None

    def _commit(
        self, request: Request, tokens: list[int], flight: Flight, result: StepResult, row: int
    ) -> Event:
        decoded = isinstance(flight.rows, DecodeRows)
        accepted = len(tokens) - 1 if decoded else None
        if isinstance(flight.rows, DecodeRows) and not flight.rows.shape.is_plain:
            self._count_drafts(int(result.num_nodes[row]) - 1, len(tokens) - 1)
        kept = request.commit(tokens)
        if self.ngram is not None:
            self.ngram.see(request, tokens[:kept])
        self.metrics.count("generation_tokens_total", kept)
        if request.finish_reason is not None:
            self._let_go(request, request.finish_reason)
        return Event(
            request_id=request.request_id,
            tokens=tokens[:kept],
            accepted=accepted,
            finish_reason=request.finish_reason,
            error=None,
            logprobs=_logprobs(request, result, row, kept),
        )

    def _count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        self.metrics.count("spec_decode_num_drafts_total", 1)
        self.metrics.count("spec_decode_num_draft_tokens_total", num_drafted)
        self.metrics.count("spec_decode_num_accepted_tokens_total", num_accepted)

    def _fail(self, request: Request) -> Event:
        self._end(request, FinishReason.ERROR)
        return Event(
            request_id=request.request_id,
            tokens=[],
            accepted=None,
            finish_reason=FinishReason.ERROR,
            error="the model's output for this request is not a finite number",
            logprobs=None,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.end(reason)
        self._let_go(request, reason)

    def _let_go(self, request: Request, reason: FinishReason) -> None:
        """Gives back what an ended request held: the one way out of the engine."""
        del self._requests[request.request_id]
        if self.ngram is not None:
            self.ngram.end(request)
        self.scheduler.release(request)
        self.metrics.count_end(reason)


def _ngram_gauges(ngram: NgramIndex) -> dict[str, Callable[[], float]]:
    return {
        "ngram_rows_total": lambda: ngram.num_rows,
        "ngram_rows_without_match_total": lambda: ngram.num_empty_rows,
        "ngram_seen_ngrams": lambda: ngram.num_ngrams,
        "ngram_corpora": lambda: len(ngram.corpora),
        "ngram_corpus_tokens": lambda: sum(ngram.corpora.values()),
    }


def _logprobs(
    request: Request, result: StepResult, row: int, count: int
) -> list[tuple[float, list[tuple[int, float]]]] | None:
    """Logprobs of the first `count` tokens of a row, if the request asked for them."""
    best, found = request.sampling.logprobs, result.logprobs
    if best is None:
        return None
    assert found is not None, "the planner picks a program with logprobs where a row asks for them"
    return [
        (
            float(found.chosen[row, index]),
            list(
                zip(
                    found.top_ids[row, index, :best].tolist(),
                    found.top_values[row, index, :best].tolist(),
                    strict=True,
                )
            ),
        )
        for index in range(count)
    ]
