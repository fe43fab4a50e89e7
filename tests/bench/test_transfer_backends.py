"""Bench of the transfer backends: rows, and the result file."""

from __future__ import annotations

import json

from bench.serving import transfer_backends


def test_bench_writes_row_for_each_backend(tmp_path):
    path = tmp_path / "result.json"
    words = ["--mib", "0.5", "--rounds", "2", "--out", str(path)]
    assert transfer_backends.main(words) == 0
    found = json.loads(path.read_text())
    assert [(row["backend"], row["mib"]) for row in found["rows"]] == [("shm", 0.5), ("tcp", 0.5)]
    for row in found["rows"]:
        assert 0 < row["fetch_ms"] <= row["fetch_and_read_ms"]
        assert row["gb_per_s"] > 0
    assert found["command"].endswith(" ".join(words))
