"""Verify budget: the choice of draft tokens when a batch has fewer verify rows than nodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spec import draft_tree
from shared.spec import verify_budget as spec
from tests.support.cases.trees.verify_budget import batch_arguments
from tests.support.implementations import Implementation, each_implementation


class Batch:
    """Trees of random form with path weights that tie often."""

    def __init__(self, seed: int, B: int, N: int) -> None:
        drawn = batch_arguments(seed, B=B, N=N)
        self.tokens, self.parents, self.num_nodes = (
            drawn[name] for name in ("tokens", "parents", "num_nodes")
        )
        self.weights, self.calibration = drawn["weights"], drawn["calibration"]

    @property
    def ranked(self) -> np.ndarray:
        return spec.log_acceptance(self.parents, self.weights, self.calibration)

    def share(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return spec.prune_to_budget(self.tokens, self.parents, self.num_nodes, self.ranked, rows)

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """Request and node of each draft."""
        return [(b, node) for b, count in enumerate(self.num_nodes) for node in range(1, count)]

    def best(self, count: int) -> set[tuple[int, int]]:
        """The best drafts, of equals the first."""
        ranked = self.ranked
        return set(sorted(self.drafts, key=lambda at: (-ranked[at], at))[:count])


batches = given(seed=st.integers(0, 10_000), B=st.integers(1, 5), N=st.integers(1, 9))


@batches
@settings(max_examples=60, deadline=None)
def test_prune_to_budget_keeps_roots_and_best_drafts(seed, B, N):
    batch = Batch(seed, B, N)
    for rows in {B, B + 1, B + len(batch.drafts) // 2, B * N}:
        tokens, parents, num_nodes = batch.share(rows)
        best = batch.best(rows - B)
        assert num_nodes.sum() == B + len(best) <= rows
        for b in range(B):
            old = [0, *sorted(node for request, node in best if request == b)]
            assert num_nodes[b] == len(old)
            np.testing.assert_array_equal(tokens[b, : len(old)], batch.tokens[b, old])
            for new, node in enumerate(old[1:], 1):
                assert old[parents[b, new]] == batch.parents[b, node]  # which is kept
                assert parents[b, new] < new
            assert not tokens[b, len(old) :].any()
            assert not parents[b, len(old) :].any()


@batches
@settings(max_examples=30, deadline=None)
def test_prune_to_budget_with_all_rows_changes_nothing(seed, B, N):
    batch = Batch(seed, B, N)
    kept = batch.share(B * N)
    given = (batch.tokens, batch.parents, batch.num_nodes)
    is_node = np.arange(N) < batch.num_nodes[:, None]
    for got, want in zip(kept, given, strict=True):
        np.testing.assert_array_equal(got, np.where(is_node, want, 0) if want.ndim > 1 else want)


@batches
@settings(max_examples=30, deadline=None)
def test_log_acceptance_never_exceeds_parent(seed, B, N):
    batch = Batch(seed, B, N)
    batch.calibration = np.random.default_rng(seed).choice(
        np.array([0, -1, -9, -np.inf, 3], np.float32), batch.calibration.shape
    )
    ranked = batch.ranked
    above = np.take_along_axis(ranked, batch.parents, axis=1)
    assert (ranked <= above).all()
    assert not ranked[:, 0].any()


def chains_of(*edges: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chains with the given edge weights: tokens, parents, node counts and path weights."""
    N = 1 + max(map(len, edges))
    weights = np.zeros((len(edges), N), np.float32)
    for b, one in enumerate(edges):
        weights[b, 1 : 1 + len(one)] = np.cumsum(one)
    parents = np.tile(np.maximum(np.arange(N) - 1, 0), (len(edges), 1)).astype(np.int32)
    tokens = np.arange(10, 10 + len(edges) * N, dtype=np.int32).reshape(-1, N)
    return tokens, parents, np.array([1 + len(one) for one in edges], np.int32), weights


def counts_of(*edges: list[float], calibration: list[list[float]], rows: int) -> list[int]:
    tokens, parents, num_nodes, weights = chains_of(*edges)
    ranked = spec.log_acceptance(parents, weights, np.array(calibration, np.float32))
    return spec.prune_to_budget(tokens, parents, num_nodes, ranked, rows)[2].tolist()


def test_prune_to_budget_prefers_likely_drafts():
    sure, unsure, neutral = [-0.1, -0.1, -0.1], [-1.0, -1.0, -1.0], [[0.0] * 3] * 2
    assert counts_of(sure, unsure, calibration=neutral, rows=5) == [4, 1]
    assert counts_of(unsure, sure, calibration=neutral, rows=5) == [1, 4]
    assert counts_of(sure, unsure, calibration=neutral, rows=6) == [4, 2]


def test_prune_to_budget_reduces_seldom_accepted_requests():
    alike, seldom = [-0.1, -0.1, -0.1], [-2.0, -4.0, -6.0]
    assert counts_of(alike, alike, calibration=[[0.0] * 3, seldom], rows=5) == [4, 1]
    assert counts_of(alike, alike, calibration=[seldom, [0.0] * 3], rows=5) == [1, 4]


def test_prune_to_budget_ties_by_request_then_node():
    alike = [-1.0, 0.0]
    assert counts_of(alike, alike, alike, calibration=[[0.0] * 2] * 3, rows=6) == [3, 2, 1]


def test_log_acceptance_clamps_calibration_growing_with_depth():
    """A deeper node with a higher estimate counts as much as its parent."""
    ranked = spec.log_acceptance(
        *chains_of([-1.0, -0.5])[1::2], np.array([[-3.0, 0.0]], np.float32)
    )
    assert ranked.tolist() == [[0.0, -4.0, -4.0]]


def test_prune_to_budget_nan_weights_rank_last():
    """A row that failed takes no verify row from its neighbours."""
    edges = [-1.0, -1.0]
    poisoned = [np.nan, np.nan]
    for first, second, want in ((poisoned, edges, [1, 3]), (edges, poisoned, [3, 1])):
        assert counts_of(first, second, calibration=[[0.0] * 2] * 2, rows=4) == want
    assert counts_of(poisoned, poisoned, calibration=[[0.0] * 2] * 2, rows=4) == [3, 1]


@each_implementation
@pytest.mark.parametrize(("B", "N", "rows"), [(1, 1, 1), (3, 4, 7), (4, 9, 4), (5, 6, 19)])
def test_verify_budget_matches_spec(
    B: int, N: int, rows: int, implementation: Implementation
) -> None:
    ops = implementation("verify_budget")
    for seed in range(4):
        batch = Batch(seed, B, N)
        batch.weights[0, 1:3], batch.calibration[-1, -1:] = np.nan, -np.inf
        trees = (batch.parents, batch.weights, batch.calibration)
        ranked = spec.log_acceptance(*trees)
        np.testing.assert_array_equal(ops.log_acceptance(*trees), ranked)
        edges = -np.random.default_rng(seed).random((B, N)).astype(np.float32)
        np.testing.assert_array_equal(ops.chain_weights(edges), spec.chain_weights(edges))
        given = (batch.tokens, batch.parents, batch.num_nodes, ranked, rows)
        for got, want in zip(
            ops.prune_to_budget(*given), spec.prune_to_budget(*given), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_batches_contain_trees_and_ties():
    batch = Batch(0, 5, 9)
    assert (draft_tree.depths(batch.parents).max(axis=1) < 8).any()
    weights = [batch.ranked[at] for at in batch.drafts]
    assert len(set(weights)) < len(weights)
