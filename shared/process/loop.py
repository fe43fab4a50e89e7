"""Main loop of the engine process: runs the engine on one thread and exchanges messages with the
HTTP server.

The server is a child process with an inherited socket. The loop reads messages between two steps
and sends one frame per step; it never blocks on a full socket. If one process ends, the other reads
the end of the socket and ends too.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from shared import children
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Event, InvalidRequestError, Request
from shared.process import logs
from shared.process.adapter_loads import AdapterHandler
from shared.process.address import Listeners
from shared.process.corpora import CorpusHandler
from shared.process.disaggregation.kv_transfers import KVTransfers
from shared.process.grammars import GrammarQueue
from shared.process.ipc_messages import (
    FrameReader,
    ServerInfo,
    event_to_row,
    pack,
    requests_of,
)
from shared.process.logs import log
from shared.process.signals import StopSignals, block_stop_signals
from shared.process.watchdog import EXIT_FAILED, Watchdog

IDLE_WAIT_S = 1.0  # socket and signals wake an idle engine; bound for a missed wake-up
BUILDING_WAIT_S = 0.05  # polling interval while a corpus is built or an adapter is read
COMPILING_WAIT_S = 0.002  # polling interval while a grammar is compiled, about its duration
BEAT_S = 1.0  # interval of unrequested metrics snapshots
SILENCE_GRACE_S = 5.0  # so that this process's watchdog reports first
FAREWELL_S = 1.0  # to send the last frame
CHILD_END_S = 3.5  # for the server to end by itself; total below 5 s
RECEIVE_BYTES = 1 << 18
MOST_BYTES = 1 << 21  # maximum read between two steps, so that images do not delay other requests
PART_WAIT_S = 0.001  # wait for the rest of a message larger than the socket buffer
EXIT_REFUSED = 2


class MetricValues(Protocol):
    """Counters and gauges of an engine."""

    def snapshot(self) -> dict[str, float]:
        """Returns the values by name."""
        ...


class HostEngine(Protocol):
    """Interface of an engine (`shared.engine.engine.Engine` implements it)."""

    @property
    def metrics(self) -> MetricValues:
        """Counters and gauges that the server process shows at `/metrics`."""
        ...

    @property
    def busy(self) -> bool:
        """True if `step` has work to do."""
        ...

    def add(self, request: Request) -> None:
        """Queues a request, or raises `InvalidRequestError`."""
        ...

    def abort(self, request_id: int) -> None:
        """Ends a request without an event.

        Does nothing if it has ended while the message was in transit.
        """
        ...

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request after `num_tokens` output tokens; otherwise the same as `abort`."""
        ...

    def step(self) -> list[Event]:
        """Submits a step, and returns the events of the oldest step beyond the overlap."""
        ...

    def close(self) -> None:
        """Ends the device's work."""
        ...


def run(
    engine: HostEngine,
    facts: ServerInfo,
    listeners: Listeners,
    index: NgramIndex | None,
    watchdog: Watchdog,
    drain_timeout_s: float,
    grammars: GrammarQueue | None = None,
    transfers: KVTransfers | None = None,
    adapters: AdapterHandler | None = None,
) -> int:
    """Serves until a signal, a failure, or the end of the server process; ends both processes.

    After SIGTERM, open requests may finish within `drain_timeout_s` and no new ones are accepted. A
    second SIGTERM, SIGINT and the other `STOP_SIGNALS` end at once.

    Args:
      engine: The engine, closed at the end.
      facts: Sent to the server first.
      listeners: Result of `address.open_listeners`, passed to the server.
      index: N-gram index for external corpora; None with another drafter.
      watchdog: Ends both processes if a step hangs.
      drain_timeout_s: See above.
      grammars: Grammar compiler; None without structured output.
      transfers: Transfers of KV cache with other servers; None without disaggregated prefill.
      adapters: LoRA adapters of the engine; None for an engine without a model.

    Returns:
      The exit code: 0 after a signal, 2 if the server rejected the configuration, else 1.
    """
    logs.set_up(facts.observing)
    stop = StopSignals(drain_timeout_s)
    facts = replace(facts, silence_s=watchdog.timeout_s + SILENCE_GRACE_S)
    ours, theirs = socket.socketpair()
    child = _start_server(listeners, theirs, stop.last_word)
    link = _EngineLink(ours)
    link.send(facts.to_message())
    watchdog.start(stop.wait_for_end, partial(_end_at_once, link, child, stop))
    try:
        _Loop(engine, link, CorpusHandler(index), watchdog, grammars, transfers, adapters).run(stop)
        reason, failed = stop.reason, False
    except _ServerEnded:
        return _after_server(child, engine, watchdog)
    except Exception as error:  # any failure of the engine ends the service, with its reason
        watchdog.claim_end()
        reason, failed = f"the engine failed: {type(error).__name__}: {error}", True
        log.exception(reason)
    finally:
        if transfers is not None:
            transfers.close()
    link.farewell(["end", reason, failed])
    _end_child(child)
    with watchdog.watched():
        engine.close()
    return EXIT_FAILED if failed else 0


def _end_at_once(
    link: _EngineLink, child: subprocess.Popen[bytes], stop: StopSignals, failure: str | None
) -> None:
    """Ends both processes from another thread, while the engine's thread waits for the device."""
    reason, failed = failure or stop.reason, failure is not None
    log.log(logging.ERROR if failed else logging.INFO, reason)
    link.farewell(["end", reason, failed])
    _end_child(child)
    os._exit(EXIT_FAILED if failed else 0)


class _ServerEnded(Exception):
    """The server's end of the socket is closed."""


class _EngineLink:
    """Socket to the server; sending never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._unsent = bytearray()

    def wait(self, timeout_s: float, others: Sequence[socket.socket]) -> None:
        """Waits for a message, for room to send, or for one of `others` to become readable."""
        writers = [self._socket] if self._unsent else []
        readable, _, _ = select.select([self._socket, *others], writers, [], timeout_s)
        for other in others:
            if other in readable:
                other.recv(RECEIVE_BYTES)
        self._flush()

    def read(self) -> Iterator[list[Any]]:
        """Yields received messages; a message larger than `MOST_BYTES` takes several calls.

        Raises:
          _ServerEnded: The connection is closed.
        """
        left = MOST_BYTES
        while left > 0:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                if self._reader.is_within and self._has_more():
                    continue
                return
            except OSError as error:
                raise _ServerEnded from error
            if not received:
                raise _ServerEnded
            left -= len(received)
            yield from self._reader.feed(received)

    def _has_more(self) -> bool:
        """Returns True if more of a message arrives at once; otherwise only one socket buffer per
        step would be read.
        """
        return bool(select.select([self._socket], [], [], PART_WAIT_S)[0])

    def send(self, message: list[Any]) -> None:
        """Sends as much as the socket accepts now and buffers the rest."""
        self._unsent += pack(message)
        self._flush()

    def farewell(self, message: list[Any]) -> None:
        """Sends a last message with a timeout, and closes the socket."""
        self.send(message)
        deadline = time.monotonic() + FAREWELL_S
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self._flush()
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # `read` reports the end of the server, after its last messages
            self._unsent.clear()


class _Loop:
    """Main loop: receives messages, runs steps, sends one frame per step."""

    def __init__(
        self,
        engine: HostEngine,
        link: _EngineLink,
        corpora: CorpusHandler,
        watchdog: Watchdog,
        grammars: GrammarQueue | None,
        transfers: KVTransfers | None,
        adapters: AdapterHandler | None,
    ) -> None:
        self._engine, self._link, self._grammars = engine, link, grammars
        self._transfers, self._adapters = transfers, adapters
        self._corpora, self._watchdog = corpora, watchdog
        self._drains, self._is_drained = False, False
        self._next_beat = 0.0
        self._handlers = {
            "add": partial(self._receive, self._add),
            "abort": self._abort,
            "finish": engine.finish,
            "metrics": self._metrics,
            "corpus_add": self._corpora.add,
            "corpus_remove": self._corpora.remove,
            "corpus_list": self._corpora.list,
            "drained": self._end_drain,
        }
        if adapters is not None:
            self._handlers |= {"lora_load": adapters.load, "lora_unload": adapters.unload}
        if transfers is not None:
            self._handlers["kv_transfer"] = partial(self._receive, transfers.export)

    def run(self, stop: StopSignals) -> None:
        """Runs until stopped.

        Raises:
          _ServerEnded: The server process has ended.
        """
        wakes = [stop.readable]
        if self._transfers is not None:
            wakes.append(self._transfers.readable)
        while not (stop.ends or self._is_drained):
            self._beat()
            self._link.wait(self._patience_s(), wakes)
            if stop.drains and not self._drains:
                self._drains = True
                self._link.send(["drain", stop.drain_timeout_s])
            for kind, *fields in self._link.read():
                self._handlers[kind](*fields)
            for handler in filter(None, (self._corpora, self._adapters)):
                for answer in handler.answers():
                    self._link.send(answer)
            if self._grammars is not None:
                for request, refusal in self._grammars.ready():
                    self._add_ready(request, refusal)
            if self._transfers is not None:
                self._advance_transfers(self._transfers)
            if self._engine.busy:
                with self._watchdog.watched():
                    events = self._engine.step()
                if self._transfers is not None:
                    events = self._transfers.without_exports(events)
                self._send(events)

    def _advance_transfers(self, transfers: KVTransfers) -> None:
        for request in transfers.ready():
            self._add_to_engine(request)
        for message in transfers.messages():
            self._link.send(message)

    def _beat(self) -> None:
        """Sends a metrics snapshot as a heartbeat."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._metrics()

    def _end_drain(self) -> None:
        self._is_drained = True

    def _patience_s(self) -> float:
        if self._engine.busy:
            return 0.0
        if self._grammars is not None and self._grammars.busy:
            return COMPILING_WAIT_S
        handlers = filter(None, (self._corpora, self._adapters))
        return BUILDING_WAIT_S if any(each.busy for each in handlers) else IDLE_WAIT_S

    def _send(self, events: list[Event]) -> None:
        if events:
            self._link.send(["step", [event_to_row(event) for event in events]])

    def _receive(self, take: Callable[[Request], None], *fields: Any) -> None:
        """Calls a function with each request of a message; its adapter is known from here on."""
        for request in requests_of(*fields):
            try:
                if self._adapters is not None:
                    self._adapters.assign(request)
            except InvalidRequestError as error:
                self._refuse(request, error)
            else:
                take(request)

    def _add(self, request: Request) -> None:
        if self._grammars is not None and request.sampling.grammar is not None:
            self._grammars.ask(request)
        else:
            self._add_ready(request, None)

    def _add_ready(self, request: Request, refusal: InvalidRequestError | None) -> None:
        """Adds a request to the engine or to those that wait for KV cache, or sends its error."""
        if refusal is not None:
            self._refuse(request, refusal)
        elif self._transfers is None or not self._transfers.take(request):
            self._add_to_engine(request)

    def _add_to_engine(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidRequestError as error:
            self._engine.abort(request.request_id)  # releases its imported prefix
            self._refuse(request, error)

    def _refuse(self, request: Request, error: InvalidRequestError) -> None:
        self._link.send(["refused", request.request_id, str(error), error.field])

    def _abort(self, request_id: int) -> None:
        queues = (self._grammars, self._transfers)
        if not any(queue is not None and queue.drop(request_id) for queue in queues):
            self._engine.abort(request_id)

    def _metrics(self) -> None:
        snapshot = self._engine.metrics.snapshot()
        if self._transfers is not None:
            snapshot |= self._transfers.snapshot()
        self._link.send(["metrics", snapshot])


def _start_server(
    listeners: Listeners, link: socket.socket, last_word: socket.socket
) -> subprocess.Popen[bytes]:
    fds = [link.fileno(), last_word.fileno()]
    flags = ["--engine-fd", str(fds[0]), "--last-word-fd", str(fds[1])]
    for flag, taken in (("--listen-fds", listeners.clients), ("--admin-fds", listeners.admin)):
        numbers = [listener.fileno() for listener in taken]
        flags, fds = [*flags, flag, *map(str, numbers)], [*fds, *numbers]
    command, folder = children.command("shared.server.api.service", *flags), children.FOLDER
    with block_stop_signals():
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=children.environment(),
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
        )
    link.close()
    last_word.close()
    listeners.close()
    return child


def _end_child(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait(CHILD_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _after_server(child: subprocess.Popen[bytes], engine: HostEngine, watchdog: Watchdog) -> int:
    code = _end_child(child)
    with watchdog.watched():
        engine.close()
    if code == EXIT_REFUSED:  # the server has printed the reason
        return EXIT_REFUSED
    ending = (
        f"was terminated by {signal.Signals(-code).name}"
        if code < 0
        else f"exited with code {code}"
    )
    log.error("the HTTP server process %s", ending)
    return EXIT_FAILED
