"""Requests that wait for the KV cache of their prompt from another server, in the engine's thread.

A request waits like one with a grammar to compile, while other requests decode. However the
transfer ends, the request is then added to the engine, which prefills what its cache lacks. So a
lost prefill server costs time only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shared.boundary.kv_transfer import TransferRecord, TransferRejected
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import CANCELLED, TIMEOUT, TransferError
from shared.cluster.transfer.record_client import FetchedRecord
from shared.engine.kv_transfer import KVTransfer
from shared.engine.request import Request
from shared.engine.transfer_jobs import ImportJob
from shared.process.disaggregation.prefill_client import NOT_CACHED, Part
from shared.process.disaggregation.prompt_key import PromptKey
from shared.process.logs import log

MAX_FETCHES = 16
"""Maximum prompts that are prefilled remotely at the same time; others wait for a thread."""

GRACE_S = 0.5
"""Seconds after the timeout in which a thread may report it itself."""

LACK_OF_ROOM = ("no_pages", "no_snapshots")

Fetch = Callable[[PromptKey, Deadline], Iterable[Part]]
Failure = TransferError | TransferRejected


@dataclass(eq=False)
class PendingPrefill:
    """A prompt that another server prefills.

    Attributes:
      prefix: The prompt.
      deadline: Deadline of its transfer.
      expires: Time at which it is prefilled locally, by the monotonic clock.
      requests: Requests with this prompt.
      job: Import of the parts; None before the first one.
      result: Error of the thread, or None; set at its end.
    """

    prefix: PromptKey
    deadline: Deadline
    expires: float
    requests: list[Request] = field(default_factory=list)
    job: ImportJob | None = None
    result: Future[Failure | None] = field(default_factory=Future)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arrived: deque[Part] = field(default_factory=deque)
    _held: list[FetchedRecord] = field(default_factory=list)
    _is_over: bool = False

    def deliver(self, part: Part) -> None:
        """Adds a part, on the thread that has fetched it."""
        with self._lock:
            if self._is_over:
                part[1].release()
            else:
                self._arrived.append(part)
                self._held.append(part[1])

    @property
    def next_record(self) -> TransferRecord | None:
        """Record of the next part; None until it has arrived."""
        return self._arrived[0][0] if self._arrived else None

    def pop(self) -> None:
        """Removes the next part, which the import has."""
        self._arrived.popleft()

    def release(self) -> list[FetchedRecord]:
        """Releases all parts, also those that are still to arrive; returns those that have."""
        with self._lock:
            self._is_over = True
            self._arrived.clear()
            held, self._held = self._held, []
        for each in held:
            each.release()
        return held


class RemotePrefill:
    """Queue of prompts that other servers prefill.

    Args:
      transfer: Imports of the engine.
      fetch: Fetches a record, on a thread (`PrefillClient.fetch`).
      min_tokens: Prompt tokens outside the prefix cache from which a prompt is prefilled remotely.
      timeout_s: Seconds after which a prompt is prefilled locally.
      counters: Counters of failures.
      notify: Wakes the engine's thread.
    """

    def __init__(
        self,
        transfer: KVTransfer,
        fetch: Fetch,
        *,
        min_tokens: int,
        timeout_s: float,
        counters: TransferCounters,
        notify: Callable[[], None],
    ) -> None:
        self._transfer, self._fetch, self._notify = transfer, fetch, notify
        self._min_tokens, self._timeout_s, self._counters = min_tokens, timeout_s, counters
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="remote prefill")
        self._unmapping = ThreadPoolExecutor(1, thread_name_prefix="kv records")
        self._pending: dict[bytes, PendingPrefill] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a record."""
        return sum(len(each.requests) for each in self._pending.values())

    def take(self, request: Request) -> bool:
        """Starts or joins a transfer; returns False if the request needs none."""
        if len(request.prompt) < self._min_tokens:
            return False
        prefix = PromptKey.of(request)
        pending = self._pending.get(prefix.key)
        if pending is None:
            cached = self._transfer.match(prefix.tokens, prefix.namespace, prefix.images)
            if len(prefix.tokens) - cached < self._min_tokens:
                return False
            pending = self._pending[prefix.key] = self._start(prefix)
        pending.requests.append(request)
        return True

    def drop(self, request_id: int) -> bool:
        """Removes a waiting request, and cancels a transfer that no other request waits for.

        Returns:
          False if it was not waiting.
        """
        for pending in self._pending.values():
            kept = [each for each in pending.requests if each.request_id != request_id]
            if len(kept) < len(pending.requests):
                pending.requests = kept
                if not kept:
                    self._cancel(pending)
                return True
        return False

    def ready(self) -> Iterator[Request]:
        """Yields requests with a transfer that has ended, in the order of arrival."""
        may_begin = True  # a record that waits for room is followed by no other one
        for pending in tuple(self._pending.values()):
            try:
                is_over = self._advance(pending, may_begin)
                may_begin &= pending.job is not None or pending.next_record is None
            except (TransferError, TransferRejected) as error:
                self._fall_back(pending, error.reason, str(error))
                if pending.job is not None:
                    pending.job.cancel()
                    pending.job = None
                _without_frames(error)
                is_over = True
            if is_over:
                if pending.job is not None:
                    ids = [each.request_id for each in pending.requests]
                    self._transfer.assign(pending.job, ids)
                self._end(pending)
                yield from pending.requests

    def close(self) -> None:
        """Cancels all transfers."""
        for pending in tuple(self._pending.values()):
            self._cancel(pending)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._unmapping.shutdown(wait=False)

    def _start(self, prefix: PromptKey) -> PendingPrefill:
        expires = time.monotonic() + self._timeout_s + GRACE_S
        pending = PendingPrefill(prefix, Deadline(self._timeout_s), expires)
        pending.result = self._threads.submit(self._fetch_on_thread, pending)
        pending.result.add_done_callback(lambda _: self._notify())
        return pending

    def _fetch_on_thread(self, pending: PendingPrefill) -> Failure | None:
        try:
            for part in self._fetch(pending.prefix, pending.deadline):
                pending.deliver(part)
                self._notify()
        except (TransferError, TransferRejected) as error:
            return _without_frames(error)
        except Exception as error:  # a fault of the transfer must not end the request
            log.exception("remote prefill failed")
            return TransferError("internal", repr(error))
        return None

    def _advance(self, pending: PendingPrefill, may_begin: bool) -> bool:
        """Imports the parts that have arrived; returns True once the transfer is over.

        A first part waits while earlier ones hold the pages or snapshots that it requires. They are
        released when requests before this one receive slots.

        Raises:
          TransferError, TransferRejected: It has failed.
        """
        if pending.job is not None and pending.job.failed is not None:
            raise TransferError(pending.job.failed, "the import was cancelled")
        is_fetched = pending.result.done()  # before the look at its parts
        while (record := pending.next_record) is not None:
            if pending.job is not None:
                self._transfer.extend_import(pending.job, record)
            elif may_begin:
                pending.job = self._begin(record, pending.prefix)
            if pending.job is None:
                return False
            pending.pop()
        if is_fetched and (failure := pending.result.result()) is not None:
            raise failure
        if not is_fetched and time.monotonic() > pending.expires:
            raise TransferError(TIMEOUT, "the prefill server did not answer in time")
        return pending.job is not None and pending.job.is_done

    def _begin(self, record: TransferRecord, prefix: PromptKey) -> ImportJob | None:
        """Begins an import; returns None while it has no room because of earlier ones."""
        try:
            num_pages = self._transfer.max_pages(len(prefix.tokens))
            return self._transfer.begin_import(record, holds=True, num_pages=num_pages)
        except TransferRejected as error:
            if error.reason in LACK_OF_ROOM and self._transfer.is_holding:
                return None
            raise

    def _fall_back(self, pending: PendingPrefill, reason: str, message: str) -> None:
        self._counters.fail(reason)
        log.log(
            # A server in mode peer often has not cached a prompt.
            logging.DEBUG if reason == NOT_CACHED else logging.WARNING,
            "remote prefill of %d tokens failed (%s): %s; the prompt is prefilled locally",
            len(pending.prefix.tokens),
            reason,
            message,
        )

    def _cancel(self, pending: PendingPrefill) -> None:
        if pending.job is not None:
            pending.job.cancel()
        self._counters.fail(CANCELLED)
        self._end(pending)

    def _end(self, pending: PendingPrefill) -> None:
        """Removes a transfer, and releases the memory of its record, now or when it arrives."""
        del self._pending[pending.prefix.key]
        if not pending.result.done():
            pending.deadline.cancel()
            pending.result.cancel()
        held, pending.job = pending.release(), None
        # The last reference unmaps the memory, which takes 125 ms for 1.2 GB; requests decode.
        self._unmapping.submit(held.clear)


def _without_frames(error: Failure) -> Failure:
    """Returns an error without its frames: those hold records and the transfer, which holds the
    error, so that the memory would stay until the next garbage collection.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
