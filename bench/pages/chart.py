"""Bar chart of the summary as SVG: milliseconds per step, a panel for each batch size."""

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from bench.pages.summary import BATCHES, Row

COLORS = ("#1f6feb", "#54aeff", "#bf8700", "#8c959f")
"""Colors of torch, JAX and the other engines, in this order."""
LABELS, PANEL, GAP = 190, 250, 30
"""Widths in pixels: row labels, a panel, and the space after it."""
BAR, ROW_GAP, TOP, BOTTOM = 11, 12, 58, 12
NUMBER = 44
"""Width in pixels of the number after the longest bar."""

Bars = list[tuple[str, float, str]]
"""Engine, milliseconds and color."""


def svg(rows: Sequence[Row]) -> str:
    """Draws the rows that were measured with other engines."""
    rows = [row for row in rows if row.peers]
    engines = list(dict.fromkeys(name for row in rows for name in (*row.own, *row.peers)))
    colors = dict(zip(engines, COLORS, strict=False))
    height = BAR * len(engines) + ROW_GAP
    width = LABELS + len(BATCHES) * (PANEL + GAP)
    parts = [*_frame(width, TOP + len(rows) * height + BOTTOM), *_legend(colors)]
    for index, row in enumerate(rows):
        parts.append(_text(LABELS - 8, TOP + index * height + height / 2, row.title, "end"))
    for index, batch in enumerate(BATCHES):
        left = LABELS + index * (PANEL + GAP)
        parts.append(_text(left, TOP - 10, f"batch {batch}", "start", "bold"))
        parts += _panel(left, [_bars(row, batch, colors) for row in rows], height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(width: int, height: int) -> Iterator[str]:
    head = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {head} role="img" '
        'font-family="sans-serif" font-size="11">'
    )
    yield "<title>Milliseconds per decode step, by engine and batch size</title>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'


def _legend(colors: Mapping[str, str]) -> Iterator[str]:
    yield _text(LABELS, 16, "ms per decode step, lower is better", "start", "bold")
    for index, (name, color) in enumerate(colors.items()):
        left = LABELS + 240 + 120 * index
        yield f'<rect x="{left}" y="7" width="10" height="10" fill="{color}"/>'
        yield _text(left + 15, 16, name, "start")


def _bars(row: Row, batch: int, colors: Mapping[str, str]) -> Bars:
    own = {side: lines[batch]["ms"] for side, lines in row.own.items() if batch in lines}
    known = {name: ms[batch] for name, ms in row.peers.items() if batch in ms}
    values = own | known
    return [(name, values[name], color) for name, color in colors.items() if name in values]


def _panel(left: int, rows: Sequence[Bars], height: int) -> Iterator[str]:
    longest = max((ms for bars in rows for _, ms, _ in bars), default=1.0)
    scale = (PANEL - NUMBER) / longest
    for index, bars in enumerate(rows):
        top = TOP + index * height
        for place, (name, ms, color) in enumerate(bars):
            y, width = top + place * BAR, ms * scale
            yield (
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{color}">'
                f"<title>{escape(name)}: {ms:.2f} ms</title></rect>"
            )
            yield _text(left + width + 4, y + BAR - 3, f"{ms:.2f}", "start")


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {place} fill="#1f2328">{escape(text)}</text>'
