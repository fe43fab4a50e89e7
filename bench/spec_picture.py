"""The picture of the drafters' matrix: acceptance by draft position, acceptance length, speed."""

from pathlib import Path

import matplotlib.figure

from bench.drafting import PLAIN
from bench.scoring import Row

BAR_INCHES = 0.28


def draw(rows: list[Row], path: Path) -> None:
    """Draws a row of three panels for each kind of task, at the lowest temperature."""
    temperature = min(row["temperature"] for row in rows)
    rows = [row for row in rows if row["temperature"] == temperature]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    height = 1.5 + BAR_INCHES * len(names)
    figure = matplotlib.figure.Figure((16, height * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 3, squeeze=False)
    for kind, (lengths, positions, speeds) in zip(kinds, panels, strict=True):
        of_kind = [row for row in rows if row["kind"] == kind]
        _bars(lengths, of_kind, names, "accept_length", f"{kind}: tokens per verify step")
        _lines(positions, of_kind, names, f"{kind}: share accepted by draft position")
        _bars(speeds, of_kind, names, "tokens_per_s", f"{kind}: tokens/s")
    figure.suptitle(f"temperature {temperature:g}")
    figure.savefig(path, dpi=120)


def _bars(panel, rows: list[Row], names: list[str], field: str, title: str) -> None:
    """A bar for each drafter and backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    width = 0.8 / len(backends)
    for number, backend in enumerate(backends):
        values = {row["algorithm"]: row[field] for row in rows if row["backend"] == backend}
        places = [names.index(name) + number * width for name in values]
        panel.barh(places, list(values.values()), width, label=backend)
    panel.set_yticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    panel.invert_yaxis()
    panel.set_title(title)
    panel.legend()


def _lines(panel, rows: list[Row], names: list[str], title: str) -> None:
    """A line for each drafter of the first backend; the other one's is the same."""
    for name in names:
        row = next((row for row in rows if row["algorithm"] == name), None)
        if row is not None and name != PLAIN:
            shares = row["per_position"]
            panel.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    panel.set_ylim(0, 1.02)
    panel.set_xticks(range(1, 1 + max(len(row["per_position"]) for row in rows)))
    panel.set_xlabel("draft position")
    panel.set_title(title)
    panel.legend(fontsize="x-small")
