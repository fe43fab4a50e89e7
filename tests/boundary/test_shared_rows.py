"""Verify budget on every backend: the best drafts of the whole batch get the verify rows.

The choice of verified drafts changes the speed of a request and never its output.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Decode
from shared.boundary.buffers import empty_plan
from shared.boundary.checks import check_plan
from shared.boundary.program import StepKind
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from tests.support.contract_host import (
    BATCH,
    CHAIN,
    GREEDY,
    PLAIN,
    POISON,
    SAMPLED,
    SHARED,
    TREE,
    Host,
    contract_capacity,
    contract_model,
    emitted,
    prompt,
)
from tests.support.mutations import prover

DRAFTS = SHARED.rows - BATCH
"""Verify rows for drafts: all rows minus the roots, padding rows included."""

LIKELY, SELDOM = 0.0, -50.0


def test_verify_budget_preserves_output_and_uses_all_rows(host):
    """A padded batch of several temperatures; one row may have a single draft."""
    hows = [
        SAMPLED,
        {**SAMPLED, "temperature": 2.0, "seed32": 3},
        {**GREEDY, "max_draft_tokens": 1},
    ]
    prompts = [prompt(50 + n, 12 + 9 * n) for n in range(3)]
    rows = [host.request(tokens, **how) for tokens, how in zip(prompts, hows, strict=True)]
    result = host.prefill(*rows)
    texts, counts, shares = [emitted(result, row) for row in range(3)], set(), set()
    for step in range(9):
        result = host.decode(*rows, shape=SHARED)
        nodes = result.num_nodes[:3].tolist()
        assert sum(nodes) == 3 + DRAFTS, step
        assert all(1 <= number <= SHARED.nodes for number in nodes)
        assert nodes[2] <= 2, "more drafts than the request allows"
        for row, text in enumerate(texts):
            text += emitted(result, row)
            assert result.counts[row] <= nodes[row]
            assert not result.drafts[row, nodes[row] :].any()
        counts |= set(result.counts[:3].tolist())
        shares.add(tuple(nodes))
    assert len(shares) > 1, "the rows always got the same share"
    assert max(counts) > 2, "too few drafts were accepted"
    for tokens, how, text in zip(prompts, hows, texts, strict=True):
        assert text == host.alone(tokens, len(text), **how)


def test_verify_budget_keeps_first_chain_drafts(host):
    tokens = prompt(50, 12)
    shared, whole = ([host.request(tokens, output=()) for _ in range(BATCH)] for _ in range(2))
    for rows in (shared, whole):
        host.prefill(*rows)
    few, all_of_them = host.decode(*shared, shape=SHARED), host.decode(*whole, shape=CHAIN)
    for row in range(BATCH):
        count = few.num_nodes[row]
        np.testing.assert_array_equal(few.drafts[row, :count], all_of_them.drafts[row, :count])
        np.testing.assert_array_equal(few.parents[row, :count], all_of_them.parents[row, :count])


def shared_nodes(host: Host, rows: list[Request], calibration: list[list[float]]) -> list[int]:
    """Number of nodes per row of a step; depths beyond the chain have no calibration."""
    known = np.zeros((len(rows), host.capacity.max_calibrated), np.float32)
    known[:, : len(calibration[0])] = calibration
    plan = host.planner.plan(ScheduledRows.decode(rows, SHARED, calibration=known))
    return host.run(plan).num_nodes[: len(rows)].tolist()


def test_verify_budget_prefers_rows_with_high_acceptance(host):
    rows = [host.request(prompt(60, 15)) for _ in range(BATCH)]
    host.prefill(*rows)
    likely, seldom = [LIKELY] * 3, [SELDOM] * 3
    for best in (0, 2, 3):
        known = [likely if row == best else seldom for row in range(BATCH)]
        nodes = shared_nodes(host, rows, known)
        assert nodes[best] == SHARED.nodes
        assert sum(nodes) == SHARED.rows


def test_verify_budget_skips_unlikely_depths(host):
    """Deeper nodes are not verified either, for any calibration of their own depth."""
    rows = [host.request(prompt(61, 15)) for _ in range(2)]
    host.prefill(*rows)
    assert shared_nodes(host, rows, [[LIKELY, SELDOM, LIKELY], [LIKELY] * 3]) == [2, 4]


def test_cold_row_gives_verify_budget_to_others(host):
    cold, *warm = [host.request(prompt(62 + n, 15)) for n in range(3)]
    host.prefill(cold, *warm)
    host.decode(cold, shape=PLAIN)  # leaves a gap in the draft KV
    result = host.decode(cold, *warm, shape=SHARED)
    assert result.num_nodes[0] == 1
    assert result.num_nodes[1:3].sum() == 2 + DRAFTS


def test_failed_row_takes_no_verify_budget(host):
    tokens = prompt(1, 20)
    poisoned = host.request((*prompt(13, 10), POISON, *prompt(14, 10)))
    healthy = host.request(tokens)
    text = emitted(host.prefill(poisoned, healthy), 1)
    for _ in range(4):
        result = host.decode(poisoned, healthy, shape=SHARED)
        assert result.failed.tolist()[:2] == [1, 0]
        assert result.num_nodes[1] == SHARED.nodes
        text += emitted(result, 1)
    assert text == host.alone(tokens, len(text))


def test_host_trees_beyond_verify_rows_raise():
    """Host-built trees must fit the verify rows; every row of the plan verifies its root."""
    config, _ = contract_model()
    capacity = contract_capacity(config)
    program = next(p for p in capacity.programs if p.shape == TREE and p.work is StepKind.DECODE)
    program = replace(program, shape=replace(TREE, rows=9))
    plan = empty_plan(program, capacity)
    assert isinstance(plan.work, Decode)
    assert plan.work.drafts is not None
    plan.work.drafts.num_nodes[:3] = (4, 1, 3)  # and a padding row
    check_plan(plan, [program])
    plan.work.drafts.num_nodes[1] = 2
    message = "draft trees have 10 nodes, but decode of 4 rows, 4 nodes, .* has 9 verify rows"
    with pytest.raises(ValueError, match=message):
        check_plan(plan, [program])


test_planted_fault_is_detected = prover("boundary/test_shared_rows", globals())
