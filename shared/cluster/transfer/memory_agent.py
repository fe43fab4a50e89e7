"""NIXL agent: transfers between registered host memory of two servers.

The package `nixl` is an extra and imports torch. Its backend UCX selects the transport: shared
memory, TCP, InfiniBand or RoCE.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from struct import Struct
from typing import Any

import numpy as np

from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import LOST, TransferError

LIBRARY = "nixl"
OFFER = Struct("<Q")
"""Address of the memory in its process; the agent's metadata follow in an offer."""

MAX_OFFER_BYTES = 1 << 20
POLL_S = 0.0002
_DONE, _RUNNING, _MEMORY = "DONE", "PROC", "DRAM"


class MemoryAgent:
    """Agent of a process; any thread may call its methods.

    Raises:
      ModuleNotFoundError: The package `nixl` is not installed.
    """

    def __init__(self) -> None:
        api = import_module(f"{LIBRARY}._api")
        name = f"tandem-{secrets.token_hex(8)}"
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()
        self._unfinished: list[tuple[Any, Any, memoryview]] = []

    @contextlib.contextmanager
    def offered(self, body: memoryview) -> Iterator[bytes]:
        """Registers memory, and yields the offer with which another agent can read it.

        Raises:
          TransferError: The memory cannot be registered.
        """
        with _converted(), self._lock:
            memory = self._register(body)
            metadata = self._agent.get_partial_agent_metadata(memory, inc_conn_info=True)
        try:
            yield OFFER.pack(_address(body)) + metadata
        finally:
            with _converted(), self._lock:
                self._agent.deregister_memory(memory)

    def read(self, offer: bytes, body: memoryview, deadline: Deadline) -> None:
        """Fills a buffer from the memory of an offer, which has the same size.

        Raises:
          TransferError: The other agent has failed, or see `Deadline.remaining_s`.
        """
        with _converted(), self._lock:
            self._release_finished()
            memory = self._register(body)
        transfer = None
        try:
            with _converted(), self._lock:
                transfer = self._read_of(offer, memory, body.nbytes)
            self._wait(transfer, deadline)
        finally:
            with self._lock:
                self._unfinished.append((transfer, memory, body))
                self._release_finished()

    def _register(self, body: memoryview) -> Any:
        return self._agent.register_memory([(_address(body), body.nbytes, 0, "")], _MEMORY)

    def _read_of(self, offer: bytes, memory: Any, num_bytes: int) -> Any:
        (address,) = OFFER.unpack_from(offer)
        peer = self._agent.add_remote_agent(offer[OFFER.size :])
        # The library serializes descriptors with pickle, which must not read foreign bytes.
        remote = self._agent.get_xfer_descs([(address, num_bytes, 0)], _MEMORY)
        return self._agent.initialize_xfer("READ", memory.trim(), remote, peer)

    def _wait(self, transfer: Any, deadline: Deadline) -> None:
        with _converted(), self._lock:
            state = self._agent.transfer(transfer)
        while state == _RUNNING:
            time.sleep(min(POLL_S, deadline.remaining_s()))
            with _converted(), self._lock:
                state = self._agent.check_xfer_state(transfer)
        if state != _DONE:
            raise TransferError(LOST, f"NIXL reports the state {state}")

    def _release_finished(self) -> None:
        """Releases transfers, except those that still write to their memory."""
        kept = []
        for transfer, memory, body in self._unfinished:
            try:
                if transfer is not None:
                    self._agent.release_xfer_handle(transfer)
                self._agent.deregister_memory(memory)
            except Exception:  # errors of the library have no common class
                kept.append((transfer, memory, body))
        self._unfinished = kept


def _address(body: memoryview) -> int:
    return np.frombuffer(body, np.uint8).ctypes.data


@contextlib.contextmanager
def _converted() -> Iterator[None]:
    """Converts errors of the library, which have no common class, to `TransferError`."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(LOST, f"NIXL failed: {error}") from error
