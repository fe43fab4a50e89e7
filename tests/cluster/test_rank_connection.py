"""Connections of remote ranks: authentication, unknown clients and lost ranks, without Ray."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shared.cluster import rank_connection
from shared.cluster.rank_connection import accept_rank_connection
from shared.options.flags import ConfigError

SECRET = b"0123456789abcdef"
RESET = struct.pack("ii", 1, 0)  # closing sends a reset


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def _is_open(call: socket.socket) -> bool:
    """True if the other end has neither closed nor sent anything."""
    call.settimeout(0.05)
    try:
        assert call.recv(1) == b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_accept_rank_connection_ignores_strangers(listener):
    """Clients are silent, send too little or the wrong secret, reset, or disconnect."""
    with ExitStack() as stack:
        calls = [
            stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(7)
        ]
        silent, little, short, wrong, reset, gone, right = calls
        little.sendall(SECRET[:4])
        short.sendall(b"GET /")
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        reset.close()
        gone.close()

        def call() -> None:
            for part in (SECRET[:7], SECRET[7:] + b"and on"):
                time.sleep(0.2)
                kept.append([_is_open(short), _is_open(little)])
                right.sendall(part)

        kept: list[list[bool]] = []
        threading.Thread(target=call).start()
        began = time.monotonic()
        found = stack.enter_context(
            accept_rank_connection(listener, SECRET, "a host", lambda: None)
        )
        assert time.monotonic() - began < 10
        assert found.getpeername() == right.getsockname()
        assert found.gettimeout() is None
        assert found.recv(99) == b"and on"
        assert kept[1] == [True, True], "the length of the correct prefix is revealed"
        for stranger in (silent, little, short, wrong):
            assert _is_open(stranger) is False, (
                "an unknown client gets an answer, or stays connected"
            )


def test_accept_rank_connection_names_host_of_lost_rank(listener, monkeypatch):
    monkeypatch.setattr(rank_connection, "LOOK_S", 0.05)
    with pytest.raises(ConfigError, match="a rank on a host was terminated by SIGKILL"):
        accept_rank_connection(listener, SECRET, "a host", lambda: "was terminated by SIGKILL")
    monkeypatch.setattr(rank_connection, "CALL_BACK_S", 0.3)
    with (
        socket.create_connection(listener.getsockname()),
        pytest.raises(ConfigError, match="the rank on a host did not connect within 0.3 s"),
    ):
        accept_rank_connection(listener, SECRET, "a host", lambda: None)
