"""A server of the demo model in a process of its own, and its resources over time."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo" / "target"
SAMPLE_S = 1.0

MOST_GROWTH = {"rss_bytes": 0.03, "threads": 0.0, "files": 0.0, "acceptance": 0.03}
"""Largest growth from the second to the last quarter, as a share; also the largest loss of
acceptance.
"""

LEAST_NOTICED = {"rss_bytes": 8 << 20, "threads": 6.0, "files": 3.0, "acceptance": 0.0}
"""Growth up to these values is ignored: allocator pages, one connection, and threads that the event
loop and a second renderer start when they first need them."""


@dataclass(frozen=True)
class Sample:
    """Resources of a server's processes at one time, and acceptance since the previous sample."""

    at_s: float
    rss_bytes: int
    threads: int
    files: int
    acceptance: float


class Growth(Exception):
    """Something grew; the message has its name and the growth."""


def judge(
    samples: Sequence[Sample], names: Sequence[str] = tuple(MOST_GROWTH)
) -> dict[str, dict[str, float]]:
    """Medians of the second and the last quarter of a run, by measure.

    Args:
      samples: Samples of the run in order.
      names: Measures to compare.

    Raises:
      Growth: They differ by more than the bounds allow.
    """
    size = len(samples) // 4
    early, late = samples[size : 2 * size], samples[-size:]
    found = {}
    for name in names:
        share = MOST_GROWTH[name]
        before, after = (
            statistics.median(getattr(s, name) for s in part) for part in (early, late)
        )
        found[name] = {"second_quarter": before, "last_quarter": after}
        growth = abs(after - before) if name == "acceptance" else after - before
        if growth > max(share * before, LEAST_NOTICED[name]):
            raise Growth(f"{name} went from {before:,.4g} to {after:,.4g}")
    return found


class Watch:
    """Takes samples of a server."""

    def __init__(self, pid: int) -> None:
        self._engine = psutil.Process(pid)
        self._began, self._counts = time.monotonic(), (0.0, 0.0)

    @property
    def accept_length(self) -> float:
        """Mean acceptance length since the start of the server, up to the last sample."""
        accepted, drafts = self._counts
        return 1 + accepted / max(1.0, drafts)

    async def sample(self, client: httpx.AsyncClient) -> Sample:
        processes = [self._engine, *self._engine.children(recursive=True)]
        found = metrics((await client.get("/metrics")).text)
        names = ("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
        accepted, drafts = (found[name] for name in names)
        before, self._counts = self._counts, (accepted, drafts)
        return Sample(
            at_s=time.monotonic() - self._began,
            rss_bytes=sum(p.memory_info().rss for p in processes),
            threads=sum(p.num_threads() for p in processes),
            files=sum(p.num_fds() for p in processes),
            acceptance=(accepted - before[0]) / max(1.0, drafts - before[1]),
        )


def metrics(page: str) -> dict[str, float]:
    """Values of /metrics by bare name; those with further labels are summed."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("tandem:")] += float(value)
    return found


async def expect_released(client: httpx.AsyncClient, before: dict[str, float]) -> None:
    """Slots and pages are back; what is cached counts as free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_pages_free", "request_slots_free")
    for wait in itertools.count():
        found = metrics((await client.get("/metrics")).text)
        if all(found[name] == before[name] for name in names):
            return
        if wait == 50:
            raise Growth(
                f"{[(name, found[name], before[name]) for name in names]} did not come back"
            )
        await asyncio.sleep(0.1)


@contextmanager
def own_server(
    model: Path, backend: str, context_length: int, flags: Iterable[str]
) -> Iterator[tuple[str, int]]:
    """Serves a model and yields the address and the process id of the server.

    Args:
      model: Folder of the checkpoint.
      backend: torch or jax.
      context_length: Positions of a request; it may exceed those of the model's config.json.
      flags: More flags of the server.

    Raises:
      RuntimeError: The server did not start; the message has its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in model.resolve().iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = context_length
        (Path(folder) / "config.json").unlink()
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", f"{backend}_impl.serve", "--model-path", folder]
        command += ["--context-length", str(context_length), "--port", "0", *flags]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            lines = deque[str](maxlen=1)
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r" is served at (http://[\w.:]+)", line):
                    # The server would block on a full pipe.
                    threading.Thread(
                        target=sys.stderr.writelines, args=[process.stderr], daemon=True
                    ).start()
                    yield found[1], process.pid
                    break
            else:
                raise RuntimeError(f"the server did not start: {''.join(lines).strip()}")
        finally:
            process.terminate()
            process.wait(60)
