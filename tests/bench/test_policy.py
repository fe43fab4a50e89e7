"""Adaptive policies replayed and scored on a trace."""

from pathlib import Path

import pytest

from bench.speculation import policy_replay
from shared.engine.adaptive.policy import ExpectedValuePolicy, Static
from tests.support.simulation.traced import traced
from tests.support.simulation.work import TIERS


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    traced(found, ExpectedValuePolicy())
    return found


def test_policy_replay_scores_all_policies(path):
    """Plain decoding, every tier and the oracle bound the recorded policy."""
    found = {score.name: score for score in policy_replay.scores(policy_replay.read(path))}
    tiers = {"none", "S1", "S3", "S7", "S5k4N16"}
    assert set(found) == tiers | {"adaptive", "greedy", "probe", "oracle"}
    static = [found[str(tier)].speed for tier in TIERS]
    assert found["oracle"].speed >= found["adaptive"].speed > max(static)
    assert all(score.speed > 0 for score in found.values())
    assert "adaptive" in policy_replay.table(list(found.values()))


def test_policy_replay_static_score_equals_recorded_speed(tmp_path):
    path = tmp_path / "steps.jsonl"
    traced(path, Static(2))
    recorded = policy_replay.read(path)
    steps = [step for step in recorded.steps if step.seconds]
    tokens = sum(sum(max(1 + a, 0) for a in step.accepted) for step in steps)
    speed = tokens / sum(step.seconds for step in steps)
    found = {score.name: score.speed for score in policy_replay.scores(recorded)}
    assert found["S3"] == pytest.approx(speed, rel=0.03)


def test_policy_replay_rejects_other_files(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is no trace"):
        policy_replay.read(path)
