"""Requests that wait for the KV cache of their prompt from another server, in the engine's thread.

A request waits like one with a grammar to compile, while other requests decode. However the
transfer ends, the request is then added to the engine, which prefills what its cache lacks. So a
lost prefill server costs time only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
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
from shared.process.disaggregation.prefill_client import NOT_CACHED
from shared.process.disaggregation.prompt_key import PromptKey
from shared.process.logs import log

MAX_FETCHES = 16
"""Maximum prompts that are prefilled remotely at the same time; others wait for a thread."""

GRACE_S = 0.5
"""Seconds after the timeout in which a thread may report it itself."""

LACK_OF_ROOM = ("no_pages", "no_snapshots")

Fetch = Callable[[PromptKey, Deadline], tuple[TransferRecord, FetchedRecord]]


@dataclass(eq=False)
class PendingPrefill:
    """A prompt that another server prefills.

    Attributes:
      prefix: The prompt.
      deadline: Deadline of its transfer.
      expires: Time at which it is prefilled locally, by the monotonic clock.
      result: Result of the thread.
      requests: Requests with this prompt.
      job: Import of the record; None before.
      fetched: Memory of the record during the import.
    """

    prefix: PromptKey
    deadline: Deadline
    expires: float
    result: Future[tuple[TransferRecord, FetchedRecord]]
    requests: list[Request] = field(default_factory=list)
    job: ImportJob | None = None
    fetched: FetchedRecord | None = None


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
                may_begin &= pending.job is not None or not pending.result.done()
            except (TransferError, TransferRejected) as error:
                self._fall_back(pending, error.reason, str(error))
                # The future holds the error, and its frames hold the future and a record: without
                # this the record stays until the next garbage collection.
                error.with_traceback(None)
                is_over = True
            if is_over:
                if pending.job is not None:
                    ids = (each.request_id for each in pending.requests)
                    self._transfer.assign(pending.job, ids)
                self._end(pending)
                yield from pending.requests

    def close(self) -> None:
        """Cancels all transfers."""
        for pending in tuple(self._pending.values()):
            self._cancel(pending)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, prefix: PromptKey) -> PendingPrefill:
        deadline = Deadline(self._timeout_s)
        result = self._threads.submit(self._fetch_on_thread, prefix, deadline)
        result.add_done_callback(lambda _: self._notify())
        expires = time.monotonic() + self._timeout_s + GRACE_S
        return PendingPrefill(prefix, deadline, expires, result)

    def _fetch_on_thread(
        self, prefix: PromptKey, deadline: Deadline
    ) -> tuple[TransferRecord, FetchedRecord]:
        try:
            return self._fetch(prefix, deadline)
        except (TransferError, TransferRejected):
            raise
        except Exception as error:  # a fault of the transfer must not end the request
            log.exception("remote prefill failed")
            raise TransferError("internal", repr(error)) from error

    def _advance(self, pending: PendingPrefill, may_begin: bool) -> bool:
        """Imports a record that has arrived; returns True once the transfer is over.

        A record waits while earlier ones hold the pages or snapshots that it requires. They are
        released when requests before this one receive slots.

        Raises:
          TransferError, TransferRejected: It has failed.
        """
        if pending.job is not None:
            if pending.job.failed is not None:
                raise TransferError(pending.job.failed, "the import was cancelled")
            return pending.job.is_done
        if pending.result.done():
            record, pending.fetched = pending.result.result()
            if may_begin:
                pending.job = self._begin(record)
            return pending.job is not None and pending.job.is_done
        if time.monotonic() > pending.expires:
            raise TransferError(TIMEOUT, "the prefill server did not answer in time")
        return False

    def _begin(self, record: TransferRecord) -> ImportJob | None:
        """Begins an import; returns None while it has no room because of earlier ones."""
        try:
            return self._transfer.begin_import(record, holds=True)
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
        if pending.fetched is not None:
            pending.fetched.release()
        elif not pending.result.done() or not pending.result.exception():
            pending.deadline.cancel()
            pending.result.cancel()
            pending.result.add_done_callback(_release)


def _release(result: Future[tuple[TransferRecord, FetchedRecord]]) -> None:
    if not result.cancelled() and result.exception() is None:
        result.result()[1].release()
