"""Requests of other servers for the KV cache of a prompt, in the engine's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.cluster.transfer.errors import TransferError
from shared.cluster.transfer.record_memory import RecordMemory
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import HeldRecord, RecordStore
from shared.engine.kv_transfer import KVTransfer
from shared.engine.request import Event, InvalidRequestError, Request
from shared.engine.transfer_jobs import ExportJob
from shared.process.disaggregation.prompt_key import PromptKey
from shared.process.kv_transfer_plan import EXPORTED_STATES_OF_A_REQUEST

NOT_CACHED, FAILED = "not_cached", "failed"
"""Reasons: no request could start from a cached prefix; the prefill has failed."""


Published = tuple[str, HeldRecord]
"""Id of a ticket, and its record."""

PublishedPart = Future[Published]


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
      jobs: Exports of the next parts, in order, and the memory of each record.
      num_pages: Pages of all parts that have begun.
      parts: Parts that a thread publishes or has published, in order.
      num_sent: Parts for which the requests have tickets.
      late: Requests that have missed a part; they begin anew once the others have all tickets.
      num_changes: Changes of the prefix cache when a part was last looked for.
    """

    prefix: PromptKey
    waiting: list[int] = field(default_factory=list)
    queued: Request | None = None
    running: int | None = None
    jobs: deque[tuple[ExportJob, RecordMemory]] = field(default_factory=deque)
    num_pages: int = 0
    parts: list[PublishedPart] = field(default_factory=list)
    num_sent: int = 0
    late: list[Request] = field(default_factory=list)
    num_changes: int = -1


class KVExporter:
    """Runs prompts for other servers, exports their KV cache, and replies with tickets.

    Prompts wait in order while others run or are exported, `EXPORTED_STATES_OF_A_REQUEST` for each
    slot. An export pins a snapshot, and a prompt without a free snapshot could not be exported.

    While a prompt runs, its finished pages are exported in parts, each with a ticket. The last part
    has the state snapshot.

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
        if pending is not None and pending.num_sent:
            pending.late.append(request)
            return
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
                if event.error is not None:
                    self._fail(pending, FAILED, event.error)
                else:
                    self._export_last(pending)
        return others

    def drop(self, request_id: int) -> bool:
        """Removes a waiting request, and ends an export that no other request waits for.

        Returns:
          False if it was not waiting.
        """
        for pending in self._pending.values():
            late = [each for each in pending.late if each.request_id != request_id]
            if len(late) < len(pending.late):
                pending.late = late
                return True
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
            self._export_last(pending)
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

    def _export_last(self, pending: PendingExport) -> None:
        self._export(pending, self._transfer.begin_export, "no prefix of the prompt is cached")

    def _export(
        self,
        pending: PendingExport,
        begin: Callable[..., ExportJob | None],
        failure: str | None = None,
    ) -> None:
        """Begins the export of a part; without one the export fails if there is a message."""
        prefix, held = pending.prefix, list[RecordMemory]()

        def allocate(num_bytes: int) -> memoryview:
            held.append(self._store.allocate(num_bytes))
            return held[0].body

        first = pending.num_pages
        try:
            job = begin(prefix.tokens, prefix.namespace, prefix.images, allocate, first_page=first)
        except TransferError as error:
            self._fail(pending, error.reason, str(error))
            return
        if job is not None:
            pending.jobs.append((job, held[0]))
            pending.num_pages = job.header.num_pages
        elif failure is not None:
            self._fail(pending, NOT_CACHED, failure)

    def _advance(self, pending: PendingExport) -> None:
        while pending.jobs and pending.jobs[0][0].is_done:
            self._publish_part(pending, *pending.jobs.popleft())
        changes = self._transfer.num_changes
        if pending.running is not None and not pending.jobs and changes != pending.num_changes:
            pending.num_changes = changes
            self._export(pending, self._transfer.begin_part)
        self._reply_parts(pending)

    def _publish_part(self, pending: PendingExport, job: ExportJob, memory: RecordMemory) -> None:
        # A record of the whole prefix is shared with later requests.
        is_single = not pending.parts and job.header.is_last
        part = b"" if is_single else len(pending.parts).to_bytes(1, "big")
        key = pending.prefix.key + part
        published = self._thread.submit(self._publish, key, job, memory)
        published.add_done_callback(lambda _: self._notify())
        pending.parts.append(published)

    def _publish(self, key: bytes, job: ExportJob, memory: RecordMemory) -> Published:
        """Publishes a record, on the thread, because its checksum reads all bytes."""
        record = job.take_record()
        checksum = record.checksum()
        del record  # its arrays are views of the memory
        return self._store.publish(key, job.header.to_fields(), memory, checksum)

    def _reply_parts(self, pending: PendingExport) -> None:
        """Replies with the tickets of published parts, in order; the last one ends the export."""
        while pending.num_sent < len(pending.parts):
            part = pending.parts[pending.num_sent]
            if not part.done():
                return
            first = part.result()
            pending.num_sent += 1
            for number, request_id in enumerate(pending.waiting):
                shared = self._store.share(first[1].key) if number else None
                self._reply(request_id, shared or first)
            if first[1].header["is_last"]:
                self._end(pending)

    def _end(self, pending: PendingExport) -> None:
        del self._pending[pending.prefix.key]
        for request in pending.late:
            self.add(request)

    def _reply(self, request_id: int, published: Published) -> None:
        ticket = self._server.ticket(published[0], published[1])
        self._replies.append(["kv_ticket", request_id, ticket.to_fields(), None, None])

    def _fail(self, pending: PendingExport, reason: str, message: str) -> None:
        waiting, pending.waiting = pending.waiting, []
        self._cancel(pending)
        for request_id in waiting:
            self._replies.append(["kv_ticket", request_id, None, reason, message])

    def _cancel(self, pending: PendingExport) -> None:
        if pending.running is not None:
            del self._running[pending.running]
            self._engine.abort(pending.running)
        for job, memory in pending.jobs:
            job.cancel()
            memory.close()
        for part in pending.parts[pending.num_sent :]:
            part.add_done_callback(self._drop)
        self._end(pending)

    def _drop(self, published: PublishedPart) -> None:
        if not published.cancelled() and published.exception() is None:
            self._store.drop(published.result()[0])
