"""Bench of remote prefill: both sides, transferred records, and the result file."""

from __future__ import annotations

import json

import pytest

from bench.serving import remote_prefill
from tests.support.tiny_models import write_tiny


@pytest.mark.matrix
def test_bench_measures_transferred_prompts(tmp_path):
    write_tiny(tmp_path / "model", "qwen3_5", seed=1)
    path = tmp_path / "result.json"
    flags = f"--model-path {tmp_path / 'model'} --max-running-requests 4 --page-size 16"
    words = ["--backend", "reference", "--flags", flags, "--prompt-tokens", "200"]
    words += ["--num-prompts", "2", "--num-running", "2", "--max-tokens", "150", "--rounds", "2"]
    assert remote_prefill.main([*words, "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    separate = found["separate"]
    assert separate["prompt_tokens"] == 192
    assert separate["prompt_bytes"] > 0
    assert separate["received"]["records"] >= 3 + 2
    for side in (found["alone"], separate):
        assert side["ttft_ms"]["new"] > side["ttft_ms"]["cached"] > 0
        assert side["interference"]["itl_p99_ms"] >= side["interference"]["itl_p50_ms"] > 0
