"""Bench of adapter loads, on the demo model."""

import json
from pathlib import Path

from bench.steps import adapter_load

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"


def test_adapter_load_bench_times_gaps(tmp_path, capsys):
    words = ["--model", str(DEMO), "--backend", "torch", "--batch", "2", "--loads", "1"]
    given = adapter_load.options([*words, "--output", "400", "--out", str(tmp_path / "found.json")])
    (line,) = adapter_load.run(given, "command")["lines"]
    assert line["load_longest_ms"] >= line["load_p50_ms"] > 0
    assert line["quiet_longest_ms"] >= line["quiet_p50_ms"] > 0
    assert line["adapter_bytes"] > 0
    assert json.loads((tmp_path / "found.json").read_text())["lines"] == [line]
    assert "longest" in capsys.readouterr().out
