"""GPU activity while something ran: the number of kernels, and the busy time.

The frameworks' own profilers are read. Kernels that run side by side count once as busy time.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

COPIES = ("memcpy", "memset")
"""Parts of names of events that are no kernels."""

Span = tuple[str, float, float]
"""Name, begin and end in milliseconds."""


@dataclass(frozen=True)
class Activity:
    """GPU activity of a run.

    Attributes:
      kernels, copies: The number of each.
      busy_ms: Milliseconds in which at least one of them ran.
      by_name: Number of runs and total milliseconds by name. A kernel that begins before another
        has ended, to wait for it, is counted from that end on.
    """

    kernels: float
    copies: float
    busy_ms: float
    by_name: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Activity":
        """Sums all spans."""
        found = sorted(spans, key=lambda span: span[1])
        copies = sum(any(part in name.lower() for part in COPIES) for name, _, _ in found)
        busy, until, by_name = 0.0, float("-inf"), dict[str, tuple[float, float]]()
        for name, begin, end in found:
            alone = max(0.0, end - max(begin, until))
            busy, until = busy + alone, max(until, end)
            count, total = by_name.get(name, (0, 0.0))
            by_name[name] = (count + 1, total + alone)
        return cls(len(found) - copies, copies, busy, by_name)

    def per_step(self, fewer: "Activity", steps: int) -> "Activity":
        """Returns the activity per step if this has `steps` more than `fewer`; the edges cancel."""
        by_name = {}
        for name, (count, ms) in self.by_name.items():
            less_often, less_ms = fewer.by_name.get(name, (0, 0.0))
            by_name[name] = ((count - less_often) / steps, (ms - less_ms) / steps)
        return Activity(
            (self.kernels - fewer.kernels) / steps,
            (self.copies - fewer.copies) / steps,
            (self.busy_ms - fewer.busy_ms) / steps,
            by_name,
        )

    def longest(self, most: int) -> dict[str, tuple[float, float]]:
        """The names that take the most time, first the longest, with count and milliseconds."""
        ordered = sorted(self.by_name.items(), key=lambda item: -item[1][1])
        return dict(ordered[:most])


def traced(framework: str, run: Callable[[], None]) -> Activity:
    """Returns the GPU activity of a run, which must synchronise at its beginning and end."""
    with tempfile.TemporaryDirectory() as folder:
        return Activity.of(SPANS[framework](run, Path(folder)))


def _of_torch(run: Callable[[], None], folder: Path) -> list[Span]:
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # JAX's profiler uses it afterwards
    profiler = import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        run()
    found.export_chrome_trace(str(folder / "trace.json"))
    return spans_of_chrome(json.loads((folder / "trace.json").read_text(encoding="utf-8")))


def spans_of_chrome(trace: dict) -> list[Span]:
    """Device spans of a trace in Chrome's format, converted from microseconds."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        (
            _named(event["name"], event.get("args", {}).get("grid")),
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
        )
        for event in trace["traceEvents"]
        if event.get("cat") in kinds
    ]


def _named(name: str, grid: Iterable[int] | None) -> str:
    """A kernel name with its grid, which distinguishes products."""
    return f"{name} [{' '.join(map(str, grid))}]" if grid else name


def _of_jax(run: Callable[[], None], folder: Path) -> list[Span]:
    profiler = import_module("jax.profiler")
    with profiler.trace(str(folder)):
        run()
    (written,) = folder.rglob("*.xplane.pb")
    return spans_of_planes(profiler.ProfileData.from_file(str(written)).planes)


def spans_of_planes(planes: Iterable) -> list[Span]:
    """GPU streams of a profile's planes, converted from nanoseconds."""
    return [
        (
            _named(event.name, _grid_of(event)),
            event.start_ns / 1e6,
            (event.start_ns + event.duration_ns) / 1e6,
        )
        for plane in planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]


def _grid_of(event: Any) -> list[int] | None:
    details = next((str(value) for name, value in event.stats if name == "kernel_details"), "")
    grid = re.search(r"grid:(\d+),(\d+),(\d+)", details)
    return [int(number) for number in grid.groups()] if grid else None


SPANS = {"torch": _of_torch, "jax": _of_jax}
