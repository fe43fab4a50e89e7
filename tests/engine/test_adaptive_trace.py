"""Step trace file of an adaptive controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.engine.adaptive.policy import ExpectedValuePolicy
from shared.engine.adaptive.trace import TraceWriter
from tests.support.simulation.traced import traced
from tests.support.simulation.work import SECONDS, TIERS

FULL = Path("/dev/full")


def test_trace_writer_records_every_step(tmp_path):
    path = tmp_path / "steps.jsonl"
    _, controller = traced(path, ExpectedValuePolicy())
    first, *steps = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first["tiers"] == ["none", "S1", "S3", "S7", "S5k4N16"]
    assert first["seconds"]["8"][0] == pytest.approx(0.0046)
    assert len(steps) == sum(controller.steps.values())
    tokens = sum(1 + accepted for step in steps for accepted in step["accepted"])
    assert tokens >= 24 * (200 + 150 + 150) - 72  # the prefill yields the first token of a request
    for step in steps:
        rows = len(step["requests"])
        assert rows == len(step["drafted"]) == len(step["accepted"]) == len(step["evidence"])
        assert 0.5 < step["seconds"] / SECONDS(step["batch"], TIERS[step["tier"]]) < 2


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a file on a full disk")
def test_trace_writer_full_disk_stops_tracing_only(capsys):
    trace = TraceWriter(FULL, TIERS, {})
    trace.flush()
    trace.flush()
    err = capsys.readouterr().err
    fault = "No space left on device; tracing ends, serving continues"
    assert err == f"cannot write the trace {FULL}: {fault}\n"
