"""Pytest hooks that print counts of compiled programs, comparisons and excused differences.

Counts of parallel workers are added up. A run without the matrix fails where it compiles more
programs of the JAX backend than it can afford, with an error that lists them by test file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import asdict

import pytest

from tests.support.backends import JAX_BACKENDS
from tests.support.equality import TALLY

MOST_PROGRAMS = 50
NO_BROWSER = "no chromium and chromedriver here: the page was not opened in a browser"
NO_TOKENIZER = "make tokenizers has not been run: grammars were not tried on a real tokenizer"
NO_TRITON = "triton is not installed"
NO_CLIENTS = "make clients has not been run: clients of package registries were not tried"
_TOTAL = {"tokens": 0, "excused": 0, "requests": 0, "preemptions": 0}
_PROGRAMS: Counter[str] = Counter()
"""Step programs that JAX compiled, by test file."""


def _add(counts: dict[str, int], programs: dict[str, int]) -> None:
    for name, count in counts.items():
        _TOTAL[name] += count
    _PROGRAMS.update(programs)


def _is_limited(config: pytest.Config) -> bool:
    """True if the run leaves out the cases of the marker `matrix`."""
    return "not matrix" in config.option.markexpr


class WorkerCounts:
    """Takes the counts of the workers of pytest-xdist."""

    def pytest_testnodedown(self, node, error) -> None:
        _add(*getattr(node, "workeroutput", {}).get("counts", ({}, {})))


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(WorkerCounts())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = sum(backend.compiles for backend in JAX_BACKENDS)
    try:
        return (yield)
    finally:
        if compiled := sum(backend.compiles for backend in JAX_BACKENDS) - before:
            _PROGRAMS[item.location[0]] += compiled


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = asdict(TALLY), dict(_PROGRAMS)
        return
    _add(asdict(TALLY), {})
    if _is_limited(session.config):
        check_limit(session, _PROGRAMS)


def check_limit(session: pytest.Session, programs: Counter[str]) -> None:
    """Fails a session with an error if JAX compiled too many programs, given by test file."""
    if programs.total() <= MOST_PROGRAMS:
        return
    error = (
        f"{programs.total()} step programs were compiled by JAX, and a run without the matrix may "
        f"compile {MOST_PROGRAMS}. Share programs between tests or mark cases `matrix`."
    )
    files = [f"{count:4} {file}" for file, count in programs.most_common()]
    name, text = "JAX step programs of this run", "\n".join([error, *files])
    report = pytest.TestReport(name, (name, None, name), {}, "failed", text, "setup")
    session.config.hook.pytest_runtest_logreport(report=report)
    if session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def print_counts(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, for the end of the session."""
    limit = f" (at most {MOST_PROGRAMS})" if _is_limited(terminalreporter.config) else ""
    terminalreporter.write_line(
        f"{_PROGRAMS.total()} step programs compiled by JAX{limit}, "
        f"{_TOTAL['tokens']} tokens checked against the specification, "
        f"{_TOTAL['excused']} excused as near ties"
    )
    if _TOTAL["requests"]:
        terminalreporter.write_line(
            f"{_TOTAL['requests']} requests drawn at random were served, "
            f"with {_TOTAL['preemptions']} preemptions"
        )
