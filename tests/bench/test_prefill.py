"""Benchmark of prefill: timing, and detection of differing answers."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from bench.steps import prefill
from shared.models.families import config_from_folder

ROOT = Path(__file__).parents[2]
DEMO, SHAPES = ROOT / "models" / "demo" / "target", ROOT / "bench" / "shapes"


def test_prefill_bench_times_prompts_and_detects_differences(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    words = ["--model", str(DEMO), "--load-format", "auto", "--backend", "torch", "--rounds", "1"]
    words += ["--prompt", "64", "100", "--output", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench.steps.prefill", *words])
    monkeypatch.setattr(
        prefill, "_launches", lambda backend, on_gpu: [[], ["--overlap-depth", "0"]]
    )
    asked, ask = [], prefill.ask

    def other_in_the_end(served, load):
        found = ask(served, load)
        asked.append(load)
        if len(asked) == 8:  # two prompts in two ways, each run twice
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


def test_product_seconds_count_chosen_experts_per_layer():
    config, asked = config_from_folder(SHAPES / "qwen3.5-35b-a3b"), []
    side = SimpleNamespace(chain_seconds=lambda products: asked.append(products) or 1.0)
    # 30 layers have a delta rule and 10 attention: the chain is of three and one.
    assert prefill._product_seconds(side, config, 512) == 10
    (chain,) = asked
    # In each of four layers two of the mixer, the router, gate and up, down.
    assert len(chain) == 4 * 5
    counts = Counter(chain)
    assert counts[9 * 512, 2 * 512, 2048] == counts[9 * 512, 2048, 512] == 4
    first = len(chain) // 4
    assert Counter(chain[:first])[9 * 512, 2 * 512, 2048] == 1  # not all of a kind at once
