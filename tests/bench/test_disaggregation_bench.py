"""Bench of remote prefill between two engines: transferred prompts and equal tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving import disaggregation

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"


@pytest.mark.matrix
def test_bench_transfers_prompts_between_two_engines(tmp_path):
    path = tmp_path / "found.json"
    words = ["--model", str(DEMO), "--backend", "torch", "--prompt-tokens", "200"]
    flags = "--page-size 16 --max-running-requests 4 --chunked-prefill-size 64"
    words += ["--flags", flags, "--num-prompts", "2"]
    words += ["--num-running", "2", "--max-tokens", "600", "--rounds", "1", "--window-s", "120"]
    assert disaggregation.main([*words, "--out", str(path)]) == 0
    (line,) = json.loads(path.read_text())["lines"]
    assert line["tokens_are_equal"]
    assert line["compared_tokens"] > 0
    assert line["alone"]["interference"]["prompts_ended"] == 2
    interference = line["shm"]["interference"]
    assert (interference["prompts_ended"], interference["prompt_tokens"]) == (2, 192)
    for backend in ("shm", "tcp"):
        found = line[backend]
        assert found["failures"] == {}
        assert found["prompt_tokens"] == 192
        assert found["prompt_parts"] > 1
        assert found["prompt_bytes"] > 0


def test_killed_bench_keeps_earlier_measurements(tmp_path, monkeypatch):
    path, alone = tmp_path / "found.json", {"ttft_ms": {"new": 2.0, "cached": 1.0}}
    messages = [{"model": "target", "alone": alone}, RuntimeError("it has ended with code -9")]
    monkeypatch.setattr(
        disaggregation, "in_turns", lambda *_: ((0, message) for message in messages)
    )
    words = ["--model", str(DEMO), "--backend", "torch", "--out", str(path)]
    assert disaggregation.main(words) == 1
    (line,) = json.loads(path.read_text())["lines"]
    assert line == {"model": "target", "alone": alone, "error": "it has ended with code -9"}
