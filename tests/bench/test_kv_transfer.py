"""Benchmark of KV transfer: one line per backend, with the transferred tokens."""

from pathlib import Path

from bench.steps import kv_transfer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo" / "target"


def test_kv_transfer_bench_times_record(tmp_path, capsys):
    words = ["--model", str(DEMO), "--load-format", "auto", "--backend", "torch", "--rounds", "1"]
    words += ["--prompt", "150", "--drafts", "NEXTN", "--compare", "24"]
    words += ["--flags", "--page-size 16"]
    given = kv_transfer.options([*words, "--out", str(tmp_path / "found.json")])
    found = kv_transfer.run(given, "command")
    (line,), (pair,) = found["lines"], found["pairs"]
    assert line["transferred_tokens"] >= 128
    assert line["record_bytes"] > 0
    for name in ("export_ms", "import_ms", "prefill_ms", "hit_ms"):
        assert line[name] > 0
    assert pair["tokens_are_equal"]
    assert pair["acceptance_is_equal"]
    assert (pair["compared_tokens"], pair["transferred_tokens"]) == (24, line["transferred_tokens"])
    assert "torch" in capsys.readouterr().out
