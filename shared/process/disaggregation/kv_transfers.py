"""Both roles of a server in disaggregated prefill, as the engine's loop uses them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any, Self

from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.memory_agent import MemoryAgent
from shared.cluster.transfer.record_client import NIXL, RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.engine.kv_transfer import KVTransfer
from shared.engine.request import Event, Request
from shared.options.disaggregation import DisaggregationMode
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.address import bind, is_local
from shared.process.disaggregation.kv_export import KVExporter, RequestEngine
from shared.process.disaggregation.prefill_client import PrefillClient
from shared.process.disaggregation.remote_prefill import RemotePrefill
from shared.process.disaggregation.wake_up import WakeUp


class KVTransfers:
    """Exports for other servers, and prompts that other servers prefill.

    Args:
      wake: Wake-up of the engine's thread, closed at the end.
      exporter: Exports; None if the server does not serve records.
      prefills: Remote prefill; None if the server does not fetch records.
      records: Client of records; None if the server does not fetch records.
      store: Held records; None if the server does not serve records.
      counters: Counters of both roles.
    """

    def __init__(
        self,
        wake: WakeUp,
        exporter: KVExporter | None,
        prefills: RemotePrefill | None,
        records: RecordClient | None,
        store: RecordStore | None,
        counters: TransferCounters,
    ) -> None:
        self._wake, self._exporter, self._prefills = wake, exporter, prefills
        self._records, self._store, self._counters = records, store, counters

    @classmethod
    def of_options(
        cls,
        options: Options,
        listeners: Sequence[socket.socket],
        engine: RequestEngine,
        transfer: KVTransfer,
        chunk: int,
    ) -> Self:
        """Starts the threads that the server's mode requires.

        Args:
          options: Options of the server.
          listeners: Result of `open_record_listeners`.
          engine: Runs prompts of other servers.
          transfer: Exports and imports of the engine.
          chunk: Maximum prompt tokens of a prefill step.
        """
        wanted, wake, counters = options.disaggregation, WakeUp(), TransferCounters()
        secret = wanted.secret()
        shared_key = (secret or "").encode()
        exporter = store = prefills = records = None
        agent = MemoryAgent() if wanted.disaggregation_transfer_backend == NIXL else None
        if wanted.mode.serves:
            store = RecordStore(wanted.buffer_bytes, wanted.disaggregation_ticket_timeout)
            server = RecordServer(store, listeners, shared_key, counters, agent)
            exporter = KVExporter(
                engine,
                transfer,
                store,
                server,
                runs_prompts=wanted.mode is DisaggregationMode.PREFILL,
                notify=wake.notify,
            )
        if wanted.mode.fetches:
            backend = wanted.disaggregation_transfer_backend
            records = RecordClient(backend, shared_key, wanted.buffer_bytes, counters, agent)
            key = secret or options.server.api_key
            client = PrefillClient(wanted.servers, records, key, transfer.fingerprint)
            least = wanted.remote_prefill_min_tokens
            prefills = RemotePrefill(
                transfer,
                client.fetch,
                min_tokens=chunk + 1 if least is None else least,
                timeout_s=wanted.remote_prefill_timeout,
                counters=counters,
                notify=wake.notify,
            )
        return cls(wake, exporter, prefills, records, store, counters)

    @property
    def readable(self) -> socket.socket:
        """Socket that becomes readable when `ready` or `messages` has a result."""
        return self._wake.readable

    def export(self, request: Request) -> None:
        """Begins to export the prompt of a request; `messages` has the reply."""
        assert self._exporter is not None  # otherwise the server process has no such route
        self._exporter.add(request)

    def take(self, request: Request) -> bool:
        """Returns True if a request waits for the KV cache of its prompt; `ready` returns it."""
        return self._prefills is not None and self._prefills.take(request)

    def ready(self) -> Iterator[Request]:
        """Yields requests to add to the engine: their transfer has ended."""
        return iter(()) if self._prefills is None else self._prefills.ready()

    def without_exports(self, events: list[Event]) -> list[Event]:
        """Handles the events of prompts that run for other servers, and returns the others."""
        return events if self._exporter is None else self._exporter.take(events)

    def messages(self) -> list[list[Any]]:
        """Returns the messages to the server process that are due."""
        return [] if self._exporter is None else self._exporter.replies()

    def drop(self, request_id: int) -> bool:
        """Removes a waiting request of either role; returns False if it was not waiting."""
        roles = (self._prefills, self._exporter)
        return any(role is not None and role.drop(request_id) for role in roles)

    def snapshot(self) -> dict[str, float]:
        """Returns counters and gauges for `/metrics`."""
        return self._gauges() | self._counters.snapshot()

    def _gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        if self._store is not None:
            gauges["kv_transfer_held_records"] = self._store.num_records
            gauges["kv_transfer_held_bytes"] = self._store.num_bytes
        if self._prefills is not None and self._records is not None:
            gauges["kv_transfer_waiting_requests"] = self._prefills.num_waiting
            gauges["kv_transfer_received_bytes"] = self._records.num_bytes
        return gauges

    def close(self) -> None:
        """Ends all transfers and threads."""
        for role in (self._prefills, self._exporter, self._records, self._wake):
            if role is not None:
                role.close()


def open_record_listeners(options: Options) -> list[socket.socket]:
    """Binds the transfer port; returns no sockets if the server serves no records.

    Raises:
      ValueError: The address is not available, or other machines could reach it without a secret.
    """
    wanted, host = options.disaggregation, options.server.host
    has_secret = wanted.secret() is not None  # also checks the file of a server that only fetches
    if not wanted.mode.serves:
        return []
    port = wanted.disaggregation_transfer_port
    listeners = bind(host, port, port_flag="--disaggregation-transfer-port")
    is_open = not all(is_local(each.getsockname()[0]) for each in listeners)
    if is_open and not (has_secret or options.server.allow_unauthenticated):
        for each in listeners:
            each.close()
        raise ConfigError(
            f"--host {host} is reachable from other machines, which requires "
            "--disaggregation-secret-file; use --allow-unauthenticated to serve KV cache records "
            "without authentication"
        )
    return listeners


def transfer_notes(options: Options, listeners: Sequence[socket.socket]) -> Iterator[str]:
    """Yields lines about the server's mode for the startup report."""
    wanted = options.disaggregation
    if wanted.mode is DisaggregationMode.NONE:
        return
    backend = wanted.disaggregation_transfer_backend
    described = f"disaggregated prefill: mode {wanted.disaggregation_mode}, backend {backend}"
    if listeners:
        described += f", KV cache records at port {listeners[0].getsockname()[1]}"
    yield described
    if wanted.servers:
        named = ", ".join(f"{each.host}:{each.port}" for each in wanted.servers)
        yield f"prefill servers: {named}"
