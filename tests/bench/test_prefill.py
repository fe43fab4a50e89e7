"""The bench of prompts: what it times, and that it sees another answer."""

import json
from pathlib import Path

from bench import prefill

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"


def test_a_prompt_is_timed_and_the_answers_of_two_ways_to_launch_it_are_compared(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "found.json"
    words = ["--model", str(DEMO), "--load-format", "auto", "--backend", "torch", "--rounds", "1"]
    words += ["--prompt", "64", "100", "--output", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench.prefill", *words])
    monkeypatch.setattr(prefill, "_launches", lambda backend, on_gpu: [[], ["--overlap", "0"]])
    assert prefill.main() == 0
    lines = json.loads(out.read_text())["lines"]
    assert [line["prompt"] for line in lines] == [64, 100, 64, 100]
    for line in lines:
        assert 0 < line["ms_low"] <= line["ms"] <= line["ms_high"]
        assert line["products_ms"] > 0
        assert len(line["answer"]["tokens"]) == 4
        assert line["prefills_so_far"]["eager"] > 0
    assert lines[0]["answer"] != lines[1]["answer"]

    asked, ask = [], prefill.ask

    def another(served, load):
        found = ask(served, load)
        asked.append(load)
        if len(asked) > 4:  # of the second way
            found.outcome.tokens[-1] += 1
        return found

    monkeypatch.setattr(prefill, "ask", another)
    assert prefill.main() == 1
    assert "ANOTHER" in capsys.readouterr().out
