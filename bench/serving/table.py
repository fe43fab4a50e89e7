"""Metrics of a run as a table for the terminal."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table

from bench.serving.metrics import SPREAD, TIMES

Row = tuple[str, str]


def facts(found: dict[str, Any]) -> Iterator[Row]:
    """Returns the single numbers of a run with their labels."""
    numbers = found["summary"]
    yield "Successful requests", str(numbers["completed"])
    for kind, error in numbers["errors"].items():
        yield f"Failed: {kind}", f"{error['count']}  {error['first']}".rstrip()
    yield "Duration (s)", f"{numbers['seconds']:.2f}"
    yield "Prompt tokens", str(numbers["prompt_tokens"])
    yield "Output tokens", str(numbers["output_tokens"])
    yield "Request throughput (req/s)", f"{numbers['requests_per_s']:.2f}"
    yield "Output throughput (tok/s)", f"{numbers['output_tokens_per_s']:.1f}"
    yield "Total throughput (tok/s)", f"{numbers['total_tokens_per_s']:.1f}"
    yield "Concurrency", f"{numbers['concurrency']:.2f}"
    yield "Acceptance length", length_of(numbers)


def length_of(numbers: dict[str, Any]) -> str:
    """Returns the tokens per verify step, or the reason why there is no number."""
    if numbers["accept_length"] is not None:
        return f"{numbers['accept_length']:.2f}"
    return "no drafts" if numbers["accepted"]["source"] else "not reported"


def table(found: dict[str, Any]) -> Group:
    """Facts, and times with their spread in milliseconds where anything was timed."""
    server = found["server"]
    first = Table(title=f"{server['model']} at {server['url']}", show_header=False)
    first.add_column()
    first.add_column(justify="right")
    for row in facts(found):
        first.add_row(*row)
    times = Table("ms", *SPREAD)
    for column in times.columns[1:]:
        column.justify = "right"
    for name, words in TIMES.items():
        values = found["summary"][name]
        if values:
            times.add_row(words, *(f"{values[column]:.2f}" for column in SPREAD))
    return Group(first, *[times] * bool(times.row_count))
