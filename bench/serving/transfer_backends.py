"""Bandwidth of the transfer backends of KV cache records between two processes of this host.

    python -m bench.serving.transfer_backends --mib 1 16 256 --out FILE

The receiver fetches records and reads them into memory that exists, as an import does. With shm the
pages of a record are mapped when they are read, so both times are reported. With tcp both processes
use the loopback interface, which no network limits. With nixl the library selects the path within
the host, and each fetch registers the memory of both sides. Backends alternate.
Results are medians.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.environment import write_results
from shared.boundary.kv_transfer import copy_words
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.memory_agent import MemoryAgent
from shared.cluster.transfer.record_client import NIXL, RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.cluster.transfer.ticket import Ticket

SECRET = b"0123456789abcdef"
HOST, MIB, LIMIT_S = "127.0.0.1", 1 << 20, 300.0
BACKENDS = ("shm", "tcp", "nixl")


def _agent(is_used: bool) -> MemoryAgent | None:
    return MemoryAgent() if is_used else None


def _publish(link: Connection, size: int, has_nixl: bool) -> None:
    """Process of the sender: publishes a record for each request until the link closes."""
    store = RecordStore(2 * size, LIMIT_S)
    listener = socket.create_server((HOST, 0))
    server = RecordServer(store, [listener], SECRET, TransferCounters(), _agent(has_nixl))
    body = np.random.default_rng(0).integers(0, 1 << 31, size // 4, np.int32)
    while link.recv():
        began = time.perf_counter()
        memory = store.allocate(size)
        copy_words(np.frombuffer(memory.body, np.int32), body)
        ticket_id, record = store.publish(b"", {}, memory, 0)
        seconds = time.perf_counter() - began
        link.send((server.ticket(ticket_id, record).to_fields(), seconds))
    server.close()


def measure(backends: Sequence[str], size: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the times of each backend for records of a size in bytes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sender = spawn.Process(target=_publish, args=[theirs, size, NIXL in backends])
    sender.start()
    clients = {
        name: RecordClient(name, SECRET, size, TransferCounters(), _agent(name == NIXL))
        for name in backends
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in backends}
    into = np.zeros(size, np.uint8)
    try:
        for number in range(rounds + 1):
            for name, client in clients.items():
                times = _once(ours, client, into)
                if number:  # the first round warms up
                    found[name].append(times)
    finally:
        ours.send(False)
        sender.join(10)
        for client in clients.values():
            client.close()
    return [_row(name, size, times) for name, times in found.items()]


def _once(link: Connection, client: RecordClient, into: np.ndarray) -> tuple[float, float, float]:
    """Returns the seconds to publish, to fetch, and to fetch and read a record."""
    link.send(True)
    fields, publish_s = link.recv()
    began = time.perf_counter()
    record = client.fetch(Ticket.from_fields(fields, HOST), Deadline(LIMIT_S))
    fetched = time.perf_counter()
    into[:] = np.frombuffer(record.body, np.uint8)
    read = time.perf_counter()
    record.release()
    return publish_s, fetched - began, read - began


def _row(backend: str, size: int, times: list[tuple[float, float, float]]) -> dict[str, Any]:
    publish_s, fetch_s, read_s = np.median(times, axis=0).tolist()
    return {
        "backend": backend,
        "mib": size / MIB,
        "publish_ms": round(1000 * publish_s, 3),
        "fetch_ms": round(1000 * fetch_s, 3),
        "fetch_and_read_ms": round(1000 * read_s, 3),
        "gb_per_s": round(size / read_s / 1e9, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes what was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.serving.transfer_backends")
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 256], help="record sizes")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(words)
    rows = []
    for mib in options.mib:
        for row in measure(options.backends, int(mib * MIB), options.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        command = shlex.join(["python", "-m", "bench.serving.transfer_backends", *words])
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        found = {"command": command, "versions": versions, "cores": os.cpu_count()}
        write_results(options.out, found | {"load": os.getloadavg(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
