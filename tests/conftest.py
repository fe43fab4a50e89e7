"""Backends that tests share: each is made once a session, each test brings a host of its own."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jaxtyping
import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from shared.boundary.backend import Backend
from shared.process import gc_freeze
from tests.support.backends import FRAMEWORKS, make_backend
from tests.support.contract_host import Host, Texts, contract_capacity, contract_model
from tests.support.counting import (  # noqa: F401 - pytest finds its hooks here
    NO_BROWSER,
    NO_TOKENIZER,
    NO_TRITON,
    print_counts,
    pytest_configure,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)
from tests.support.quick_compile import compile_quickly
from tests.support.rounding import round_products

round_products()
compile_quickly()
# The stack of a test has a hundred frames, which JAX would write next to each operation it lowers.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# About 300 processes start, and read the bytecode that the first one has written.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

COLLECT_AFTER = (100_000, 50, 1000)
"""Thresholds of garbage collection, since tracing a program makes millions of objects."""

CHECKED_SHAPES = ("tests/spec/", "tests/reference/", "tests/test_layout.py")
SERVED_TEXTS = (
    "tests/reference/test_reference_backend.py",
    "tests/spec/test_golden.py",
    "tests/spec/test_rejection.py",
    "tests/spec/test_simulated.py",
    "tests/spec/test_standalone.py",
)
_CHECKED: dict[str, str] = {}
"""The first case of each test that serves texts, by the test's name."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The specification's shapes are checked in its own tests.

    Those that serve whole texts call it as often with the same shapes, in three times the time; of
    those beside the specification's, the first case of each is checked.
    """
    is_checked = item.nodeid.startswith(CHECKED_SHAPES)
    if item.nodeid.startswith(SERVED_TEXTS):
        name = item.nodeid.split("[", 1)[0]
        is_checked = _CHECKED.setdefault(name, item.nodeid) == item.nodeid
    jaxtyping.config.update("jaxtyping_disable", not is_checked)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Freezes imported objects: none is garbage, and scanning them takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        gc.enable()


@pytest.fixture(
    scope="session",
    params=[*FRAMEWORKS, pytest.param("torch ranks 2", marks=pytest.mark.matrix)],
)
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def backend(framework: str) -> Iterator[Backend]:
    """A backend of the contract's model, with every program that the contract names."""
    config, weights = contract_model()
    made = make_backend(framework, config, weights, contract_capacity(config), "NEXTN")
    yield made
    made.close()


@pytest.fixture(scope="session")
def texts(framework: str) -> Texts:
    """Plain texts of the contract's model on one backend."""
    return {}


@pytest.fixture
def host(backend: Backend, texts: Texts) -> Host:
    """Free slots and pages on a backend that other tests have used."""
    return Host(backend, texts)


@pytest.fixture
def sink_length(backend: Any) -> Callable[[], int]:
    """Reads the length of slot 0, which nothing at the boundary shows."""
    return lambda: int(backend.state.lengths[0])


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """Disables garbage collection of in-process starts, except for `test_gc_freeze.py`.

    A worker holds all tests and what they imported and compiled, of which a server has a part: to
    walk it takes two seconds, and tests make some hundred engines one after the other.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze_gc", "unfreeze_gc", "sweep"):
            patch.setattr(gc_freeze, name, lambda: None)
        yield


@pytest.fixture(scope="module")
def quick_jax() -> Iterator[None]:
    """Compiles JAX programs of in-process starts quickly, in a third of the time."""
    backend = import_module("jax_impl.backend")
    options = backend.compiler_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "compiler_options", lambda device, _: options(device, True))
        yield


HOST_FILES = (
    "_contract.py",
    "_contract_memory.py",
    "test_backend_start.py",
    "test_shared_rows.py",
    "test_cross_backend_ngram.py",
    "test_tree_behaviour.py",
)


class FilesThatShareABackend(LoadFileScheduling):
    """Gives a worker whole files, and all that use `host` to one: a backend is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "host" if file.endswith(HOST_FILES) else file


def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    """Sets one thread for each worker, since workers occupy all cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FilesThatShareABackend:
    return FilesThatShareABackend(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports counts of compiled programs, comparisons and detected planted faults."""
    print_counts(terminalreporter)
    passed = terminalreporter.stats.get("passed", [])
    seen = [report for report in passed if "test_planted_fault_is_detected" in report.nodeid]
    if seen:
        terminalreporter.write_line(f"{len(seen)} planted faults, each seen by its promise's test")
    ran = [report for report in passed if re.search("_kernels.*pallas", report.nodeid)]
    if ran and find_spec("triton") is None:
        line = f"{NO_TRITON}: only Pallas ran"
        terminalreporter.write_line(f"{line}, {len(ran)} cases of the Triton kernels did not")
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in (NO_BROWSER, NO_TOKENIZER, NO_TRITON):
        if unrun := [report for report in skipped if reason in str(report.longrepr)]:
            terminalreporter.write_line(f"{reason}; {len(unrun)} tests did not run")
