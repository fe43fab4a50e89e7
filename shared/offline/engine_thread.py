"""The engine on a thread of its own, for callers in the same process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.request import Event, Refusal, Request
from shared.process.grammars import Grammars
from shared.process.loop import HostEngine

COMPILING_WAIT_S = 0.002  # the end of a grammar's compiling wakes nobody

Sink = Callable[[Event | Exception], None]
"""Hears of a request: its events, or why there will be none."""


@dataclass(frozen=True)
class Started:
    """What the thread drives, made on the thread itself.

    Attributes:
      engine: Closed at the end.
      grammars: Compiles those of requests; None where none can have one.
    """

    engine: HostEngine
    grammars: Grammars | None


class EngineThread:
    """Drives an engine: everything that touches it, its start too, happens on one thread.

    Args:
      start: Makes the engine.

    Raises:
      ValueError: The start was refused; or whatever else `start` raises.
    """

    def __init__(self, start: Callable[[], Started]) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Of all requests that were taken. Who comes once it is over is refused: nobody looks into
        # the inbox any more.
        self._sinks: dict[int, Sink] = {}
        self._is_over, self._taking = False, threading.Lock()
        self._fault: Exception | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start,), name="tandem-engine", daemon=True
        )
        self._thread.start()
        self._is_ready.wait()
        if self._fault is not None:
            raise self._fault

    def add(self, request: Request, sink: Sink) -> None:
        """Takes a request in; `sink` is called on the engine's thread.

        Raises:
          RuntimeError: The engine has ended.
        """
        with self._taking:
            if self._is_over:
                raise RuntimeError("the engine has ended") from self._fault
            self._sinks[request.request_id] = sink
        self._inbox.put(lambda: self._add(request))

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request whose text was found to stop after so many tokens; no event follows."""
        self._inbox.put(lambda: self._finish(request_id, num_tokens))

    def abort(self, request_id: int) -> None:
        """Ends a request that nobody waits for; no event follows."""
        self._inbox.put(lambda: self._abort(request_id))

    def close(self) -> None:
        """Ends every request and the engine; a second call does nothing."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, start: Callable[[], Started]) -> None:
        try:
            started = start()
        except Exception as error:  # whatever it is, the caller's constructor raises it
            self._fault = error
            return
        finally:
            self._is_ready.set()
        self._engine, self._grammars = started.engine, started.grammars
        try:
            while self._take_messages():
                self._step()
        except Exception as error:  # a failure of the engine is every request's
            self._fault = error
        self._end()

    def _take_messages(self) -> bool:
        """Does what was asked since the last step; whether the engine is to go on."""
        is_compiling = self._grammars is not None and self._grammars.busy
        timeout = 0.0 if self._engine.busy else COMPILING_WAIT_S if is_compiling else None
        while True:
            try:
                message = self._inbox.get(timeout != 0.0, timeout)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            timeout = 0.0

    def _step(self) -> None:
        if self._grammars is not None:
            for request, refusal in self._grammars.ready():
                self._add_ready(request, refusal)
        if not self._engine.busy:
            return
        for event in self._engine.step():
            if (sink := self._sinks.get(event.request_id)) is not None:
                if event.finish_reason is not None:
                    del self._sinks[event.request_id]
                sink(event)

    def _add(self, request: Request) -> None:
        if self._grammars is not None and request.sampling.grammar is not None:
            self._grammars.ask(request)
        else:
            self._add_ready(request, None)

    def _add_ready(self, request: Request, refusal: Refusal | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            self._engine.add(request)
        except Refusal as error:
            self._sinks.pop(request.request_id)(error)

    def _finish(self, request_id: int, num_tokens: int) -> None:
        self._sinks.pop(request_id, None)
        self._engine.finish(request_id, num_tokens)

    def _abort(self, request_id: int) -> None:
        self._sinks.pop(request_id, None)
        if self._grammars is None or not self._grammars.drop(request_id):
            self._engine.abort(request_id)

    def _end(self) -> None:
        with self._taking:
            self._is_over = True
        reason = RuntimeError("the engine has ended")
        reason.__cause__ = self._fault
        for sink in self._sinks.values():
            sink(reason)
        self._sinks.clear()
        if self._grammars is not None:
            self._grammars.close()
        self._engine.close()
