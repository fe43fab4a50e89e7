"""Compilation cache: programs that one start stores and the next one loads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Compiled

from jax_impl import compilation_cache
from jax_impl.backend import JaxBackend
from jax_impl.compilation_cache import CompilationCache
from shared.boundary.backend import StepResult
from shared.boundary.program import Program, StepKind
from tests.support.backends import JAX_BACKENDS, drafts_of
from tests.support.contract_host import Host, contract_capacity, contract_model

X = jnp.arange(4.0)
Keeping = Callable[..., CompilationCache]


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    """Returns the compilation cache of a backend with the given identity."""
    takes, gives = jax.tree.structure(((X,), {})), jax.tree.structure(X)
    device = jax.devices()[0]
    return lambda *made_from: CompilationCache(tmp_path, [device], made_from, takes, gives)


@pytest.fixture(scope="module")
def program() -> Compiled:
    return jax.jit(lambda x: 3 * x).lower(X).compile()


def test_compilation_cache_keyed_by_backend_and_program(keeping, program):
    keeping("a model").keep("decode", program)
    found = keeping("a model").find("decode")
    np.testing.assert_array_equal(found(X), 3 * X)
    assert keeping("a model").find("prefill") is None
    assert keeping("another").find("decode") is None


def test_compilation_cache_misses_after_source_or_version_change(
    keeping, program, tmp_path, monkeypatch
):
    keeping().keep("decode", program)
    for change in (
        lambda patch: patch.setattr(compilation_cache, "ROOT", tmp_path),
        lambda patch: patch.setattr(compilation_cache, "jaxlib_version", "0.0.1"),
        lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " "),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert keeping().find("decode") is None
    with jax.numpy_dtype_promotion("strict"):
        assert keeping().find("decode") is None
    assert keeping().find("decode") is not None


def test_compilation_cache_replaces_corrupt_file_with_warning(keeping, program, tmp_path, caplog):
    keeping().keep("decode", program)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert keeping().find("decode") is None
    assert "is not a valid compiled program; compiling it again" in caplog.text
    keeping().keep("decode", program)
    assert keeping().find("decode") is not None
    assert list(tmp_path.iterdir()) == [file]


def test_compilation_cache_hits_in_read_only_folder(keeping, program, monkeypatch):
    keeping().keep("decode", program)

    def refused(path):
        raise PermissionError(path)

    monkeypatch.setattr(compilation_cache.os, "utime", refused)
    assert keeping().find("decode") is not None


def test_compilation_cache_warns_about_unwritable_folder(keeping, program, tmp_path, caplog):
    tmp_path.rmdir()
    tmp_path.write_text("no folder")
    keeping().keep("decode", program)
    assert f"{tmp_path} cannot store a compiled program" in caplog.text
    assert keeping().find("decode") is None


def test_compilation_cache_full_disk_leaves_no_partial_file(
    keeping, program, tmp_path, caplog, monkeypatch
):
    def fill(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    keeping().keep("decode", program)
    assert not [*tmp_path.iterdir()]
    assert caplog.messages == [
        f"{tmp_path} cannot store a compiled program; later starts compile it again: "
        "No space left on device"
    ]


def test_compilation_cache_evicts_min_recently_used(keeping, program, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MOST_FILES", 2)
    names = ["plain", "chain", "tree"]
    for age, name in enumerate(names):
        known = set(tmp_path.iterdir())
        keeping().keep(name, program)
        (new,) = set(tmp_path.iterdir()) - known
        os.utime(new, (age, age))
    assert keeping().find("plain") is not None
    keeping().drop_old()
    assert [keeping().find(name) is not None for name in names] == [True, False, True]


def test_compilation_cache_eviction_ignores_deleted_file(keeping, program, tmp_path, monkeypatch):
    keeping().keep("decode", program)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([file, folder / "gone.bin"]))
    monkeypatch.setattr(compilation_cache, "MOST_FILES", 0)
    keeping().drop_old()
    assert not file.exists()


def test_backend_compiles_nothing_on_second_start(tmp_path):
    config, weights = contract_model()
    capacity = contract_capacity(config)
    chosen = next(p for p in capacity.programs if p.work is StepKind.PREFILL)
    capacity = replace(capacity, programs=(chosen,))

    def start() -> tuple[StepResult, int]:
        how = {"dtype": "float32", "device": "cpu", "quick_compile": True, "kept_in": tmp_path}
        backend = JaxBackend(config, weights, capacity, *drafts_of("NEXTN", config), **how)
        JAX_BACKENDS.append(backend)
        backend.prepare(capacity.programs, lambda program: None)
        host = Host(backend, {})
        return host.prefill(host.request([5, 6, 8])), backend.compiles

    (first, compiled), (again, compiled_again) = start(), start()
    assert (compiled, compiled_again) == (1, 0)
    assert first.counts.tolist()[0] == 1
    for name in ("tokens", "counts", "failed"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


def test_prepare_reports_program_before_others_are_traced(monkeypatch):
    """A start that traces for minutes shows how many programs are done."""
    config, weights = contract_model()
    capacity = contract_capacity(config)
    capacity = replace(capacity, programs=capacity.programs[:2])
    how = {"dtype": "float32", "device": "cpu", "quick_compile": True, "kept_in": None}
    backend = JaxBackend(config, weights, capacity, *drafts_of("NEXTN", config), **how)
    first, second = capacity.programs
    begun, events = Event(), []

    def traced(program: Program) -> SimpleNamespace:
        assert begun.wait(60)
        events.append(("traced", program))
        return SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: program))

    def progress(program: Program) -> None:
        events.append(("begun", program))
        begun.set()

    monkeypatch.setattr(backend, "traced", traced)
    backend.prepare(capacity.programs, progress)
    assert events.index(("begun", first)) < events.index(("traced", first))
    assert events.index(("begun", second)) > events.index(("traced", first))
    backend.close()
