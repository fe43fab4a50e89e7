"""Counted acceptance of first children, and the controller that calibrates trees with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shared.engine.branch_calibration import BranchRates, with_branch_calibration
from shared.engine.controller import StaticController
from shared.spec.draft_tree import TreeShape
from tests.support.contract_host import contract_capacity, contract_model
from tests.support.drafter_cases import BLOCK_TREE, capacity_of

PARENTS = np.array([[0, 0, 0, 2, 3]] * 3, np.int32)
"""The root's children are 1 and 2, that of 2 is 3, and that of 3 is 4."""

DRAFTS = np.array([[9, 1, 2, 3, 4]] * 3, np.int32)
TOKENS = np.array([[2, 3, 5, 0], [1, 5, 0, 0], [0, 0, 0, 0]], np.int32)
ACCEPTED = np.array([2, 1, -1])


def learnt(copied: np.ndarray | None) -> BranchRates:
    rates = BranchRates(4)
    rates.learn(PARENTS, DRAFTS, np.array([5, 5, 5]), copied, TOKENS, ACCEPTED)
    return rates


def test_branch_rates_count_first_children() -> None:
    rates = learnt(None)
    np.testing.assert_array_equal(rates.offered, [[2, 0, 0, 0], [0, 1, 1, 0]])
    np.testing.assert_array_equal(rates.accepted, [[1, 0, 0, 0], [0, 1, 0, 0]])


def test_branch_rates_end_at_ngram_siblings() -> None:
    copied = np.zeros_like(PARENTS)
    copied[0, 4], copied[1, 2] = 5, 3
    rates = learnt(copied)
    np.testing.assert_array_equal(rates.offered, [[1, 0, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(rates.accepted, [[0, 0, 0, 0], [0, 1, 0, 0]])


def test_branch_rates_decay_by_step() -> None:
    rates = learnt(None)
    nothing = np.full(3, -1)
    rates.learn(PARENTS, DRAFTS, np.array([5, 5, 5]), None, TOKENS, nothing)
    np.testing.assert_allclose(rates.offered, 0.999 * np.array([[2, 0, 0, 0], [0, 1, 1, 0]]))


def test_branch_calibration_wraps_block_trees_only() -> None:
    chains = contract_capacity(contract_model()[0])
    controller = StaticController(chains, nodes=4, depth=3, width=1)
    assert with_branch_calibration(controller, chains) is controller
    trees = capacity_of("llama", "DFLASH", BLOCK_TREE)
    controller = StaticController(trees, nodes=12, depth=3, width=4)
    assert with_branch_calibration(controller, trees) is not controller
    shape = TreeShape(nodes=12, depth=3, width=4, rows=36)
    trees = capacity_of("llama", "EAGLE3", shape)
    controller = StaticController(trees, nodes=12, depth=3, width=4)
    assert with_branch_calibration(controller, trees) is controller


def test_branch_calibration_is_off_with_simulated_acceptance() -> None:
    trees = capacity_of("llama", "DFLASH", BLOCK_TREE)
    simulated = replace(trees, accept_rates=(1.0, 0.5))
    controller = StaticController(simulated, nodes=12, depth=3, width=4)
    assert with_branch_calibration(controller, simulated) is controller
