"""HTML report of a run: tables and plots, without resources of other hosts."""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.serving.client import Reply
from bench.serving.metrics import SPREAD, TIMES, times_of
from bench.serving.table import facts

TEMPLATE = Path(__file__).with_suffix(".html")
INK, ACCENT, SOFT = "#5b6470", "#3b6fd4", "#9db7ea"
SIZE = (5.4, 2.7)  # inches
MAX_BARS = 400  # requests that are drawn one by one
STYLE: dict[Any, Any] = {  # of matplotlib, which has a type of its own for names of settings
    "svg.fonttype": "none",  # text stays text, drawn with the browser's fonts
    "svg.hashsalt": "tandem",  # ids in the image are the same in each run
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

Replies = Sequence[Reply]


def page(found: dict[str, Any]) -> str:
    """Returns the HTML page of a result file of `bench.serving`."""
    replies = [Reply(**fields) for fields in found["requests"]]
    streams = found["options"]["stream"]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        found=found,
        facts=list(facts(found)),
        spread=SPREAD,
        times=[(words, found["summary"][name]) for name, words in TIMES.items()],
        plots=list(_plots(found, replies, streams)),
    )


def _plots(found: dict[str, Any], replies: Replies, streams: bool):
    """Yields pairs of a heading and a plot; plots without data are omitted."""
    good = [reply for reply in replies if reply.error is None]
    all_times = [times_of(reply, streams) for reply in good]
    for name, words in TIMES.items():
        values = [value for each in all_times for value in each[name]]
        if values:
            yield words, image(lambda axes, values=values: _distribution(axes, values))
    if good:
        yield "Requests over time", image(lambda axes: course(axes, replies))
        yield "Requests in flight", image(lambda axes: under_way(axes, replies))
    if histogram := found["summary"]["accepted"]["histogram"]:
        yield "Accepted draft tokens per verify step", image(lambda axes: _bars(axes, histogram))


def image(draw: Callable[[Axes], None]) -> Markup:
    """Returns a plot as an SVG element."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(SIZE, layout="constrained")
        draw(figure.subplots())
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    element = written.getvalue()[written.getvalue().index("<svg") :]
    return Markup(re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL))


def _distribution(axes: Axes, values: Sequence[float]) -> None:
    """Draws the cumulative distribution of values, with median, p90 and p99."""
    axes.ecdf(values, color=ACCENT)
    for share in (50, 90, 99):
        at = float(np.percentile(values, share))
        axes.axvline(at, color=SOFT, linewidth=1)
        axes.annotate(f"p{share}", (at, share / 100), fontsize=7, ha="right", va="bottom")
    axes.set_xlim(left=0)
    axes.set(xlabel="ms", ylabel="share")


def course(axes: Axes, replies: Replies) -> None:
    """Draws a bar for each request: light until the first token, dark until the end."""
    shown = sorted(replies, key=lambda reply: reply.begun_s)[:MAX_BARS]
    rows = np.arange(len(shown))
    begun = np.array([reply.begun_s for reply in shown])
    first = np.array([(reply.times_s or [reply.ended_s])[0] for reply in shown])
    ended = np.array([reply.ended_s for reply in shown])
    axes.barh(rows, first, 0.8, begun, color=SOFT)
    axes.barh(rows, ended - first, 0.8, begun + first, color=ACCENT)
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="seconds", ylabel="request")


def under_way(axes: Axes, replies: Replies) -> None:
    """Draws the number of unfinished requests over time."""
    begun = sorted(reply.begun_s for reply in replies)
    ended = sorted(reply.begun_s + reply.ended_s for reply in replies)
    moments = np.sort([*begun, *ended])
    counts = np.searchsorted(begun, moments, "right") - np.searchsorted(ended, moments, "right")
    axes.fill_between(moments, counts, step="post", color=ACCENT, alpha=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="seconds", ylabel="requests")


def _bars(axes: Axes, histogram: Sequence[int]) -> None:
    """Draws the share of steps for each number of accepted drafts."""
    shares = np.array(histogram) / sum(histogram)
    axes.bar(np.arange(len(shares)), shares, color=ACCENT)
    axes.set_xticks(range(len(shares)))
    axes.set(xlabel="drafts", ylabel="share of steps")
