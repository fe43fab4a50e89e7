"""Scheduler: admits requests and selects the rows of the next step (continuous batching)."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence

from shared.boundary.backend import BackendLimits
from shared.boundary.program import StepKind
from shared.boundary.window_pools import max_slot_pages
from shared.engine.adapter_slots import AdapterSlots
from shared.engine.allocator import Allocator
from shared.engine.controller import Controller
from shared.engine.encoder_cache import EncoderCache
from shared.engine.page_pool import PagePool
from shared.engine.prefix_cache import PrefixCache, PrefixMatch
from shared.engine.request import InvalidRequestError, Request
from shared.engine.rows import Chunk, ScheduledRows, chunk_end
from shared.engine.waiting_queue import WaitingQueue
from shared.spec.gated_delta import CHUNK


class Scheduler:
    """Continuous batching by priority and in the order of arrival (`WaitingQueue`).

    If pages run out, cached pages are evicted first. Then the youngest running request of the
    lowest priority is preempted, so that the first one always advances and none starves. It finds
    its pages in the cache again if they were not evicted meanwhile.

    Args:
      capacity, allocator, controller: Limits of the backend, its pages and slots, and the chooser
        of decode steps.
      cache: Prefix cache.
      images: Encoder cache; None for a text-only model.
      adapters: Adapter slots.
      overlap: Steps in flight while the next one is planned.
      chunked_prefill_size: Maximum prompt tokens of a step.

    Raises:
      ValueError: No prefill program has at most `chunked_prefill_size` and at least one chunk of
        tokens; or a window pool is too small for one request.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        allocator: Allocator,
        cache: PrefixCache,
        controller: Controller,
        images: EncoderCache | None,
        adapters: AdapterSlots,
        *,
        overlap: int,
        chunked_prefill_size: int,
    ) -> None:
        self._capacity, self.allocator, self._controller = capacity, allocator, controller
        self._cache, self._images, self._adapters = cache, images, adapters
        counts = (p.tokens for p in capacity.programs if p.work is StepKind.COUNT)
        self._max_counted = max(counts, default=0)
        self._num_arrived = 0
        self._growth_in_flight = overlap * (capacity.max_depth + 1)
        self._max_tokens, self._max_prefill_rows = _prefill_sizes(capacity, chunked_prefill_size)
        _check_window_pools(capacity, self._max_tokens)
        self._max_running = controller.max_rows
        self._leaving: Request | None = None
        self._prefilled_last = False
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: The request could not finish even with all pages.
        """
        pages = self._capacity.num_pages_for(self._max_positions(request))
        if pages > self._capacity.num_pages - 1:
            raise InvalidRequestError(
                "max_tokens",
                f"prompt and max_tokens may need {pages} pages of {self._capacity.page_size} "
                f"tokens, and the server has {self._capacity.num_pages - 1}",
            )
        self._num_arrived += 1
        request.arrival = self._num_arrived
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Assigns slots to waiting requests while there is room, and returns these requests."""
        admitted = []
        while self._may_admit():
            request, overtaken = self._next_waiting()
            if request is None:
                break
            prefix = self._cache.find(request)
            if not self._has_room_for(request, prefix):
                if not self.running and self._release_import(request):
                    continue
                break
            if self._cache.will_be_cached_soon(request, prefix):
                break
            self.waiting.take(request)
            self._place(request, prefix)
            if overtaken is not None:
                self._adapters.overtake(overtaken)
            admitted.append(request)
        return admitted

    def _next_waiting(self) -> tuple[Request | None, Request | None]:
        """Returns the next request with room for its adapter, and the first one without before
        it.
        """
        overtaken = None
        for request in self.waiting.in_turn():
            if self._adapters.has_room_for(request):
                return request, overtaken
            overtaken = overtaken or request
        return None, overtaken

    def _place(self, request: Request, prefix: PrefixMatch) -> None:
        slot = self.allocator.take_slot(prefix.pages, prefix.window_pages)
        self._cache.acquire(request, prefix)
        self._adapters.acquire(request)
        request.assign_slot(slot, prefix.length, prefix.draft_from, prefix.snapshot)
        bisect.insort(self.running, request, key=_turn)

    def next_rows(self) -> ScheduledRows | None:
        """Returns the rows of the next step; prefill and decode alternate if both are waiting."""
        if self._prefilled_last and self._controller.needs_last_result:
            return None  # another prefill would delay decoding by more than one chunk
        turns = [self._prompt_rows, self._decode_rows]
        for rows_of in reversed(turns) if self._prefilled_last else turns:
            if (rows := rows_of()) is not None:
                self._prefilled_last = rows.work is not StepKind.DECODE
                return rows
        return None

    def release(self, request: Request) -> None:
        """Removes a request that ended; steps in flight may still contain rows of it."""
        if request.slot:
            self._give_back(request)
        else:
            self.waiting.remove(request)

    def _max_positions(self, request: Request) -> int:
        """Returns the positions that its last step may need, with all previous steps in flight."""
        return request.max_length - 1 + self._growth_in_flight + self._capacity.scratch

    def _next_positions(self, request: Request) -> int:
        """Returns the positions that its next step may need once those in flight have ended."""
        widest = self._capacity.max_depth + 1 + self._growth_in_flight + self._capacity.scratch
        return min(request.length + widest, self._max_positions(request))

    def _may_admit(self) -> bool:
        if len(self.running) == self._max_running or not self.allocator.num_free_slots:
            return False
        return self._leaving is None

    def _has_room_for(self, request: Request, prefix: PrefixMatch) -> bool:
        """Returns True if it can run and each running request still has pages for its widest
        step.
        """
        pools = zip(self.allocator.pools, self._cache.available_with(prefix), strict=True)
        return all(
            self._num_needed(pool, request) + self._num_missing(pool) <= available
            for pool, available in pools
        )

    def _num_needed(self, pool: PagePool, request: Request) -> int:
        return pool.num_needed(request.length - 1, self._next_positions(request))

    def _num_missing(self, pool: PagePool) -> int:
        return sum(
            max(0, self._num_needed(pool, each) - pool.num_held(each.slot)) for each in self.running
        )

    def num_missing_pages(self) -> list[int]:
        """Returns the pages of each pool that running requests lack for their widest steps, and
        that the first waiting request lacks to run.
        """
        missing = [self._num_missing(pool) for pool in self.allocator.pools]
        if (first := self.waiting.head()) is not None:
            prefix = self._cache.find(first)
            pools = zip(self.allocator.pools, (prefix.pages, *prefix.window_pages), strict=True)
            needed = [self._num_needed(pool, first) - len(pages) for pool, pages in pools]
            missing = list(map(operator.add, missing, needed))
        return missing

    def _release_import(self, request: Request) -> bool:
        """Releases the youngest held prefix of other requests; returns False if there is none."""
        return self._cache.transfers.release_youngest(besides=request.request_id)

    def _prompt_rows(self) -> ScheduledRows | None:
        """Returns count steps for cached tokens first, then prefills."""
        for request in self.running:
            first, end = request.num_counted, request.count_length
            if request.slot and first < end and request is not self._leaving:
                request.num_counted = min(end, first + self._max_counted)
                return ScheduledRows.count(Chunk(request, first, request.num_counted))
        return self._prefill_rows()

    def _prefill_rows(self) -> ScheduledRows | None:
        budget, chunks = self._max_tokens, []
        for request in tuple(self.running):
            if not request.slot or request.decodes or request is self._leaving:
                continue
            if not self._adapters.is_ready(request):
                continue
            end = self._cache.chunk_end(request, chunk_end(request, budget))
            first = request.prefilled
            if first == end or not self._make_room(request, end):
                continue
            chunk = self._chunk(request, end, is_first=not chunks)
            if isinstance(chunk, ScheduledRows):
                return chunk
            if chunk is None:
                continue  # its image is encoded when its request is first in a step
            chunks.append(chunk)
            request.prefill(chunk.end)
            budget -= chunk.end - first
            if len(chunks) == self._max_prefill_rows:
                break
        return ScheduledRows.prefill(tuple(chunks)) if chunks else None

    def _chunk(self, request: Request, end: int, is_first: bool) -> Chunk | ScheduledRows | None:
        """Returns a chunk that ends at `end`, or earlier if it has many images; or an encode step
        for it.

        None if it needs an encode step and is not the first of the step.
        """
        if self._images is None or not request.images:
            return Chunk(request, request.prefilled, end)
        return self._images.chunk_of(request, end, may_encode=is_first)

    @property
    def is_decoding(self) -> bool:
        """True if a running request may need a decode step."""
        return any(request.decodes and request.wants_step for request in self.running)

    def _decode_rows(self) -> ScheduledRows | None:
        ready = [r for r in self.running if r.decodes and r.wants_step and r is not self._leaving]
        return self._controller.select_rows(ready, self._reserve) if ready else None

    def _reserve(self, requests: Sequence[Request], scratch: int) -> list[Request]:
        """Returns the requests that have pages for a step that writes `scratch` positions."""
        # A request that `_make_room` preempts comes later in the order and has no slot by then. The
        # ceiling includes the steps in flight, so the pages suffice however they end.
        page, held = self._capacity.page_size, self.allocator.pages.num_pages
        pages_of = held[[request.slot for request in requests]].tolist()
        return [
            request
            for request, pages in zip(requests, pages_of, strict=True)
            if request.slot
            and request is not self._leaving
            and (
                (needed := request.max_reserved_length + scratch) <= pages * page
                or self._make_room(request, needed)
            )
        ]

    def _make_room(self, request: Request, positions: int) -> bool:
        """Reserves pages, preempting younger requests if needed.

        The youngest is preempted only when none of its steps is in flight, so that no token is
        lost; until then it gets no further step.
        """
        while not self._cache.reserve(request.slot, positions):
            if self._release_import(request):
                continue
            youngest = self.running[-1]
            if youngest is request:
                return False
            if not youngest.has_no_step_in_flight:
                self._leaving = youngest
                return False
            self.preempt(youngest)
        return True

    def preempt(self, request: Request) -> None:
        """Preempts a running request without steps in flight: it returns to the waiting queue."""
        self._give_back(request)
        self.waiting.return_to_front(request)
        self.num_preemptions += 1

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self._cache.release(request)
        self._adapters.release(request)
        self.allocator.free(request.slot)
        request.preempt()
        self._leaving = None


def _turn(request: Request) -> tuple[int, int]:
    """Returns the order of running requests: first to be scheduled, last to be preempted."""
    return request.priority, request.arrival


def _prefill_sizes(capacity: BackendLimits, chunked_prefill_size: int) -> tuple[int, int]:
    """Returns tokens and rows of the largest prefill program within the limit."""
    prefills = [p for p in capacity.programs if p.work is StepKind.PREFILL]
    most = max((p.tokens for p in prefills if p.tokens <= chunked_prefill_size), default=0)
    if most < CHUNK:
        raise ValueError(
            f"chunked_prefill_size must allow a prefill of at least {CHUNK} tokens, "
            f"got {chunked_prefill_size} with prefills of {capacity.token_sizes}"
        )
    return most, max(p.batch for p in prefills if p.tokens == most)


def _check_window_pools(capacity: BackendLimits, chunk: int) -> None:
    """Checks that each window pool holds a request alone, for its widest step."""
    page_size, widest = capacity.page_size, max(chunk, 1 + capacity.scratch)
    for pool in capacity.window_pools:
        needed = max_slot_pages(pool.window, page_size, widest)
        needed = min(needed, capacity.num_pages_for(capacity.max_positions))
        if pool.num_pages <= needed:
            raise ValueError(
                f"the pool of sliding window {pool.window} requires {needed} pages beside page 0 "
                f"for a prefill of {chunk} tokens, got {pool.num_pages - 1}"
            )
