"""Latency and throughput of the router relative to a server without it, measured in turn.

    python -m bench.serving.router_overhead --streams 1 8 32 256 --out FILE

Each stream sends one request after the other. Streams start at different times, so that requests
arrive evenly. By default the server has no model (`tests.support.fake_server`): it streams events
at the pace of `--pace-ms`. `--flags` starts a server of the torch backend instead. The router has
one replica, so that both sides have the same server. The order of the sides changes between rounds;
results are medians over rounds. The router's CPU time does not depend on the load of the machine.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.common.environment import write_results
from tests.support.http_fixtures import Server, serving

EVENT = b"data: "
DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Load:
    """Load of one measurement.

    Attributes:
      streams: Concurrent streams.
      seconds: Duration of the measurement.
      events: Events of each response.
      pace_s: Seconds between two events of a server without a model.
    """

    streams: int
    seconds: float
    events: int
    pace_s: float

    def body(self, stream: int) -> bytes:
        """Returns the body of a request of a stream."""
        fields = {
            "prompt": f"Stream {stream} counts: one, two, three",
            "max_tokens": self.events,
            "ignore_eos": True,
            "stream": True,
            "pace_s": self.pace_s,
        }
        if not self.pace_s:
            del fields["pace_s"]
        return json.dumps(fields).encode()


@dataclass
class Seen:
    """Times of all requests in a measurement: seconds to the first event, and number of events."""

    first_s: list[float]
    events: int = 0


async def _stream(url: str, load: Load, number: int, end: float, seen: Seen) -> None:
    """Sends requests on one connection until the end of the measurement."""
    parts, body = urlsplit(url), load.body(number)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        while (sent := time.perf_counter()) < end:
            writer.write(head.encode() + body)
            tail, is_first = b"", True
            while DONE not in tail:
                data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError(f"the stream ended early: {tail[-200:]!r}")
                if is_first and EVENT in data:
                    seen.first_s.append(time.perf_counter() - sent)
                    is_first = False
                seen.events += data.count(EVENT)
                tail = tail[-len(DONE) :] + data
            while not tail.endswith(b"0\r\n\r\n"):
                tail += await reader.read(1 << 16)
    finally:
        writer.close()


async def measure(url: str, load: Load) -> Seen:
    """Runs all streams against a server."""
    seen, end = Seen([]), time.perf_counter() + load.seconds
    delays = random.Random(0).sample(range(1000), min(load.streams, 1000))

    async def one(number: int) -> None:
        await asyncio.sleep(delays[number % 1000] / 1000 * load.events * load.pace_s)
        await _stream(url, load, number, end, seen)

    await asyncio.gather(*map(one, range(load.streams)))
    return seen


def compared(
    urls: dict[str, str], router: psutil.Process, load: Load, rounds: int
) -> dict[str, Any]:
    """Returns medians over rounds for both sides, the differences, and the router's CPU time.

    Args:
      urls: Address of each side, "bare" and "routed".
      router: Process of the router.
      load: Load of each measurement.
      rounds: Number of rounds, after one that warms up.
    """
    found: dict[str, list[dict[str, float]]] = {side: [] for side in urls}
    for number in range(rounds + 1):
        for side in sorted(urls, reverse=bool(number % 2)):
            row = measured(urls[side], router, load)
            if number:
                found[side].append(row)
    pairs = [*zip(found["bare"], found["routed"], strict=True)]
    added = [routed["ttft_p50_ms"] - bare["ttft_p50_ms"] for bare, routed in pairs]
    share = [routed["events_per_s"] / bare["events_per_s"] for bare, routed in pairs]
    sides = {
        side: {name: round(statistics.median(x[name] for x in each), 3) for name in each[0]}
        for side, each in found.items()
    }
    del sides["bare"]["router_us_per_event"]
    return {
        "streams": load.streams,
        **sides,
        "added_ttft_p50_ms": round(statistics.median(added), 3),
        "throughput_share": round(statistics.median(share), 4),
    }


def measured(url: str, router: psutil.Process, load: Load) -> dict[str, float]:
    """Returns the figures of one measurement."""
    began, before = time.perf_counter(), cpu_s(router)
    seen = asyncio.run(measure(url, load))
    seconds, ordered = time.perf_counter() - began, sorted(seen.first_s)
    return {
        "ttft_p50_ms": 1000 * statistics.median(ordered),
        "ttft_p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
        "events_per_s": seen.events / seconds,
        "requests": len(ordered),
        "router_us_per_event": 1e6 * (cpu_s(router) - before) / seen.events,
    }


def cpu_s(process: psutil.Process) -> float:
    """Returns the processor seconds of a process."""
    times = process.cpu_times()
    return times.user + times.system


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.router_overhead")
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[1, 8, 32, 256])
    add("--seconds", type=float, default=8.0, help="duration of each measurement")
    add("--events", type=int, default=32, help="events of each response")
    add("--pace-ms", type=float, default=50.0, help="time between events of the fake server")
    add("--rounds", type=int, default=3)
    add("--flags", help="flags of a torch server instead of the fake one, as one quoted word")
    add("--out", type=Path, help="JSON file, written after each number of streams")
    return parser.parse_args(arguments)


def servers(options: argparse.Namespace, ends: ExitStack) -> tuple[Server, Server]:
    """Starts the server and the router in front of it."""
    command = ["-m", "tests.support.fake_server", "--port", "0"]
    if options.flags is not None:
        command = ["-m", "torch_impl.serve", "--port", "0", *shlex.split(options.flags)]
    bare = ends.enter_context(serving(command))
    route = ["-m", "shared.router", "--port", "0", "--servers", bare.url]
    routed = ends.enter_context(serving(route))
    deadline = time.monotonic() + 30
    while (
        routed.metrics().get(f'tandem:router_replica_up{{replica="{urlsplit(bare.url).netloc}"}}')
        != 1
    ):
        assert time.monotonic() < deadline, routed.metrics()
        time.sleep(0.1)
    return bare, routed


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes what was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    pace_s = 0.0 if options.flags is not None else options.pace_ms / 1000
    command = shlex.join(["python", "-m", "bench.serving.router_overhead", *words])
    facts = {"command": command, "python": platform.python_version(), "cores": os.cpu_count()}
    rows = []
    with ExitStack() as ends:
        bare, routed = servers(options, ends)
        urls = {"bare": bare.url, "routed": routed.url}
        router = psutil.Process(routed.process.pid)
        for streams in options.streams:
            load = Load(streams, options.seconds, options.events, pace_s)
            rows.append(compared(urls, router, load, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                write_results(options.out, {**facts, "load": os.getloadavg(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
