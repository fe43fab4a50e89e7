"""Worker process of a rank other than 0: `python -m shared.process.tp.worker MODULE RANK COUNT`.

It starts as rank 0 (the driver) does, with the same flags, creates its own backend, and then
receives only `prepare`, step plans and `close`. It has no engine, serves no request and ends with
rank 0.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int32

from shared import children
from shared.boundary.backend import Backend, StepFuture
from shared.boundary.buffers import plan_in
from shared.boundary.program import Program
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.options.options import Options
from shared.process import gc_freeze
from shared.process.device import Device
from shared.process.model_check import check_worker
from shared.process.start import Platform, ValidatedStartup, plan_start
from shared.process.tp.digest import digest_of
from shared.process.tp.plan_broadcast import EXCHANGE_S
from shared.process.tp.shm_ring_buffer import Reader
from shared.process.tp.worker_connection import BEAT_S, Link, LinkEndedError, boot
from shared.process.tp.workers import LOADED, PREPARING, SERVING

LOOK_S = 0.002
"""Time to spin for the next plan before sleeping, on a GPU host; on a CPU the steps need the
cores."""

REPORT_S = 0.2  # between two progress reports
EXIT_LOST, EXIT_FAILED = 3, 1


class _Ended(Exception):
    """Rank 0 has requested the end, or has ended."""


class Rank:
    """Main loop of a worker rank: start, preparation, steps and end."""

    def __init__(self, link: Link, rank: int, count: int) -> None:
        self._link, self._rank, self._count = link, rank, count
        self._messages: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._flights: queue.SimpleQueue[StepFuture | None] = queue.SimpleQueue()
        self.taken = self.ended = 0
        self._shm_all_gather: ShmAllGather | None = None
        self._is_on_gpu = False

    def run(self, module: str) -> None:
        """Starts, serves, and ends when rank 0 requests it.

        Raises:
          _Ended: Rank 0 is gone.
        """
        threading.Thread(target=self._live, name="life", daemon=True).start()
        try:
            platform: Platform = import_module(module).PLATFORM
            start = self._start(platform)
        except ValueError as error:
            self._link.send("refused", str(error))
            self._wait_for_end()
        self._serve(self._load(start, platform))

    def _start(self, platform: Platform) -> ValidatedStartup:
        self._at("planning")
        (values,) = self._next("options")
        options = Options.from_values(values)
        checked = check_worker(options, platform.open_checkpoint)
        start = plan_start(checked, replace(platform, find_device=lambda: self._device(platform)))
        self._link.send("planned", digest_of(start))
        return start

    def _device(self, platform: Platform) -> Device:
        """Returns this rank's device, with the free memory of the rank that has least."""
        found = platform.find_device()
        self._is_on_gpu = found.kind == "gpu"
        self._link.send("device", boot(), found.kind, found.name, found.free_bytes)
        (free_bytes,) = self._next("memory")
        return replace(found, free_bytes=free_bytes)

    def _load(self, start: ValidatedStartup, platform: Platform) -> Backend:
        ring, reader, boxes, meeting = self._next("share")
        self._reader = self._open(ring, reader)
        self._shm_all_gather = None if boxes is None else ShmAllGather(*boxes)
        self._at("loading")
        reported = loaded = 0.0

        def report(num_bytes: int) -> None:
            nonlocal reported, loaded
            loaded += num_bytes
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                self._link.send("loaded", int(loaded))

        ranks = TPGroup(self._rank, self._count, self._shm_all_gather, meeting)
        backend = start.of_rank(ranks).load(platform, report)
        self._link.send("loaded", int(loaded))
        self._at(LOADED)
        return backend

    @staticmethod
    def _open(path: str | None, reader: int) -> Reader | None:
        if path is None:
            return None
        descriptor = os.open(path, os.O_RDWR)
        try:
            return Reader(descriptor, reader)
        finally:
            os.close(descriptor)

    def _serve(self, backend: Backend) -> None:
        programs, begun = backend.capacity.programs, 0
        (indices,) = self._next("prepare")
        self._at(PREPARING)

        def report_progress(program: Program) -> None:
            nonlocal begun
            begun += 1
            self._link.send("began", begun)

        backend.prepare([programs[index] for index in indices], report_progress)
        if self._shm_all_gather is not None:
            self._shm_all_gather.wait_s = EXCHANGE_S
        gc_freeze.freeze_gc()
        retiring = threading.Thread(target=self._retire, name="results", daemon=True)
        retiring.start()
        self._at(SERVING)
        for message in self._plans():
            program = programs[message[0]]
            self._flights.put(backend.submit(plan_in(message[1:], program, backend.capacity)))
            self.taken += 1
        self._flights.put(None)
        retiring.join()
        backend.close()

    def _plans(self) -> Iterator[Int32[np.ndarray, " words"]]:
        """Yields every step plan, up to the number that `close` gives."""
        last: int | None = None
        while last is None or self.taken < last:
            message = None
            if self._reader is not None:
                message = self._reader.look(LOOK_S if self._is_on_gpu else 0.0)
                message = self._reader.fall_asleep() if message is None else message
            if message is not None:
                yield message
                continue
            kind, *fields = self._hear()
            if self._reader is not None:
                self._reader.wake_up()
            if kind == "step":
                yield np.frombuffer(fields[0], np.int32)
            elif kind == "close":
                (last,) = fields

    def _retire(self) -> None:
        """Waits for the end of each step, so that a failed step is reported at once."""
        while (flight := self._flights.get()) is not None:
            try:
                flight.result()
            except BaseException as error:
                self.fail(error)
            self.ended += 1

    def fail(self, error: BaseException) -> NoReturn:
        """Reports the error to rank 0 and ends the process."""
        traceback.print_exception(error)
        self._link.send("beat", self.taken, self.ended)
        self._link.send("failed", f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    def _at(self, phase: str) -> None:
        self._link.send("phase", phase)

    def _next(self, kind: str) -> list[Any]:
        """Returns the fields of the next message, which must be of this kind."""
        came, *fields = self._hear()
        if came == "close":
            raise _Ended
        if came != kind:
            raise RuntimeError(f"rank 0 must send {kind!r}, got {came!r}")
        return fields

    def _hear(self) -> list[Any]:
        while self._messages.empty():
            try:
                for message in self._link.receive(None):
                    self._messages.put(message)
            except LinkEndedError as error:
                raise _Ended from error
        return self._messages.get()

    def _wait_for_end(self) -> NoReturn:
        while True:
            self._hear()

    def _live(self) -> None:
        """Sends a heartbeat once a second, and ends the process at once when rank 0 has ended.

        The main thread may be compiling, or waiting for a step that never ends.
        """
        while not self._link.ends_within(BEAT_S):
            self._link.send("beat", self.taken, self.ended)
        os._exit(EXIT_LOST)


def main(argv: Sequence[str]) -> int:
    """Runs a worker rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("rank", type=int)
    parser.add_argument("count", type=int)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--fd", type=int, help="of a socket that was inherited")
    how.add_argument("--connect", help="host:port to call, with the word that stdin holds")
    flags = parser.parse_args(argv)
    children.set_parent_death_signal()
    connection = socket.socket(fileno=flags.fd) if flags.fd else _call(flags.connect)
    rank = Rank(Link(connection), flags.rank, flags.count)
    try:
        rank.run(flags.module)
    except _Ended:
        return EXIT_LOST
    except Exception as error:  # any error is reported by rank 0
        rank.fail(error)
    return 0


def _call(address: str) -> socket.socket:
    """Connects to the engine process and authenticates with the token from stdin."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(sys.stdin.readline().strip().encode())
    return connection


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
