"""Log of a run's metrics, its progress bar, and its curves as an image."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

REPORT_S = 10.0  # between two lines without a terminal for the progress bar
SHOWN = ("loss", "accuracy", "acceptance_length")
PANELS = {
    "loss": ("loss", "cross_entropy"),
    "share of correct tokens": ("accuracy", "agreement"),
    "acceptance length": ("acceptance_length",),
}
"""Title of each plot, with prefixes or suffixes of the names of its metrics."""

matplotlib.use("Agg")


class Log:
    """`log.jsonl` of a run, one line per window of steps, also shown on the terminal."""

    def __init__(self, folder: Path, step: int) -> None:
        """Resumes after `step`; removes later lines, which an interrupted run has written."""
        self._folder, self._path = folder, folder / "log.jsonl"
        lines = self.lines() if self._path.is_file() else []
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        folder.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(kept), encoding="utf-8")
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        is_terminal = self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=not is_terminal)
        self._task = self._bar.add_task("compiling", total=1.0)
        self._last = time.monotonic()
        self._reported = self._last - REPORT_S

    def __enter__(self) -> "Log":
        self._file = self._path.open("a", encoding="utf-8")
        self._bar.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._bar.stop()
        self._file.close()

    def lines(self) -> list[dict[str, Any]]:
        """Returns the lines logged so far."""
        text = self._path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def add(self, step: int, share: float, num_tokens: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of the steps since the last call.

        Args:
          step: Number of completed steps.
          share: Completed share of the run.
          num_tokens: Number of tokens in these steps.
          metrics: Mean of each metric over these steps.
        """
        now = time.monotonic()
        speed = num_tokens / max(now - self._last, 1e-9)
        self._last = now
        line = {"step": step, **metrics, "tokens_per_second": speed}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = "  ".join(f"{name} {line[name]:.4f}" for name in SHOWN if name in line)
        text = f"step {step}  {shown}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=share, description=text)
        is_due = now - self._reported >= REPORT_S or share >= 1
        if not self._console.is_terminal and is_due:
            self._console.print(f"{share:4.0%}  {text}")
            self._reported = now

    def draw(self) -> None:
        """Draws all logged metrics to `curves.png`."""
        if (figure := curves(self.lines())) is not None:
            figure.savefig(self._folder / "curves.png", dpi=120)


def curves(lines: Sequence[dict[str, Any]]) -> Figure | None:
    """Draws the metrics of a log by step, in one plot per kind that has finite values."""
    series = {
        title: {name: points for name in _names(lines, words) if (points := _points(lines, name))}
        for title, words in PANELS.items()
    }
    shown = {title: found for title, found in series.items() if found}
    if not shown:
        return None
    figure = Figure(figsize=(5.5 * len(shown), 4), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (title, found) in zip(axes, shown.items(), strict=True):
        for name, points in found.items():
            marker = "o" if len(points) == 1 else ""  # a line through one point is invisible
            axis.plot(*zip(*points, strict=True), marker=marker, label=name)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    return figure


def _names(lines: Sequence[dict[str, Any]], words: tuple[str, ...]) -> list[str]:
    """Returns the metrics of a plot, in the order in which they were first logged."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [name for name in names if name.endswith(words) or name.startswith(words)]


def _points(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [
        (line["step"], line[name]) for line in lines if name in line and math.isfinite(line[name])
    ]
