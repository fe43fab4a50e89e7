"""The adaptive choice between chains and trees of a block head, on a simulated device."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from shared.engine.adaptive.policy import ExpectedValuePolicy, Static
from shared.engine.branch_calibration import BranchRates
from tests.support.simulation.block_trees import BATCHES, CHAIN, PROFILES, TREE, run
from tests.support.simulation.phases import Served


@cache
def fixed(name: str, batch: int, tier: int) -> Served:
    return run(Static(tier), PROFILES[name], batch)[0]


DEFAULT = ("code", 1)
CASES = [
    pytest.param(name, batch, marks=() if (name, batch) == DEFAULT else pytest.mark.matrix)
    for name in PROFILES
    for batch in BATCHES
]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_adaptive_near_better_of_chain_and_tree(name: str, batch: int) -> None:
    adaptive, _ = run(ExpectedValuePolicy(), PROFILES[name], batch)
    chain, tree = (fixed(name, batch, tier).speed for tier in (CHAIN, TREE))
    assert adaptive.speed > 0.98 * max(chain, tree)


@pytest.mark.matrix
def test_chain_or_tree_wins_by_batch() -> None:
    """Else the choice would be none."""
    wins = {
        fixed(name, batch, TREE).speed > fixed(name, batch, CHAIN).speed
        for name in PROFILES
        for batch in BATCHES
    }
    assert wins == {True, False}


def test_branch_rates_show_what_follows_siblings() -> None:
    _, controller = run(Static(TREE), PROFILES["bidirectional"], 8, 200)
    ratio = np.exp(controller.rates.log_ratio())
    assert (ratio[1:6] < 0.6).all()
    _, causal = run(Static(TREE), PROFILES["chat"], 8, 200)
    assert (np.exp(causal.rates.log_ratio())[1:4] > 0.7).all()


def test_trees_gain_from_branch_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated, _ = run(Static(TREE), PROFILES["bidirectional"], 8, 200)
    monkeypatch.setattr(BranchRates, "log_ratio", lambda self: np.zeros(15))
    uncalibrated, _ = run(Static(TREE), PROFILES["bidirectional"], 8, 200)
    assert calibrated.tokens == uncalibrated.tokens
    assert calibrated.steps < 0.98 * uncalibrated.steps
