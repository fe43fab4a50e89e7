"""Benchmark of merged draft trees: step costs and comparisons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speculation.merged_drafts import SIMULATED, Costs, compared
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.spec.draft_tree import TreeShape

COSTS = Costs(
    drafted={1: 5.0, 8: 6.0},
    fed={1: 4.5, 8: 5.0},
    verified={1: 4.0, 4: 4.1, 12: 4.5, 32: 5.0},
    nodes=4,
    waits=0.25,
)
CHAIN = TreeShape.chain(3, 1)
JOINED = TreeShape(nodes=12, depth=8, width=1, rows=12, grown=CHAIN, copied=20)


def program(shape: TreeShape, extras: ProgramFeature = ProgramFeature.NONE) -> Program:
    return Program(work=StepKind.DECODE, batch=1, pages=1, tokens=0, shape=shape, extras=extras)


def test_costs_add_drafter_rows_and_host_wait():
    alone = replace(JOINED, grown=TreeShape.plain(1))
    assert COSTS.of(program(CHAIN)) == pytest.approx(5.0)
    assert COSTS.of(program(JOINED, ProgramFeature.NGRAM_DRAFTS)) == pytest.approx(5.4)
    assert COSTS.of(program(alone, ProgramFeature.NGRAM_DRAFTS)) == pytest.approx(4.9)
    assert COSTS.of(program(TreeShape.chain(11, 1), ProgramFeature.HOST_DRAFT)) == pytest.approx(
        4.75
    )
    assert COSTS.draft_share(1) == pytest.approx(5.0 / 4.5 - 1)


def test_compared_divides_by_better_source():
    def line(drafts: str, per_step: float, **speeds: float) -> dict:
        same = {"backend": "torch", "batch": 1, "kind": "code", "texts": 7}
        return {
            **same,
            "drafts": drafts,
            "tokens_per_step": per_step,
            "simulated_tokens_per_s": speeds,
        }

    lines = [line("NEXTN", 4.0, A=100.0, B=50.0), line("NGRAM", 3.0, A=80.0, B=60.0)]
    (ratios,) = compared([*lines, line("NEXTN+NGRAM", 5.0, B=75.0)])
    assert ratios["texts_equal"]
    assert (ratios["tokens_per_step"], ratios["B"]) == (1.25, 1.25)
    assert "A" not in ratios
    (ratios,) = compared([*lines, line("NEXTN+NGRAM", 5.0, B=75.0) | {"texts": 8}])
    assert not ratios["texts_equal"]


def test_simulated_costs_have_valid_reports():
    for models in SIMULATED.values():
        for made in models.values():
            costs = made()
            assert 0 <= costs.draft_share(1) < 1
            rows = list(costs.verified.values())
            assert rows == sorted(rows)
