"""The engine's process: runs the engine on one thread and talks to the HTTP server's process.

The server is a child with an inherited socket. The loop reads requests between two steps and sends
one frame a step; it never waits on a full socket. When one process ends, the other one ends too:
each sees the end of the socket.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from shared import children
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Event, Refusal, Request
from shared.process import logs
from shared.process.address import Listeners
from shared.process.corpora import Corpora
from shared.process.grammars import Grammars
from shared.process.ipc_messages import (
    FrameReader,
    ModelFacts,
    event_to_row,
    pack,
    requests_of,
)
from shared.process.logs import log
from shared.process.signals import StopSignals, held_back
from shared.process.watchdog import EXIT_FAILED, Watchdog

IDLE_WAIT_S = 1.0  # the socket and signals wake an idle engine; this bounds a missed one
BUILDING_WAIT_S = 0.05  # the end of a corpus's building wakes nobody
COMPILING_WAIT_S = 0.002  # nor does that of a grammar's compiling, which takes about as long
BEAT_S = 1.0  # between two snapshots of the metrics that nobody asked for
SILENCE_GRACE_S = 5.0  # the watchdog of this process speaks first
FAREWELL_S = 1.0  # for the last frame to leave
CHILD_END_S = 3.5  # for the server to end by itself; all in all below 5 s
RECEIVE_BYTES = 1 << 18
MOST_BYTES = 1 << 21  # read between two steps: pictures are large, and others have answers to get
PART_WAIT_S = 0.001  # for more of a message that is longer than the socket holds
EXIT_REFUSED = 2


class Metrics(Protocol):
    """Counters and gauges of an engine."""

    def snapshot(self) -> dict[str, float]:
        """Values by name."""
        ...


class HostEngine(Protocol):
    """What this process needs of an engine (`shared.engine.engine.Engine` is one)."""

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges that the server process shows at `/metrics`."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def add(self, request: Request) -> None:
        """Takes a request in, or raises `Refusal`."""
        ...

    def abort(self, request_id: int) -> None:
        """Ends a request that nobody waits for; no event follows.

        It may have ended while the message was on its way, and stays ended then.
        """
        ...

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request whose text stopped after `num_tokens` tokens; the rest as `abort`."""
        ...

    def step(self) -> list[Event]:
        """Submits a step and retires the oldest beyond the overlap; the events of that one."""
        ...

    def close(self) -> None:
        """Ends the device's work."""
        ...


def run(
    engine: HostEngine,
    facts: ModelFacts,
    listeners: Listeners,
    index: NgramIndex | None,
    watchdog: Watchdog,
    drain_timeout_s: float,
    grammars: Grammars | None = None,
) -> int:
    """Serves until a signal, a failure, or the end of the server's process; ends both processes.

    After SIGTERM open requests may end within `drain_timeout_s`, and no new ones are taken; a
    second SIGTERM, SIGINT and the other `STOP_SIGNALS` end at once.

    Args:
      engine: Closed at the end.
      facts: Sent to the server first.
      listeners: What `address.open_listeners` gave; handed to the server.
      index: What drafts from external corpora; None where the drafter is another.
      watchdog: Ends both processes where a step does not end.
      drain_timeout_s: As above.
      grammars: Compiles those of requests; None where none can have one.

    Returns:
      The exit code: 0 after a signal, 2 where the server refused to start, else 1.
    """
    logs.set_up(facts.observing)
    stop = StopSignals(drain_timeout_s)
    facts = replace(facts, silence_s=watchdog.timeout_s + SILENCE_GRACE_S)
    ours, theirs = socket.socketpair()
    child = _start_server(listeners, theirs, stop.last_word)
    link = _Link(ours)
    link.send(facts.to_message())
    watchdog.start(stop.wait_for_end, partial(_end_at_once, link, child, stop))
    try:
        _Loop(engine, link, Corpora(index), watchdog, grammars).run(stop)
        reason, failed = stop.reason, False
    except _ServerEnded:
        return _after_server(child, engine, watchdog)
    except Exception as error:  # any failure of the engine ends the service, with its reason
        watchdog.claim_end()
        reason, failed = f"the engine failed: {type(error).__name__}: {error}", True
        log.exception(reason)
    link.farewell(["end", reason, failed])
    _end_child(child)
    with watchdog.watched():
        engine.close()
    return EXIT_FAILED if failed else 0


def _end_at_once(
    link: _Link, child: subprocess.Popen[bytes], stop: StopSignals, failure: str | None
) -> None:
    """Ends both processes from another thread, while the engine's own waits for the device."""
    reason, failed = failure or stop.reason, failure is not None
    log.log(logging.ERROR if failed else logging.INFO, reason)
    link.farewell(["end", reason, failed])
    _end_child(child)
    os._exit(EXIT_FAILED if failed else 0)


class _ServerEnded(Exception):
    """The server's end of the socket is closed."""


class _Link:
    """The socket to the server; sending never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._unsent = bytearray()

    def wait(self, timeout_s: float, other: socket.socket) -> None:
        """Waits until a message, room to send, or what wakes by `other` is there."""
        writers = [self._socket] if self._unsent else []
        readable, _, _ = select.select([self._socket, other], writers, [], timeout_s)
        if other in readable:
            other.recv(RECEIVE_BYTES)
        self._flush()

    def read(self) -> Iterator[list[Any]]:
        """Messages that have arrived; what is longer than `MOST_BYTES` takes several calls.

        Raises:
          _ServerEnded: Nothing will arrive any more.
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
        """Whether more of a message comes at once; else it would come a socket's room a step."""
        return bool(select.select([self._socket], [], [], PART_WAIT_S)[0])

    def send(self, message: list[Any]) -> None:
        """Sends what the socket takes now and keeps the rest."""
        self._unsent += pack(message)
        self._flush()

    def farewell(self, message: list[Any]) -> None:
        """Sends a last message, with some patience, and closes."""
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
        except OSError:  # `read` reports the end of the server, after what it still sent
            self._unsent.clear()


class _Loop:
    """Messages in, steps, one frame a step out."""

    def __init__(
        self,
        engine: HostEngine,
        link: _Link,
        corpora: Corpora,
        watchdog: Watchdog,
        grammars: Grammars | None,
    ) -> None:
        self._engine, self._link, self._grammars = engine, link, grammars
        self._corpora, self._watchdog = corpora, watchdog
        self._drains, self._is_drained = False, False
        self._next_beat = 0.0
        self._handlers = {
            "add": self._add,
            "abort": self._abort,
            "finish": engine.finish,
            "metrics": self._metrics,
            "corpus_add": self._corpora.add,
            "corpus_remove": self._corpora.remove,
            "corpus_list": self._corpora.list,
            "drained": self._end_drain,
        }

    def run(self, stop: StopSignals) -> None:
        """Returns when stopped.

        Raises:
          _ServerEnded: The server's process is gone.
        """
        while not (stop.ends or self._is_drained):
            self._beat()
            self._link.wait(self._patience_s(), stop.readable)
            if stop.drains and not self._drains:
                self._drains = True
                self._link.send(["drain", stop.drain_timeout_s])
            for kind, *fields in self._link.read():
                self._handlers[kind](*fields)
            for answer in self._corpora.answers():
                self._link.send(answer)
            if self._grammars is not None:
                for request, refusal in self._grammars.ready():
                    self._add_ready(request, refusal)
            if self._engine.busy:
                with self._watchdog.watched():
                    events = self._engine.step()
                self._send(events)

    def _beat(self) -> None:
        """Says that the engine goes on, and how it stands."""
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
        return BUILDING_WAIT_S if self._corpora.busy else IDLE_WAIT_S

    def _send(self, events: list[Event]) -> None:
        if events:
            self._link.send(["step", [event_to_row(event) for event in events]])

    def _add(self, *fields: Any) -> None:
        for request in requests_of(*fields):
            if self._grammars is not None and request.sampling.grammar is not None:
                self._grammars.ask(request)
            else:
                self._add_ready(request, None)

    def _add_ready(self, request: Request, refusal: Refusal | None) -> None:
        """Gives a request to the engine, or says why it has none."""
        try:
            if refusal is not None:
                raise refusal
            self._engine.add(request)
        except Refusal as error:
            self._link.send(["refused", request.request_id, str(error), error.field])

    def _abort(self, request_id: int) -> None:
        if self._grammars is None or not self._grammars.drop(request_id):
            self._engine.abort(request_id)

    def _metrics(self) -> None:
        self._link.send(["metrics", self._engine.metrics.snapshot()])


def _start_server(
    listeners: Listeners, link: socket.socket, last_word: socket.socket
) -> subprocess.Popen[bytes]:
    fds = [link.fileno(), last_word.fileno()]
    flags = ["--engine-fd", str(fds[0]), "--last-word-fd", str(fds[1])]
    for flag, taken in (("--listen-fds", listeners.clients), ("--admin-fds", listeners.admin)):
        numbers = [listener.fileno() for listener in taken]
        flags, fds = [*flags, flag, *map(str, numbers)], [*fds, *numbers]
    command, folder = children.command("shared.server.api.service", *flags), children.FOLDER
    with held_back():
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
    if code == EXIT_REFUSED:  # it has said why
        return EXIT_REFUSED
    ending = (
        f"was terminated by {signal.Signals(-code).name}"
        if code < 0
        else f"exited with code {code}"
    )
    log.error("the HTTP server process %s", ending)
    return EXIT_FAILED
