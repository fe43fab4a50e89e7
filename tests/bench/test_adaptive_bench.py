"""Benchmark of changing workloads: phases, oracle and result lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.speculation.adaptive import lines_of, table_of
from bench.speculation.adaptive_ngram_replay import in_orders
from bench.speculation.recorded_tiers import seconds_by_tier
from shared.engine.adaptive.acceptance import ExpectedTokens
from shared.engine.adaptive.policy import PolicyInput
from shared.engine.adaptive.tiers import Tier
from tests.support.simulation.imposed import DISABLED, rated_runs, rated_work, written_work
from tests.support.simulation.policies import Greedy, Probe

TIERS = (Tier(1, 0, 0), Tier(4, 3, 1), Tier(8, 7, 1, 0.5), Tier(8, 7, 1))
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
TABLE = {1: [0.0043, 0.0052, 0.006, 0.0066], 8: [0.0046, 0.00575, 0.0064, 0.0075]}


def test_oracle_bounds_every_policy():
    work = rated_work([8], 100, 5)
    runs = rated_runs(TIERS, TABLE, work, 1)
    lines = lines_of(runs, TIERS)
    assert [line["phase"] for line in lines] == [*(phase.name for phase in work[0]), "all"]
    total = lines[-1]
    speeds = total["tokens_per_s"]
    assert set(speeds) == {"none", "S3", "S7R0.5", "S7", "greedy", "probe", "adaptive", "oracle"}
    assert speeds["oracle"] > 0.99 * max(speeds.values())
    assert total["regret"] == pytest.approx(1 - speeds["adaptive"] / speeds["oracle"], abs=1e-3)
    assert total["adaptive_by_off"] > 1.2
    assert total["ranked_by_equal"] == pytest.approx(speeds["S7R0.5"] / speeds["S3"], abs=1e-3)
    assert all(line["phase"] in table_of("simulated", lines) for line in lines)


def test_probe_policy_visits_other_tiers_periodically():
    tokens = np.array([1.0, 3.0, 2.0])
    expected = ExpectedTokens(tokens, tokens, np.zeros((3, 3)), np.zeros(3))
    now = PolicyInput([1.0, 1.0, 1.0], expected, num_rows=1, after_off=0.0, steps_ahead=10.0)
    probe = Probe()
    chosen = [probe.choose(now) for _ in range(300)]
    best, first, second = [1], [2] * 3, [0] * 3
    assert chosen == best * 100 + first + best * 97 + second + best * 97
    assert {Greedy().choose(now) for _ in range(300)} == {1}


def test_in_orders_reports_phases_in_first_order():
    """A text that repeats its prompt pays for drafts, whichever phase comes first."""
    phases, texts = written_work([1], 60, 3)
    seconds = {"1": {"none": 0.5, "S3": 0.6, "disabled": 0.4}}
    lines = in_orders(seconds, phases, texts, orders=2)
    assert [line["phase"] for line in lines] == [*(phase.name for phase in phases), "all"]
    copying = lines[0]["tokens_per_s"]
    assert copying["S3"] > 1.2 * copying["none"]


def test_in_orders_step_time_at_min_device_time():
    phases, texts = written_work([1], 20, 3)
    seconds = {"1": {"none": 0.006, "S3": 0.007, "disabled": 0.001}}
    lines = in_orders(seconds, phases[:1], texts, orders=1, submit_s=0.001)
    speeds = lines[0]["tokens_per_s"]
    assert set(speeds) == {"none", "S3", "adaptive"}
    assert speeds["none"] < 1 / 0.005


def test_recorded_tiers_have_names_of_today():
    """Reports of former versions have other names for two tiers."""
    found = set[str]()
    for path in RESULTS.glob("adaptive_*.json"):
        for start in json.loads(path.read_text(encoding="utf-8"))["starts"]:
            for of_tiers in seconds_by_tier(start["seconds"]).values():
                found |= of_tiers.keys()
    assert {"none", DISABLED, "S3"} <= found
    assert all(str(Tier.parse(name)) == name for name in found - {DISABLED})
