"""The trace of an adaptive controller, and the policies that are scored on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import policy
from bench.phases import imposed, serve
from bench.simulated import SimulatedBackend, simulated_limits
from shared.engine.adaptive.choice import BestValue, Static
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.trace import Trace
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from tests.engine.test_adaptive import SECONDS, TIERS, always, mixed

BATCHES = (1, 8)
WORK = (
    ("copying", 8, 24, 200, always(0.95)),
    ("free text", 8, 24, 150, always(0.05)),
    ("mixed", 8, 24, 150, mixed),
)


def traced(path: Path, chooser=None) -> tuple[Engine, AdaptiveController]:
    phases, law = imposed(WORK, part=1 << 20)
    limits = simulated_limits(TIERS, BATCHES, overlap=1)
    backend = SimulatedBackend(limits, SECONDS, law, noise=0.02)
    table = {batch: [SECONDS(batch, tier) for tier in TIERS] for batch in BATCHES}
    trace = Trace(path, TIERS, table)
    controller = AdaptiveController(limits, chooser or BestValue(), table, trace)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=2048, cache=NO_CACHE)
    serve(engine, phases, lambda: backend.clock)
    return engine, controller


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    traced(found)
    return found


def test_every_step_has_a_line_and_all_are_there_when_nothing_runs(tmp_path):
    path = tmp_path / "steps.jsonl"
    _, controller = traced(path)
    first, *steps = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first["tiers"] == ["off", "S1", "S3", "S7", "S5k4N16"]
    assert first["seconds"]["8"][0] == pytest.approx(0.0046)
    assert len(steps) == sum(controller._steps.values())
    tokens = sum(1 + accepted for step in steps for accepted in step["accepted"])
    assert tokens >= 24 * (200 + 150 + 150) - 72  # the first of a request is its prompt's
    for step in steps:
        rows = len(step["requests"])
        assert rows == len(step["drafted"]) == len(step["accepted"]) == len(step["evidence"])
        assert 0.5 < step["seconds"] / SECONDS(step["batch"], TIERS[step["tier"]]) < 2


def test_policies_are_scored_on_a_trace(path):
    """Off, every tier and the oracle frame what the recorded policy reached."""
    found = {score.name: score for score in policy.scores(policy.read(path))}
    assert set(found) == {"off", "S1", "S3", "S7", "S5k4N16", "adaptive", "greedy", "oracle"}
    static = [found[str(tier)].speed for tier in TIERS]
    assert found["oracle"].speed >= found["adaptive"].speed > max(static)
    assert all(score.speed > 0 for score in found.values())
    assert "adaptive" in policy.table(list(found.values()))


def test_a_static_tier_scores_what_it_was_recorded_to_give(tmp_path):
    path = tmp_path / "steps.jsonl"
    traced(path, Static(2))
    recorded = policy.read(path)
    steps = [step for step in recorded.steps if step.seconds]
    tokens = sum(sum(max(1 + a, 0) for a in step.accepted) for step in steps)
    speed = tokens / sum(step.seconds for step in steps)
    found = {score.name: score.speed for score in policy.scores(recorded)}
    assert found["S3"] == pytest.approx(speed, rel=0.03)


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    trace = Trace(path, TIERS, {})

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        flush = write

    trace._file = Full()  # type: ignore[assignment]
    trace._write({})
    trace._write({})
    trace.flush()
    told = capsys.readouterr().err
    assert told == f"the trace {path} ends here: No space left on device; serving goes on\n"


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is no trace"):
        policy.read(path)
