"""Engine on its own thread, for callers in the same process."""

from __future__ import annotations

import os
import queue
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shared.engine.request import Event, InvalidRequestError, Request
from shared.process import gc_freeze
from shared.process.grammars import GrammarQueue
from shared.process.ipc_messages import ServerInfo
from shared.process.loop import HostEngine
from shared.text.tokenizer import Tokenizer

COMPILING_WAIT_S = 0.002  # the end of a grammar compilation sends no message
RELEASE_WAIT_S = 10.0
"""Longest wait for an unclosed engine to end its step and free its memory."""

Sink = Callable[[Event | Exception], None]
"""Receives the events of a request, or the error that ends it."""


@dataclass(frozen=True)
class Started:
    """Started engine, created on the thread that drives it.

    Attributes:
      engine: Engine; the thread closes it at the end.
      grammars: Compiler of request grammars; None if structured output is off.
      facts: Model facts and limits that requests are validated against.
      tokenizer: Tokenizer; None if the checkpoint has none.
    """

    engine: HostEngine
    grammars: GrammarQueue | None
    facts: ServerInfo
    tokenizer: Tokenizer | None


class EngineThread:
    """Drives an engine on one thread, including its startup.

    The thread has no reference to this object. An unclosed engine is therefore closed when the
    object is freed or when the interpreter exits. A forked process does not have the thread, so
    every call there raises an error.

    Args:
      start: Creates the engine. It must not refer to the owner of this object.

    Raises:
      ValueError: The startup check failed. Any other error of `start` is raised unchanged.
    """

    def __init__(self, start: Callable[[], Started]) -> None:
        self._pid, self._loop = os.getpid(), _EngineLoop()
        self._thread = threading.Thread(
            target=self._loop.run, args=(start,), name="tandem-engine", daemon=True
        )
        self._unclosed = weakref.finalize(self, _release, self._loop, self._thread, self._pid)
        self._thread.start()
        started = self._loop.started.get()
        if isinstance(started, BaseException):
            self._unclosed.detach()
            raise started
        self.facts, self.tokenizer = started

    def __del__(self) -> None:
        unclosed = getattr(self, "_unclosed", None)
        if unclosed is not None and unclosed.alive and self.is_own:
            warnings.warn("an LLM was not closed; use `with` or close()", ResourceWarning, 2)

    @property
    def is_own(self) -> bool:
        """Returns whether the engine runs in this process and not in the one it was forked from."""
        return os.getpid() == self._pid

    @property
    def is_open(self) -> bool:
        """Returns whether the engine runs in this process and has not been closed."""
        return self._unclosed.alive and self.is_own

    @property
    def num_requests(self) -> int:
        """Number of requests whose last event has not been delivered."""
        return len(self._loop.sinks)

    def check_process(self) -> None:
        """Raises a RuntimeError in a process that was forked from the engine's."""
        if not self.is_own:
            raise RuntimeError(
                f"the engine runs in process {self._pid}, and process {os.getpid()} was forked "
                "from it: create the LLM in the process that uses it, or start processes with spawn"
            )

    def add(self, request: Request, sink: Sink) -> None:
        """Submits a request; `sink` is called on the engine's thread.

        Raises:
          RuntimeError: The engine has ended, or runs in another process.
        """
        self.check_process()
        self._loop.add(request, sink)

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request whose output stops after `num_tokens` tokens; no event follows."""
        self._loop.inbox.put(partial(self._loop.finish, request_id, num_tokens))

    def abort(self, request_id: int) -> None:
        """Aborts a request if the engine is open; no event follows."""
        if self.is_open:  # a stream may be freed after the interpreter has exited
            self._loop.inbox.put(partial(self._loop.abort, request_id))

    def close(self) -> None:
        """Ends all requests and the engine; a second call does nothing.

        Raises:
          RuntimeError: The engine runs in another process.
        """
        self.check_process()
        self._unclosed.detach()
        self._loop.inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _release(loop: _EngineLoop, thread: threading.Thread, pid: int) -> None:
    """Ends an unclosed engine; does nothing in a forked process."""
    if os.getpid() != pid:
        return
    loop.inbox.put(None)
    if threading.current_thread() is not thread:
        thread.join(RELEASE_WAIT_S)


class _EngineLoop:
    """Loop of the engine's thread.

    Attributes:
      inbox: Functions to call between two steps; None ends the engine.
      started: Receives the facts and the tokenizer, or the error of the startup.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.started: queue.SimpleQueue[tuple[ServerInfo, Tokenizer | None] | BaseException]
        self.started = queue.SimpleQueue()
        # One sink for each accepted request. After the end `add` raises an error, because the
        # inbox is no longer read.
        self.sinks: dict[int, Sink] = {}
        self._is_over, self._taking = False, threading.Lock()
        self._fault: Exception | None = None

    def add(self, request: Request, sink: Sink) -> None:
        """Submits a request from any thread; see `EngineThread.add`."""
        with self._taking:
            if self._is_over:
                raise RuntimeError("the engine has ended") from self._fault
            self.sinks[request.request_id] = sink
        self.inbox.put(partial(self._add, request))

    def run(self, start: Callable[[], Started]) -> None:
        """Starts the engine and drives it until the inbox contains None."""
        try:
            started = start()
        except BaseException as error:  # raised again by the constructor, on the caller's thread
            self.started.put(error)
            return
        self._engine, self._grammars = started.engine, started.grammars
        self.started.put((started.facts, started.tokenizer))
        del started  # no reference may outlive the engine
        try:
            while self._take_messages():
                self._step()
        except Exception as error:  # a failure of the engine fails all requests
            self._fault = error
        self._end()
        if self._fault is not None:  # its frames refer to the engine
            traceback.clear_frames(self._fault.__traceback__)
        del self._engine, self._grammars
        gc_freeze.sweep()

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Ends a request; see `EngineThread.finish`."""
        self.sinks.pop(request_id, None)
        self._engine.finish(request_id, num_tokens)

    def abort(self, request_id: int) -> None:
        """Ends a request; see `EngineThread.abort`."""
        self.sinks.pop(request_id, None)
        if self._grammars is None or not self._grammars.drop(request_id):
            self._engine.abort(request_id)

    def _take_messages(self) -> bool:
        """Runs the functions in the inbox; returns whether the engine continues."""
        is_compiling = self._grammars is not None and self._grammars.busy
        timeout = 0.0 if self._engine.busy else COMPILING_WAIT_S if is_compiling else None
        while True:
            try:
                message = self.inbox.get(timeout != 0.0, timeout)
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
            if (sink := self.sinks.get(event.request_id)) is not None:
                if event.finish_reason is not None:
                    del self.sinks[event.request_id]
                sink(event)

    def _add(self, request: Request) -> None:
        if self._grammars is not None and request.sampling.grammar is not None:
            self._grammars.ask(request)
        else:
            self._add_ready(request, None)

    def _add_ready(self, request: Request, refusal: InvalidRequestError | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            self._engine.add(request)
        except InvalidRequestError as error:
            self.sinks.pop(request.request_id)(error)

    def _end(self) -> None:
        with self._taking:
            self._is_over = True
        reason = RuntimeError("the engine has ended")
        reason.__cause__ = self._fault
        for sink in self.sinks.values():
            sink(reason)
        self.sinks.clear()
        if self._grammars is not None:
            self._grammars.close()
        self._engine.close()
