"""Result files record the revision and the date of a measurement."""

import json
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from bench.common import environment
from shared import revision


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(revision, "FOLDER", tmp_path)
    environment.provenance.cache_clear()
    yield tmp_path
    environment.provenance.cache_clear()


def git(checkout: Path, *words: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(checkout), *name, *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_result_file_records_revision_and_date(checkout: Path) -> None:
    git(checkout, "init", "-q")
    (checkout / "source.py").write_text("1")
    git(checkout, "add", "source.py")
    git(checkout, "commit", "-qm", "first")
    environment.write_results(checkout / "result.json", {"command": "c", "lines": []})
    found = json.loads((checkout / "result.json").read_text())
    assert git(checkout, "rev-parse", "HEAD").startswith(found["revision"])
    assert date.fromisoformat(found["date"]).year >= 2026
    assert found["command"] == "c"


def test_revision_of_changed_checkout_ends_with_plus(checkout: Path) -> None:
    git(checkout, "init", "-q")
    (checkout / "source.py").write_text("1")
    git(checkout, "add", "source.py")
    git(checkout, "commit", "-qm", "first")
    (checkout / "source.py").write_text("2")
    assert (environment.provenance()["revision"] or "").endswith("+")


def test_revision_outside_checkout_is_none(checkout: Path) -> None:
    assert environment.provenance()["revision"] is None
