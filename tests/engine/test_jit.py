"""Compiled host loops work in every installation, and after every update of it."""

import numba
import pytest

from shared.engine import jit


@pytest.fixture(autouse=True)
def forget_folder():
    jit.cache_folder.cache_clear()
    yield
    jit.cache_folder.cache_clear()


def twice(number: int) -> int:
    return 2 * number


def test_compiled_works_without_writable_cache_folder(monkeypatch):
    """Same as in a read-only container for a user without a home folder."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null")
    assert jit.cache_folder() is None
    assert jit.compiled(twice)(21) == 42


def test_compiled_caches_in_folder_of_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    other_cache = numba.config.CACHE_DIR
    loop = jit.compiled(twice)
    assert other_cache == numba.config.CACHE_DIR
    assert loop(21) == 42
    folder = jit.cache_folder()
    assert folder is not None
    assert folder.parent == tmp_path
    assert list(folder.rglob("*.nbi"))


def test_revision_changes_with_files_of_loops(tmp_path):
    loops, other = tmp_path / "loops.py", tmp_path / "other.py"
    loops.write_text("from shared.engine.jit import compiled\n")
    other.write_text("import numpy\n")
    first = jit.revision(tmp_path)
    other.write_text("")
    assert jit.revision(tmp_path) == first
    loops.write_text("from shared.engine.jit import compiled as compiled\n")
    assert jit.revision(tmp_path) != first
