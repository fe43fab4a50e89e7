"""The adaptive choice of NGRAM against each of its tiers, over texts that are given, in simulated
time.

Texts say anew what their prompts said, in pieces, and other things between: how much a tree is
worth changes from place to place within one text. All tiers have the same texts to write.
"""

from __future__ import annotations

from functools import cache

import pytest

from bench.imposed import SHARES, Runs, written_runs, written_work
from bench.simulated import seconds_of
from shared.engine.adaptive.tiers import Tier

MILLISECONDS = {
    "off": {1: 7.1, 4: 9.0},
    "S1": {1: 11.0, 4: 13.5},
    "S3": {1: 11.6, 4: 15.0},
    "S11": {1: 14.8, 4: 22.0},
}
"""Of a step of the demo's model on a CPU, and beside it about those of four rows."""

TIERS = tuple(map(Tier.parse, MILLISECONDS))
BATCHES, LENGTH = (1, 4), 240
NAMES = [f"{kind}, batch {batch}" for batch in BATCHES for kind in SHARES]


@cache
def runs() -> Runs:
    """With each tier, and with all of them to choose from."""
    seconds = seconds_of(MILLISECONDS)
    table = {batch: [seconds(batch, t) for t in (*TIERS, TIERS[0])] for batch in BATCHES}
    work = written_work(BATCHES, LENGTH)
    return written_runs(TIERS, table, work, overlap=1, noise=0.03)


@pytest.mark.parametrize("phase", range(len(NAMES)), ids=NAMES)
def test_each_phase_is_served_about_as_fast_as_by_its_best_tier(phase):
    static = [runs()[str(tier)][phase].speed for tier in TIERS]
    adaptive = runs()["adaptive"][phase].speed
    assert adaptive > 0.97 * max(static)
    assert adaptive > 0.98 * static[0]


def test_changing_work_is_served_faster_than_by_any_tier():
    """As much work of each phase as plain decoding had in it."""
    tokens = [each.tokens for each in runs()["off"]]
    seconds = {
        name: sum(t / each.speed for t, each in zip(tokens, phases, strict=True))
        for name, phases in runs().items()
    }
    assert min(seconds[str(tier)] for tier in TIERS) > 1.05 * seconds["adaptive"]
