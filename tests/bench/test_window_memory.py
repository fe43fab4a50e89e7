"""Benchmark of the KV memory of sliding windows."""

import json
from pathlib import Path

from bench.steps.window_memory import kv_bytes, main, without_windows
from tests.support.tiny_models import tiny_config

SHAPE = Path(__file__).parents[2] / "bench" / "shapes" / "gpt-oss-20b"


def test_window_memory_saves_half_of_gpt_oss(capsys):
    assert main(["--shape", str(SHAPE), "--context-length", "32768"]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:3] == ["gpt-oss-20b", "32,768", "1"]
    full, windows, cached, whole, *ratios = map(float, cells[3:])
    assert full == whole / 2
    assert 0 < windows <= cached < full
    assert ratios == [round((full + x) / whole, 2) for x in (windows, cached)]


def test_window_memory_of_full_attention_has_one_pool(tmp_path):
    text = tiny_config("gemma3", nested=False, with_mtp=False, tied=False)
    config = without_windows({"text_config": text, "model_type": "gemma3"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    full, windows = kv_bytes(tmp_path, 1024, 2)
    assert full > windows == 0


def test_window_memory_reports_unsupported_context(capsys):
    assert main(["--shape", str(SHAPE), "--context-length", "1000000"]) == 1
    assert "--context-length" in capsys.readouterr().err
