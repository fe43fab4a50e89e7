"""Every example runs, and says what its page says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import compare_backends, train_head
from tests.support.http_fixtures import serving

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


def run(name: str, *words: str) -> str:
    command = [sys.executable, "-m", f"examples.{name}", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_generate():
    assert "#### 78" in run("generate")


def test_stream_http():
    with serving(["-m", "torch_impl.serve", "--port", "0", "--context-length", "256"]) as server:
        assert "#### 78" in run("stream_http", server.url)


def test_trace_step():
    lines = run("trace_step").splitlines()
    assert lines[0].startswith("prefill")
    assert any(line.startswith("draft") and "drafts accepted" in line for line in lines)


def test_compare_backends(quick_jax, capsys):
    compare_backends.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} with NEXTN: equal to plain decoding" for name in ("torch", "jax")]


def test_train_head(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_head, "TARGET", "models/random")
    train_head.main(str(tmp_path), "2", "4")
    assert "tokens a step" in capsys.readouterr().out


def test_ask_picture():
    command = ["-m", "torch_impl.serve", "--model-path", "models/demo/seeing", "--port", "0"]
    with serving([*command, "--context-length", "256"]) as server:
        drawn, said = run("ask_picture", server.url, "--seed", "7").split("\n", 1)
    assert drawn.startswith("drawn: ")
    assert json.loads(said).keys() == {"product", "color", "quantity"}
    assert json.loads(said)["color"] in drawn


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_each_example_has_a_test(path):
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")
