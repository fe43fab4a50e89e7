"""LoRA adapters that are loaded and unloaded while the engine serves; see the admin routes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn

from shared.engine.adapter_slots import AdapterSlots, HostAdapter
from shared.engine.request import InvalidRequestError, Request
from shared.process.adapters import AdapterReader

Orders = SimpleQueue[tuple[Future[HostAdapter], AdapterReader, str, str]]
NO_READER = (
    "LoRA is off; start the server with --lora-paths, or with --max-lora-rank and "
    "--lora-target-modules all"
)


class AdapterHandler:
    """Handles the adapter messages of the admin routes.

    Files are read on a thread, and the adapter is added between two steps. Each reply has the
    ticket of its request. The thread is a daemon, so the end of the process does not wait for it.

    Args:
      slots: Adapters of the engine.
      reader: Reader of files; None without LoRA.
    """

    def __init__(self, slots: AdapterSlots, reader: AdapterReader | None) -> None:
        self._slots, self._reader = slots, reader
        self._orders: Orders = SimpleQueue()
        self._reading: list[tuple[int, Future[HostAdapter]]] = []
        self._leaving: list[tuple[int, str]] = []
        self._answers: list[list[Any]] = []
        if reader is not None:
            threading.Thread(target=_read, args=[self._orders], daemon=True).start()

    @property
    def busy(self) -> bool:
        """True while an adapter is read or waits for its requests to end."""
        return bool(self._reading or self._leaving)

    def assign(self, request: Request) -> None:
        """Sets the adapter of a new request.

        Raises:
          InvalidRequestError: The adapter that it names is not loaded.
        """
        if request.sampling.lora:
            request.adapter = self._slots.find(request.sampling.lora)

    def load(self, ticket: int, name: str, folder: str) -> None:
        """Starts to read an adapter."""
        if self._reader is None:
            self._refuse(ticket, InvalidRequestError("lora_name", NO_READER))
            return
        read: Future[HostAdapter] = Future()
        self._reading.append((ticket, read))
        self._orders.put((read, self._reader, name, folder))

    def unload(self, ticket: int, name: str) -> None:
        """Removes an adapter; the reply follows once its requests have ended."""
        try:
            self._slots.remove(name)
        except InvalidRequestError as refusal:
            self._refuse(ticket, refusal)
        else:
            self._leaving.append((ticket, name))

    def answers(self) -> list[list[Any]]:
        """Adds the adapters that were read, and returns the pending replies."""
        reading, self._reading = self._reading, []
        for ticket, read in reading:
            if not read.done():
                self._reading.append((ticket, read))
                continue
            try:
                self._slots.add(adapter := read.result())
            except InvalidRequestError as refusal:
                self._refuse(ticket, refusal)
            else:
                self._list(ticket, adapter.notes)
        leaving, self._leaving = self._leaving, []
        for ticket, name in leaving:
            if self._slots.is_removed(name):
                self._list(ticket)
            else:
                self._leaving.append((ticket, name))
        due, self._answers = self._answers, []
        return due

    def _list(self, ticket: int, notes: Sequence[str] = ()) -> None:
        found = {"folders": {**self._slots.folders}, "notes": [*notes]}
        self._answers.append(["reply", ticket, found, None, None])

    def _refuse(self, ticket: int, refusal: InvalidRequestError) -> None:
        self._answers.append(["reply", ticket, {}, str(refusal), refusal.field])


def _read(orders: Orders) -> NoReturn:
    """Reads adapters one after the other, forever."""
    while True:
        read, reader, name, folder = orders.get()
        try:
            read.set_result(reader.read(name, folder))
        except (OSError, ValueError) as error:
            read.set_exception(InvalidRequestError("lora_path", str(error)))
        except Exception as error:  # raised in the engine's thread when it reads the result
            read.set_exception(error)
