"""Pytest hooks that print counts of compiled programs, comparisons and excused differences.

Counts of parallel workers are added up. A run without the matrix fails where it compiles more
programs of the JAX backend than it can afford.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.support.backends import JAX_BACKENDS
from tests.support.equality import TALLY

MOST_PROGRAMS = 50
NO_BROWSER = "no chromium and chromedriver here: the page was not opened in a browser"
NO_TOKENIZER = "make tokenizers has not been run: grammars were not tried on a real tokenizer"
NO_CLIENTS = "make clients has not been run: clients of package registries were not tried"
_TOTAL = {"programs": 0, "tokens": 0, "excused": 0, "requests": 0, "preemptions": 0}


def _own_counts() -> dict[str, int]:
    programs = sum(backend.compiles for backend in JAX_BACKENDS)
    return {"programs": programs, **asdict(TALLY)}


def _add(counts: dict[str, int]) -> None:
    for name, count in counts.items():
        _TOTAL[name] += count


def _is_limited(config: pytest.Config) -> bool:
    """True if the run leaves out the cases of the marker `matrix`."""
    return "not matrix" in config.option.markexpr


class WorkerCounts:
    """Takes the counts of the workers of pytest-xdist."""

    def pytest_testnodedown(self, node, error) -> None:
        _add(getattr(node, "workeroutput", {}).get("counts", {}))


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(WorkerCounts())


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = _own_counts()
        return
    _add(_own_counts())
    too_many = _is_limited(session.config) and _TOTAL["programs"] > MOST_PROGRAMS
    if too_many and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def print_counts(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, for the end of the session."""
    limit = f" (at most {MOST_PROGRAMS})" if _is_limited(terminalreporter.config) else ""
    terminalreporter.write_line(
        f"{_TOTAL['programs']} step programs compiled by JAX{limit}, "
        f"{_TOTAL['tokens']} tokens checked against the specification, "
        f"{_TOTAL['excused']} excused as near ties"
    )
    if _TOTAL["requests"]:
        terminalreporter.write_line(
            f"{_TOTAL['requests']} requests drawn at random were served, "
            f"with {_TOTAL['preemptions']} preemptions"
        )
