"""Engines that transfer KV cache records, each in a process without an HTTP server.

The engine, the transfers and their client are those of a server (`shared.process.disaggregation`).
Only the route `POST /kv_transfer` is served by Python's standard library.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.request import Event, Request, SamplingParams
from shared.options.command_line import parse
from shared.process.disaggregation.kv_transfers import KVTransfers, open_record_listeners
from shared.process.disaggregation.wake_up import WakeUp
from tests.support.in_process_engine import Served, started

HOST, IDLE_S, LIMIT_S = "127.0.0.1", 0.05, 600.0
PREFILLS = (128, 1024)
"""Tokens of the smaller prefill programs: those after the last page of one record, and of several
prompts at once.
"""


def few_programs(capacity: BackendLimits, num_running: int) -> BackendLimits:
    """Keeps the programs that the measurements use, because each takes seconds to compile.

    These are the prefills of `PREFILLS` tokens and the largest of each batch, decode steps of all
    slots, and all other kinds. None has logprobs.

    Args:
      capacity: All programs of a server.
      num_running: Keeps decode steps of this number of requests too; 0 keeps no others.
    """
    plain = [each.with_features({ProgramFeature.LOGPROBS: False}) for each in capacity.programs]
    sizes = defaultdict[int, set[int]](set)
    for program in plain:
        if program.work is StepKind.PREFILL:
            sizes[program.batch].add(program.tokens)
    kept = {
        batch: {min((x for x in found if x >= size), default=max(found)) for size in PREFILLS}
        | {max(found)}
        for batch, found in sizes.items()
    }
    rows = {program.batch for program in plain if program.work is StepKind.DECODE}
    decoded = {max(rows)}
    if num_running:
        decoded.add(min(size for size in rows if size >= num_running))
    programs = [
        program
        for program in plain
        if (program.work is not StepKind.PREFILL or program.tokens in kept[program.batch])
        and (program.work is not StepKind.DECODE or program.batch in decoded)
    ]
    return replace(capacity, programs=tuple(dict.fromkeys(programs)))


class TransferLoop:
    """Engine with transfers, driven as by the main loop of a server (`shared.process.loop`).

    Attributes:
      served: The engine.
      transfers: Transfers with other engines; None runs every prompt here.
    """

    def __init__(self, backend: str, flags: Sequence[str], num_running: int) -> None:
        self.served: Served = started(backend, flags, lambda each: few_programs(each, num_running))
        self.transfers: KVTransfers | None = None
        self.connect(flags)

    def connect(self, flags: Sequence[str] | None) -> None:
        """Replaces the transfers by those of a command line, or by none."""
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        if flags is not None:
            options, engine = parse(flags), self.served.engine
            assert engine.transfer is not None, "the flags have no --disaggregation-mode"
            chunk = self.served.memory.settled.prefill_chunk_size
            listeners = open_record_listeners(options)
            self.transfers = KVTransfers.of_options(
                options, listeners, engine, engine.transfer, chunk
            )

    def add(self, request: Request) -> None:
        """Adds a request, after its transfer if its prompt is prefilled elsewhere."""
        if self.transfers is None or not self.transfers.take(request):
            self.served.engine.add(request)

    def abort(self, request_id: int) -> None:
        """Ends a request without an event."""
        if self.transfers is None or not self.transfers.drop(request_id):
            self.served.engine.abort(request_id)

    def step(
        self, others: Sequence[Connection | socket.socket] = ()
    ) -> tuple[list[Event], list[list[Any]]]:
        """Advances transfers and the engine; an idle engine waits for a transfer.

        Args:
          others: Further connections that end the wait.

        Returns:
          The events of a step, and the replies to other engines.
        """
        engine, transfers = self.served.engine, self.transfers
        if transfers is None:
            return engine.step() if engine.busy else [], []
        wait_s = 0.0 if engine.busy else IDLE_S
        ready, _, _ = select.select([transfers.readable, *others], [], [], wait_s)
        for wake in ready:
            if isinstance(wake, socket.socket):
                wake.recv(1 << 16)
        for request in transfers.ready():
            engine.add(request)
        replies = transfers.messages()
        return transfers.without_exports(engine.step() if engine.busy else []), replies

    def evict(self) -> None:
        """Ends all steps, and empties the prefix cache."""
        engine = self.served.engine
        while engine.busy:
            self.step()
        engine.cache.tree.evict(engine.cache.num_pages)

    def close(self) -> None:
        """Ends transfers and engine."""
        self.connect(None)
        self.served.engine.close()


Replies = queue.SimpleQueue[dict[str, Any] | str]
"""Tickets of a prompt, or an error."""


@dataclass
class TicketRequests:
    """Prompts that the route hands to the engine's thread, with the replies of each.

    Attributes:
      queued: Requests with the queue of their tickets.
      seconds: Time to the last ticket of each prompt.
      wake: Wakes the engine's thread.
    """

    queued: queue.SimpleQueue[tuple[Request, Replies]]
    seconds: list[float] = field(default_factory=list)
    ids: count[int] = field(default_factory=lambda: count(1))
    wake: WakeUp = field(default_factory=WakeUp)

    def tickets(self, tokens: Sequence[int], tenant: str) -> Iterator[dict[str, Any]]:
        """Yields the ticket of each part of a prompt once it is published.

        Raises:
          RuntimeError: It was rejected, or could not be exported.
        """
        began, replies = time.perf_counter(), Replies()
        sampling = SamplingParams(max_tokens=0)
        request = Request(
            request_id=next(self.ids), prompt=tuple(tokens), sampling=sampling, tenant=tenant
        )
        self.queued.put((request, replies))
        self.wake.notify()
        is_last = False
        while not is_last:
            fields = replies.get(timeout=LIMIT_S)
            if isinstance(fields, str):
                raise RuntimeError(fields)
            is_last = fields["header"]["is_last"]
            if is_last:
                self.seconds.append(time.perf_counter() - began)
            yield fields


class TicketServer(ThreadingHTTPServer):
    """HTTP server of `POST /kv_transfer` only."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self) -> None:
        super().__init__((HOST, 0), TicketHandler)
        self.requests = TicketRequests(queue.SimpleQueue())


class TicketHandler(BaseHTTPRequestHandler):
    """Connection to `TicketServer`."""

    server: TicketServer

    def do_POST(self) -> None:
        """Responds with a line for each ticket, or with status 503."""
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        has_begun = False
        try:
            for fields in self.server.requests.tickets(sent["tokens"], sent["tenant"]):
                self._send(fields, 200, has_begun)
                has_begun = True
        except RuntimeError as error:
            if not has_begun:
                self._send({"error": str(error)}, 503, has_begun)

    def _send(self, fields: dict[str, Any], status: int, has_begun: bool) -> None:
        if not has_begun:
            self.send_response(status)
            self.end_headers()
        self.wfile.write(json.dumps(fields).encode() + b"\n")

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def serve_prefill(line: Connection, backend: str, flags: Sequence[str], gpu: int | None) -> None:
    """Process of a prefill engine, until the line closes.

    Sends its port, then `ready`. The message `evict` empties its cache; the reply is the median
    of the seconds from prompts to their tickets since the last one.
    """
    use_gpu(gpu)
    server = TicketServer()
    line.send(("listening", server.server_port))
    loop, requests = TransferLoop(backend, flags, 0), server.requests
    threading.Thread(target=server.serve_forever, daemon=True).start()
    line.send(("ready", None))
    replies: dict[int, Replies] = {}
    try:
        while True:
            if line.poll():
                line.recv()
                loop.evict()
                line.send(("evicted", statistics.median(requests.seconds or [0.0])))
                requests.seconds.clear()
            _prefill(loop, requests, replies, line)
    except EOFError:
        loop.close()


def _prefill(
    loop: TransferLoop,
    requests: TicketRequests,
    replies: dict[int, Replies],
    line: Connection,
) -> None:
    assert loop.transfers is not None
    while not requests.queued.empty():
        request, reply = requests.queued.get()
        replies[request.request_id] = reply
        loop.transfers.export(request)
    _, messages = loop.step([requests.wake.readable, line])
    for kind, request_id, *rest in messages:
        ticket = rest[0] if kind == "kv_ticket" else None
        replies[request_id].put(ticket or f"{kind}: {rest}")
        if ticket is None or ticket["header"]["is_last"]:
            del replies[request_id]


def use_gpu(number: int | None) -> None:
    """Restricts this process to one GPU, and JAX to the memory that it needs.

    None leaves the GPU to the environment.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if number is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
