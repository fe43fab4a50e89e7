"""Soak benchmark of a server: it fails if a measure grows, and only then."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.serving import soak
from bench.serving.soak import Growth, Sample, judge, metrics

MINUTES = 10
RNG = random.Random(1)


def steady(count: int = 80) -> list[Sample]:
    """A server with caches that fill in the first quarter, and noise afterwards."""
    return [
        Sample(
            at_s=2.0 * i,
            rss_bytes=(400 << 20) + min(i, count // 4) * (4 << 20) + RNG.randrange(3 << 20),
            threads=13,
            files=33 + RNG.randrange(7),
            acceptance=2.5 + RNG.uniform(-0.1, 0.1),
        )
        for i in range(count)
    ]


def test_judge_accepts_noise_and_initial_growth():
    assert set(judge(steady())) == {"rss_bytes", "threads", "files", "acceptance"}


@pytest.mark.parametrize(
    ("name", "grown"),
    [
        ("rss_bytes", lambda s, i: s.rss_bytes + i * (1 << 20)),
        ("threads", lambda s, i: s.threads + i // 6),
        ("files", lambda s, i: s.files + i // 8),
        ("acceptance", lambda s, i: s.acceptance - i / 400),
    ],
)
def test_judge_detects_slow_growth(name, grown):
    samples = [replace(s, **{name: grown(s, i)}) for i, s in enumerate(steady())]
    with pytest.raises(Growth, match=f"^{name} went from"):
        judge(samples)


def test_metrics_summed_by_name():
    page = '# HELP a\ntandem:a_total{model_name="x",k="1"} 2.0\ntandem:a_total{k="2"} 3.0\nb 1\n'
    assert metrics(page) == {"a_total": 5.0, "b": 1.0}


@pytest.mark.matrix
def test_soak_of_mixed_traffic_has_no_growth(tmp_path):
    assert soak.main(["--minutes", str(MINUTES), "--out", str(tmp_path / "soak.json")]) == 0
