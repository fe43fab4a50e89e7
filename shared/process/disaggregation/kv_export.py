"""Requests of other servers for the KV cache of a prompt, in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.cluster.transfer.errors import TransferError
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import HeldRecord, RecordMemory, RecordStore
from shared.engine.kv_transfer import KVTransfer
from shared.engine.request import Event, InvalidRequestError, Request
from shared.engine.transfer_jobs import ExportJob
from shared.process.disaggregation.prompt_key import PromptKey
from shared.process.kv_transfer_plan import EXPORTED_STATES_OF_A_REQUEST

NOT_CACHED, FAILED = "not_cached", "failed"
"""Reasons: no request could start from a cached prefix; the prefill has failed."""


Published = tuple[str, HeldRecord]
"""Id of a ticket, and its record."""


class RequestEngine(Protocol):
    """Part of an engine that runs prompts."""

    def add(self, request: Request) -> None:
        """See `shared.process.loop.HostEngine`."""
        ...

    def abort(self, request_id: int) -> None:
        """See `shared.process.loop.HostEngine`."""
        ...


@dataclass(eq=False)
class PendingExport:
    """A prefix that other servers wait for.

    Attributes:
      prefix: The prompt.
      waiting: Ids of the requests for it.
      queued: Request that will run the prompt; None once it runs.
      running: Id of the request that runs the prompt; None once it has ended.
      job: Export from the cache; None before.
      memory: Memory of its record.
      published: First ticket, once a thread has published the record.
    """

    prefix: PromptKey
    waiting: list[int] = field(default_factory=list)
    queued: Request | None = None
    running: int | None = None
    job: ExportJob | None = None
    memory: RecordMemory | None = None
    published: Future[Published] | None = None


class KVExporter:
    """Runs prompts for other servers, exports their KV cache, and replies with tickets.

    Prompts wait in order while others run or are exported, `EXPORTED_STATES_OF_A_REQUEST` for each
    slot. An export pins a snapshot, and a prompt without a free snapshot could not be exported.

    Args:
      engine: Runs the prompts, as requests with `max_tokens` 0.
      transfer: Exports of the engine.
      store: Records for other servers.
      server: Server of these records.
      runs_prompts: True to run prompts that are not cached.
      notify: Wakes the engine's thread.
    """

    def __init__(
        self,
        engine: RequestEngine,
        transfer: KVTransfer,
        store: RecordStore,
        server: RecordServer,
        *,
        runs_prompts: bool,
        notify: Callable[[], None],
    ) -> None:
        self._engine, self._transfer, self._notify = engine, transfer, notify
        self._store, self._server, self._runs_prompts = store, server, runs_prompts
        self._max_open = EXPORTED_STATES_OF_A_REQUEST * transfer.num_slots
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv export")
        self._pending: dict[bytes, PendingExport] = {}
        self._running: dict[int, PendingExport] = {}
        self._replies: list[list[Any]] = []

    def add(self, request: Request) -> None:
        """Begins to export the prompt of a request, or joins an export of the same prompt."""
        prefix = PromptKey.of(request)
        if (found := self._store.share(prefix.key)) is not None:
            self._reply(request.request_id, found)
            return
        pending = self._pending.get(prefix.key)
        if pending is None:
            pending = self._pending[prefix.key] = PendingExport(prefix, queued=request)
        pending.waiting.append(request.request_id)
        self._begin_queued()

    def take(self, events: list[Event]) -> list[Event]:
        """Handles the events of prompts that run for other servers, and returns the others."""
        if not self._running:
            return events
        others = []
        for event in events:
            pending = self._running.get(event.request_id)
            if pending is None:
                others.append(event)
            elif event.finish_reason is not None:
                del self._running[event.request_id]
                pending.running = None
                if event.error is None:
                    self._export(pending)
                else:
                    self._fail(pending, FAILED, event.error)
        return others

    def drop(self, request_id: int) -> bool:
        """Removes a waiting request, and ends an export that no other request waits for.

        Returns:
          False if it was not waiting.
        """
        for pending in self._pending.values():
            if request_id in pending.waiting:
                pending.waiting.remove(request_id)
                if not pending.waiting:
                    self._cancel(pending)
                return True
        return False

    def replies(self) -> list[list[Any]]:
        """Advances all exports, and returns the messages to the server process that are due."""
        self._store.expire()
        self._begin_queued()
        for pending in tuple(self._pending.values()):
            self._advance(pending)
        due, self._replies = self._replies, []
        return due

    def close(self) -> None:
        """Cancels all exports, and frees all records."""
        for pending in tuple(self._pending.values()):
            self._cancel(pending)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def _begin_queued(self) -> None:
        queued = [each for each in self._pending.values() if each.queued is not None]
        for pending in queued[: max(0, self._max_open - len(self._pending) + len(queued))]:
            request, pending.queued = pending.queued, None
            assert request is not None
            self._begin(pending, request)

    def _begin(self, pending: PendingExport, request: Request) -> None:
        if not self._runs_prompts:
            self._export(pending)
            return
        try:
            self._engine.add(request)
        except InvalidRequestError as error:
            del self._pending[pending.prefix.key]
            for request_id in pending.waiting:
                self._replies.append(["refused", request_id, str(error), error.field])
            return
        pending.running = request.request_id
        self._running[request.request_id] = pending

    def _export(self, pending: PendingExport) -> None:
        prefix = pending.prefix

        def allocate(num_bytes: int) -> memoryview:
            pending.memory = self._store.allocate(num_bytes)
            return pending.memory.body

        try:
            pending.job = self._transfer.begin_export(
                prefix.tokens, prefix.namespace, prefix.images, allocate
            )
        except TransferError as error:
            self._fail(pending, error.reason, str(error))
            return
        if pending.job is None:
            self._fail(pending, NOT_CACHED, "no prefix of the prompt is cached")

    def _advance(self, pending: PendingExport) -> None:
        if pending.published is not None:
            if pending.published.done():
                self._end(pending, pending.published)
        elif pending.job is not None and pending.job.is_done:
            assert pending.memory is not None
            pending.published = self._thread.submit(
                self._publish, pending.prefix.key, pending.job, pending.memory
            )
            pending.published.add_done_callback(lambda _: self._notify())

    def _publish(self, key: bytes, job: ExportJob, memory: RecordMemory) -> Published:
        """Publishes a record, on the thread, because its checksum reads all bytes."""
        record, job.record = job.record, None
        assert record is not None
        checksum = record.checksum()
        del record  # its arrays are views of the memory
        return self._store.publish(key, job.header.to_fields(), memory, checksum)

    def _end(self, pending: PendingExport, published: Future[Published]) -> None:
        first = published.result()
        del self._pending[pending.prefix.key]
        for number, request_id in enumerate(pending.waiting):
            found = self._store.share(pending.prefix.key) if number else None
            self._reply(request_id, found or first)

    def _reply(self, request_id: int, published: Published) -> None:
        ticket = self._server.ticket(published[0], published[1])
        self._replies.append(["kv_ticket", request_id, ticket.to_fields(), None, None])

    def _fail(self, pending: PendingExport, reason: str, message: str) -> None:
        del self._pending[pending.prefix.key]
        for request_id in pending.waiting:
            self._replies.append(["kv_ticket", request_id, None, reason, message])

    def _cancel(self, pending: PendingExport) -> None:
        del self._pending[pending.prefix.key]
        if pending.running is not None:
            del self._running[pending.running]
            self._engine.abort(pending.running)
        if pending.job is not None:
            pending.job.cancel()
        if pending.published is not None:
            pending.published.add_done_callback(self._drop)
        elif pending.memory is not None:
            pending.memory.close()

    def _drop(self, published: Future[Published]) -> None:
        if not published.cancelled() and published.exception() is None:
            self._store.drop(published.result()[0])
