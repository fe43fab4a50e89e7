"""Helpers of tests with several ranks: their processes, an open stream, and shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.http_fixtures import COMPLETIONS, Server, is_alive

FOLLOWER = "shared.process.tp.worker"
NAMED_S = 60.0
"""Seconds within which a lost rank must be named."""


def ranks_of(server: Server) -> list[int]:
    """The processes of the other ranks, in order."""
    found = {}
    for pid in server.pids()[1:]:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if FOLLOWER in words:
            found[int(words[words.index(FOLLOWER) + 2])] = pid
    return [found[rank] for rank in sorted(found)]


def ended(server: Server, pids: Sequence[int], within_s: float = NAMED_S) -> int:
    """The exit code, once every process is gone, in time."""
    until = time.monotonic() + within_s
    code = server.process.wait(within_s)
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, "a process stays behind"
        time.sleep(0.02)
    server.join_output()
    return code


def steps_of(server: Server) -> float:
    """Steps that rank 0 has submitted."""
    return sum(v for name, v in server.metrics().items() if "engine_steps_total" in name)


def _tokens_of(server: Server) -> float | None:
    """Returns the number of tokens so far, or None if the server has ended."""
    try:
        return server.metrics()["tandem:generation_tokens_total"]
    except httpx.TransportError:
        return None


class OpenStream:
    """A stream that is under way when something happens."""

    def __init__(self, server: Server) -> None:
        self.events: list[dict] = []
        before = _tokens_of(server)
        self._thread = threading.Thread(target=self._read, args=(server,))
        self._thread.start()
        until = time.monotonic() + NAMED_S
        # On a busy machine a rank may fail before the server has reported a token.
        while self._thread.is_alive() and _tokens_of(server) in (before, None):
            assert time.monotonic() < until, "no token comes"
            time.sleep(0.02)

    def _read(self, server: Server) -> None:
        fields = {"prompt": "again and", "max_tokens": 240, "ignore_eos": True}
        self.events = server.stream(COMPLETIONS, **fields)

    def error(self) -> str:
        """Returns the error of the stream when it is cut off, within the time limit."""
        self._thread.join(NAMED_S)
        assert not self._thread.is_alive()
        return self.events[-1]["error"]["message"]
