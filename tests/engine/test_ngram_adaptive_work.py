"""Adaptive NGRAM against each of its tiers, with given outputs, in simulated time.

Outputs repeat parts of their prompts with other tokens between, so the value of a tree changes
within one output. All tiers have the same outputs.
"""

from __future__ import annotations

from functools import cache

import pytest

from shared.engine.adaptive.tiers import Tier
from shared.engine.ngram.probe_schedule import ProbeSchedule
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from tests.support.simulation import imposed
from tests.support.simulation.device import PROMPT_SECONDS
from tests.support.simulation.imposed import SHARES, Runs, written_runs, written_work

TIERS = tuple(map(Tier.parse, ("none", "S1", "S3", "S11")))
BATCHES, LENGTH = (1, 4), 240
MILLISECONDS = {
    "a CPU": {1: [7.1, 11.0, 11.6, 14.8, 7.1], 4: [9.0, 13.5, 15.0, 22.0, 9.0]},
    "short steps": {1: [0.36, 0.44, 0.46, 0.52, 0.28], 4: [0.39, 0.47, 0.49, 0.59, 0.27]},
    "long steps": {1: [4.41, 4.84, 4.69, 4.84, 4.20], 4: [4.42, 4.73, 4.84, 5.57, 4.18]},
}
"""Milliseconds per step by batch: each tier, and last plain steps with overlap.

A CPU has no launch latency to hide. On an H200 the demo model has short steps, of which waiting is
a large part, and Qwen3-8B has long ones."""

NAMES = [f"{kind}, batch {batch}" for batch in BATCHES for kind in SHARES]


@cache
def runs(device: str) -> Runs:
    """Runs with each tier, and with a choice among all tiers."""
    work = written_work(BATCHES, LENGTH, 3)
    return written_runs(TIERS, table_of(device), work, overlap=1, noise=0.03)


def table_of(device: str) -> dict[int, list[float]]:
    """Seconds per step by batch."""
    return {batch: [ms / 1000 for ms in each] for batch, each in MILLISECONDS[device].items()}


def devices() -> list:
    """Short and long steps of a GPU; steps of a CPU only in the matrix tests."""
    seldom = {"a CPU": pytest.mark.matrix}
    return [pytest.param(name, marks=seldom.get(name, ())) for name in MILLISECONDS]


@pytest.mark.parametrize("phase", range(len(NAMES)))
@pytest.mark.parametrize("device", devices())
def test_adaptive_speed_per_phase_near_best_tier(device, phase):
    found = runs(device)
    static = [found[str(tier)][phase].speed for tier in TIERS]
    adaptive = found["adaptive"][phase].speed
    assert adaptive > 0.97 * max(static)
    assert adaptive > 0.98 * static[0]


@pytest.mark.parametrize("device", devices())
def test_adaptive_beats_every_static_tier_on_changing_work(device):
    """Each phase has the number of tokens that it has with plain decoding."""
    found = runs(device)
    tokens = [each.tokens for each in found["none"]]
    seconds = {
        name: sum(t / each.speed for t, each in zip(tokens, phases, strict=True))
        for name, phases in found.items()
    }
    assert min(seconds[str(tier)] for tier in TIERS) > 1.05 * seconds["adaptive"]


def test_adaptive_ngram_beats_tiers_on_half_copied_text():
    """If half of an output is copied, neither fixed mode is as fast."""
    found = runs("short steps")
    phase = NAMES.index("half and half, batch 1")
    best = max(found[str(tier)][phase].speed for tier in TIERS)
    assert found["adaptive"][phase].speed > 1.1 * best


def test_probe_gains_equal_time_saved_over_plain(monkeypatch):
    gains = []
    monkeypatch.setattr(ProbeSchedule, "on_gain", lambda sleep, seconds: gains.append(seconds))
    table, ([copying, *_], texts) = table_of("short steps"), written_work([1], LENGTH, 3)
    served = written_runs(TIERS, table, ([copying], texts), overlap=1)["adaptive"][0]
    # Each token of a lone row would take a plain step, except the first, of the prefill.
    count = len(copying.requests)
    plain = (served.tokens - count) * table[1][-1] + count * PROMPT_SECONDS
    assert sum(gains) == pytest.approx(plain - served.seconds, rel=0.1)
    assert sum(gains) > 0.3 * served.seconds


def test_adaptive_ngram_costs_exclude_mode_switches(monkeypatch):
    made = []

    class Watched(AdaptiveNgramController):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(imposed, "AdaptiveNgramController", Watched)
    table = table_of("short steps")
    written_runs(TIERS, table, written_work([1], LENGTH // 2, 3), overlap=1)
    (controller,) = made
    assert controller.steps[len(TIERS)] > 50 < controller.steps[len(TIERS) - 1]
    assert controller.costs.of(1, 1) == pytest.approx(table[1], rel=0.01)
