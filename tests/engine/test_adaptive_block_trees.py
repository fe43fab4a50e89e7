"""The adaptive choice between chains and trees of a block head, on a simulated device."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, Static
from shared.engine.adaptive.tiers import Tier
from shared.engine.branch_calibration import BranchCalibrationController, BranchRates
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from tests.support.simulation.block_trees import BlockTreeBackend, Profile, block_seconds
from tests.support.simulation.device import simulated_capacity
from tests.support.simulation.phases import Served, imposed, serve
from tests.support.simulation.work import always

TIERS = (Tier(1, 0, 0), Tier(8, 7, 1), Tier(16, 15, 1), Tier(32, 15, 8))
CHAIN, TREE = 2, 3
BATCHES = (1, 8, 32)

# At batch 1 chains of 15 drafts give 8.0, 5.6 and 3.3 tokens a step, trees of 32 nodes 9.6, 7.2
# and 4.8.
PROFILES = {
    "maths": Profile(certain=0.7, least=0.5, most=0.95),
    "code": Profile(certain=0.5, least=0.5, most=0.9),
    "chat": Profile(certain=0.2, least=0.4, most=0.85),
    "bidirectional": Profile(certain=0.3, least=0.4, most=0.85, follows=0.3),
}


def run(
    policy: Policy, profile: Profile, batch: int, tokens: int = 600
) -> tuple[Served, BranchCalibrationController]:
    """A phase of one policy, and its controller."""
    phases, _ = imposed([("texts", batch, 2 * batch + 6, tokens, always(0.0))], part=1 << 20)
    capacity = simulated_capacity(TIERS, BATCHES, overlap=1, block=16)
    backend = BlockTreeBackend(capacity, block_seconds, profile, noise=0.03)
    table = {b: [block_seconds(b, tier) for tier in TIERS] for b in BATCHES}
    inner = AdaptiveController(capacity, policy, table, has_experts=False)
    controller = BranchCalibrationController(inner, capacity)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=2048, cache=NO_CACHE)
    return serve(engine, phases, lambda: backend.clock)[0], controller


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
