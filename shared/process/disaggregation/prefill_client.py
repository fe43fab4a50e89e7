"""Client of prefill servers: requests a ticket over HTTP, and fetches the record."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from math import ceil
from typing import Any

from shared.boundary.kv_transfer import TransferHeader, TransferRecord, TransferRejected
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import LOST, TOO_LARGE, UNREACHABLE, TransferError
from shared.cluster.transfer.record_client import FetchedRecord, RecordClient
from shared.cluster.transfer.ticket import Ticket
from shared.options.disaggregation import ServerAddress
from shared.process.disaggregation.prompt_key import PromptKey

PATH = "/kv_transfer"
CONNECT_S = 2.0
COOLDOWN_S = 5.0
"""Seconds for which a server that could not be reached is not tried again."""

MAX_LOAD = 1.25
"""Multiple of the mean number of open requests from which a server is tried last."""

MAX_TICKET_BYTES = 1 << 26

Part = tuple[TransferRecord, FetchedRecord]
"""Record of a part of a prefix, and its memory."""

NOT_CACHED, BUSY, REJECTED = "not_cached", "busy", "rejected"
_REASONS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: NOT_CACHED,
    HTTPStatus.SERVICE_UNAVAILABLE: BUSY,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TOO_LARGE,
}
NEXT_SERVER = (UNREACHABLE, LOST, NOT_CACHED, BUSY)
"""Reasons after which the next server is tried."""


class PrefillServers:
    """Order in which prefill servers are tried: by the hash of the prefix, within a load bound."""

    def __init__(self, servers: Sequence[ServerAddress]) -> None:
        self._servers, self._lock = tuple(servers), threading.Lock()
        self._open: Counter[ServerAddress] = Counter()
        self._down_until: dict[ServerAddress, float] = {}

    def order(self, affinity: bytes) -> list[ServerAddress]:
        """Returns the servers for a prefix; without those that could not be reached just now.

        The hash gives each prefix an own order (rendezvous hashing), so equal prefixes share a
        server, and a lost server changes the order of no other prefix.
        """

        def rank(server: ServerAddress) -> bytes:
            return blake2b(affinity + f"{server.host}:{server.port}".encode()).digest()

        now = time.monotonic()
        with self._lock:
            most = ceil(MAX_LOAD * (self._open.total() + 1) / len(self._servers))
            usable = [each for each in self._servers if self._down_until.get(each, 0.0) <= now]
            return sorted(usable, key=lambda each: (self._open[each] >= most, rank(each)))

    @contextlib.contextmanager
    def counted(self, server: ServerAddress) -> Iterator[None]:
        """Counts an open request of a server, and notes if it cannot be reached."""
        with self._lock:
            self._open[server] += 1
        try:
            yield
        except TransferError as error:
            if error.reason in (UNREACHABLE, LOST):
                with self._lock:
                    self._down_until[server] = time.monotonic() + COOLDOWN_S
            raise
        finally:
            with self._lock:
                self._open[server] -= 1


class PrefillClient:
    """Fetches the KV cache of a prompt; all methods may be called from any thread.

    Args:
      servers: Prefill servers.
      records: Client of their records.
      key: Bearer token of `POST /kv_transfer`; None for none.
      fingerprint: Digest that records must have (`TransferHeader.fingerprint`).
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        records: RecordClient,
        key: str | None,
        fingerprint: str,
    ) -> None:
        self._servers, self._records = PrefillServers(servers), records
        self._fingerprint = fingerprint
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def fetch(self, prefix: PromptKey, deadline: Deadline) -> Iterator[Part]:
        """Has a server prefill a prompt, and fetches its records.

        Yields:
          Each part of the prefix as it arrives, and its memory to release.

        Raises:
          TransferError, TransferRejected: No server has sent usable records in time.
        """
        last = TransferError(UNREACHABLE, "no prefill server could be reached just now")
        for server in self._servers.order(prefix.affinity):
            has_begun = False
            try:
                with self._servers.counted(server):
                    for part in self._fetch_from(server, prefix, deadline):
                        has_begun = True
                        yield part
                return
            except TransferError as error:
                if has_begun or error.reason not in NEXT_SERVER:
                    raise
                last = error
        raise last

    def _fetch_from(
        self, server: ServerAddress, prefix: PromptKey, deadline: Deadline
    ) -> Iterator[Part]:
        for fields in self._post(server, prefix.to_json(), deadline):
            ticket = Ticket.from_fields(fields, server.host)
            header = TransferHeader.from_fields(ticket.header)
            self._check(server, prefix, header)
            fetched = self._records.fetch(ticket, deadline)
            try:
                record = TransferRecord.checked(header, fetched.body, ticket.checksum)
            except TransferRejected:
                fetched.release()
                raise
            yield record, fetched
            if header.is_last:
                return
        raise TransferError(LOST, "the server ended before the last part of the prefix")

    def _check(self, server: ServerAddress, prefix: PromptKey, header: TransferHeader) -> None:
        if header.fingerprint != self._fingerprint:
            raise TransferRejected(
                "fingerprint",
                f"{server.host}:{server.port} serves another model, drafter, dtype or page size; "
                "start both servers with the same files and flags",
            )
        count = len(header.tokens)
        namespace = header.tenant, header.adapter, header.adapter_version
        if (namespace, tuple(header.tokens.tolist())) != (prefix.namespace, prefix.tokens[:count]):
            raise TransferRejected(
                "tokens", "the record is that of another prompt, or of other files of the adapter"
            )

    def _post(
        self, server: ServerAddress, body: bytes, deadline: Deadline
    ) -> Iterator[dict[str, Any]]:
        """Yields the fields of each line of the response, as it arrives."""
        kind = HTTPSConnection if server.is_secure else HTTPConnection
        wait_s = min(CONNECT_S, deadline.remaining_s())
        connection = kind(server.host, server.port, timeout=wait_s)
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as error:
                deadline.remaining_s()
                message = f"{server.host}:{server.port} cannot be reached: {error}"
                raise TransferError(UNREACHABLE, message) from error
            sock = connection.sock  # the response keeps it open
            try:
                with deadline.on(sock):
                    connection.request("POST", PATH, body, self._headers)
                    response = connection.getresponse()
                with contextlib.closing(response):
                    yield _fields_of(response.status, _line(response, sock, deadline))
                    while received := _line(response, sock, deadline):
                        yield _fields_of(response.status, received)
            except HTTPException as error:
                deadline.remaining_s()
                raise TransferError(LOST, f"the connection failed: {error!r}") from error


def _line(response: HTTPResponse, sock: socket.socket, deadline: Deadline) -> bytes:
    with deadline.on(sock):
        return response.readline(MAX_TICKET_BYTES)


def _fields_of(status: int, received: bytes) -> dict[str, Any]:
    if status == HTTPStatus.OK:
        try:
            return json.loads(received)
        except ValueError as error:
            raise TransferError(LOST, "the response is not JSON") from error
    reason = _REASONS.get(status, REJECTED)
    raise TransferError(reason, f"HTTP {status}: {received[:500].decode('utf-8', 'replace')}")
