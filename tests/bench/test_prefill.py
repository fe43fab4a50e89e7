"""The bench of prompts: what it times, and that it sees another answer."""

import json
from pathlib import Path

from bench.steps import prefill

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"


def test_a_prompt_is_timed_and_an_answer_that_differs_ends_the_bench_with_1(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "found.json"
    words = ["--model", str(DEMO), "--load-format", "auto", "--backend", "torch", "--rounds", "1"]
    words += ["--prompt", "64", "100", "--output", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench.steps.prefill", *words])
    monkeypatch.setattr(prefill, "_launches", lambda backend, on_gpu: [[], ["--overlap", "0"]])
    asked, ask = [], prefill.ask

    def other_in_the_end(served, load):
        found = ask(served, load)
        asked.append(load)
        if len(asked) == 8:  # two prompts in two ways, each asked twice
            found.outcome.tokens[-1] += 1
        return found

    monkeypatch.setattr(prefill, "ask", other_in_the_end)
    assert prefill.main() == 1
    assert "ANOTHER" in capsys.readouterr().out
    lines = json.loads(out.read_text())["lines"]
    assert [line["prompt"] for line in lines] == [64, 100, 64, 100]
    assert [line["is_same"] for line in lines] == [True, True, True, False]
    for line in lines:
        assert 0 < line["ms_low"] <= line["ms"] <= line["ms_high"]
        assert line["products_ms"] > 0
        assert len(line["answer"]["tokens"]) == 4
        assert line["prefills_so_far"]["eager"] > 0
