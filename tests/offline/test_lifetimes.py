"""Lifetime of engines: end without references, and behavior in a forked process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, "qwen3", 0, with_mtp=False)
    return folder


def run(what: str, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.offline.lifetimes", what, str(model)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_unclosed_llm_is_freed_with_resource_warning(model):
    done = run("freed", model)
    assert done.returncode == 0, done.stderr
    ours, nothing = "3 threads, 1 backends", "1 threads, 0 backends"
    lines = done.stdout.splitlines()
    assert lines == [*[ours, nothing] * 4, f"2 {ours}", nothing, nothing, nothing]
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("ResourceWarning: an LLM was not closed; use `with` or close()") == 5


def test_llm_in_forked_process_raises_and_exits(model):
    done = run("forked", model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["generate", "chat", "stream", "next", "result", "async", "close"]
    assert [line.split()[0] for line in lines[:7]] == names
    assert all("the engine runs in process" in line for line in lines[:7])
    assert all("create the LLM in the process that uses it" in line for line in lines[:7])
    assert lines[7:] == ["exit code 7", "exit code 1", "parent True 1"]
    assert "ResourceWarning" not in done.stderr
