"""Benchmark of host time: a run over given tiers."""

from __future__ import annotations

import pytest

from bench.speculation import host_overhead


@pytest.mark.parametrize(
    "tiers", [[], ["--tiers", "none", "S7", "S7k8N16"]], ids=["default", "tree"]
)
def test_host_overhead_measures_every_controller(
    tiers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_overhead, "STEPS", 20)
    monkeypatch.setattr(host_overhead, "WARM_UP", 5)
    lines = host_overhead.run(host_overhead.options(["--rows", "1", *tiers]), "command")["lines"]
    controllers = [(line["controller"], line["cache"]) for line in lines]
    names = ("off", "chain", "adaptive")
    assert controllers == [(name, cache) for cache in ("off", "on") for name in names]
    assert all(line["host_us"] > 0 for line in lines)
