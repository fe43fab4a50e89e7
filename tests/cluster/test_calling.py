"""A rank that calls back is known among strangers; Ray is not needed for it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shared.cluster import calling
from shared.cluster.calling import called_back
from shared.options.options import ConfigError

SECRET = b"0123456789abcdef"
RESET = struct.pack("ii", 1, 0)  # closing sends a reset


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_stranger_that_connects_neither_ends_the_wait_nor_is_answered(listener):
    """One is silent, one says too little, one the wrong words, one resets, one leaves."""
    with ExitStack() as stack:
        calls = [
            stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(6)
        ]
        silent, _, wrong, reset, gone, right = calls
        calls[1].sendall(SECRET[:4])
        wrong.sendall(b"GET /")
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        reset.close()
        gone.close()

        def call() -> None:
            for part in (SECRET[:7], SECRET[7:] + b"and on"):
                time.sleep(0.2)
                right.sendall(part)

        threading.Thread(target=call).start()
        began = time.monotonic()
        found = stack.enter_context(called_back(listener, SECRET, "a host", lambda: None))
        assert time.monotonic() - began < 10
        assert found.getpeername() == right.getsockname()
        assert found.gettimeout() is None
        assert found.recv(99) == b"and on"
        assert wrong.recv(1) == b"", "a stranger is answered, or kept"
        assert silent.recv(1) == b"", "a stranger is kept"


def test_a_rank_that_ends_or_does_not_call_is_named_by_its_host(listener, monkeypatch):
    monkeypatch.setattr(calling, "LOOK_S", 0.05)
    with pytest.raises(ConfigError, match="a rank on a host was ended by SIGKILL"):
        called_back(listener, SECRET, "a host", lambda: "was ended by SIGKILL")
    monkeypatch.setattr(calling, "CALL_BACK_S", 0.3)
    with (
        socket.create_connection(listener.getsockname()),
        pytest.raises(ConfigError, match="the rank on a host did not call back within 0.3 s"),
    ):
        called_back(listener, SECRET, "a host", lambda: None)
