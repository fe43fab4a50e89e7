"""Requests added to an engine thread during its shutdown, and after it."""

import queue
import threading
from typing import Any, cast

import pytest

from shared.engine.request import Request, SamplingParams
from shared.offline.engine_thread import EngineThread, Started


class Engine:
    """Idle engine; `add` and `close` block until the test releases them."""

    busy = False

    def __init__(self) -> None:
        self.is_adding, self.may_add = threading.Event(), threading.Event()
        self.is_ending, self.may_end = threading.Event(), threading.Event()
        self.thread = EngineThread(lambda: Started(cast(Any, self), None, cast(Any, None), None))

    def add(self, request: Request) -> None:
        self.thread.close()  # called on the engine's own thread: requests the end without waiting
        self.is_adding.set()
        self.may_add.wait(10)

    def close(self) -> None:
        self.is_ending.set()
        self.may_end.wait(10)


def request(number: int) -> Request:
    return Request(request_id=number, prompt=(1,), sampling=SamplingParams(max_tokens=1))


def test_engine_thread_add_during_shutdown_reports_end():
    engine, events = Engine(), queue.SimpleQueue()
    engine.thread.add(request(1), events.put)
    assert engine.is_adding.wait(10)
    engine.thread.add(request(2), events.put)
    engine.may_add.set()
    assert [str(events.get(timeout=10)) for _ in range(2)] == ["the engine has ended"] * 2
    assert engine.is_ending.wait(10)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        engine.thread.add(request(3), events.put)
    engine.may_end.set()
    engine.thread.close()
