"""The picture of the drafters' matrix: acceptance length, acceptance by draft position, speed."""

from pathlib import Path

import matplotlib.figure
import numpy as np

from bench.drafting import PLAIN
from bench.scoring import Row

BAR_INCHES = 0.28
DARK_SHARE = 0.6  # from here on a cell of the map is too dark for black numbers


def draw(rows: list[Row], path: Path) -> None:
    """Draws a row of three panels for each kind of task, at the lowest temperature.

    The panels of a row share their lines, one for each drafter.
    """
    temperature = min(row["temperature"] for row in rows)
    rows = [row for row in rows if row["temperature"] == temperature]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    height = 1.5 + BAR_INCHES * len(names)
    figure = matplotlib.figure.Figure((16, height * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 3, squeeze=False, sharey=True)
    for kind, (lengths, positions, speeds) in zip(kinds, panels, strict=True):
        of_kind = [row for row in rows if row["kind"] == kind]
        _bars(lengths, of_kind, names, "accept_length", f"{kind}: tokens per verify step")
        _map(positions, of_kind, names, f"{kind}: share accepted by draft position")
        _bars(speeds, of_kind, names, "tokens_per_s", f"{kind}: tokens/s")
        lengths.set_yticks(range(len(names)), names)
    panels[0, 0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(f"temperature {temperature:g}")
    figure.savefig(path, dpi=100)


def _bars(panel, rows: list[Row], names: list[str], field: str, title: str) -> None:
    """A bar for each drafter and backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    width = 0.8 / len(backends)
    for number, backend in enumerate(backends):
        values = {row["algorithm"]: row[field] for row in rows if row["backend"] == backend}
        shift = (number - (len(backends) - 1) / 2) * width
        places = [names.index(name) + shift for name in values]
        panel.barh(places, list(values.values()), width, label=backend)
    panel.locator_params(axis="x", nbins=6)
    panel.set_title(title)
    panel.legend()


def _map(panel, rows: list[Row], names: list[str], title: str) -> None:
    """A line of numbers for each drafter of the first backend; the other one's are the same."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["algorithm"] != PLAIN:
            found.setdefault(row["algorithm"], row["per_position"])
    most = max(map(len, found.values()), default=0)
    shares = np.full((len(names), max(1, most)), np.nan)
    for name, of_name in found.items():
        shares[names.index(name), : len(of_name)] = of_name
    panel.imshow(
        shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=_extent(shares), alpha=0.9
    )
    for (line, place), share in np.ndenumerate(shares):
        if not np.isnan(share):
            shade = "white" if share > DARK_SHARE else "black"
            panel.text(
                place + 1, line, f"{share:.2f}", ha="center", va="center", color=shade, size=7
            )
    panel.set_xticks(range(1, 1 + shares.shape[1]))
    panel.set_xlabel("draft position")
    panel.set_title(title)


def _extent(shares: np.ndarray) -> tuple[float, float, float, float]:
    """Puts the first position at 1 and the first line at 0, downwards."""
    lines, places = shares.shape
    return 0.5, places + 0.5, lines - 0.5, -0.5
