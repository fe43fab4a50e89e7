"""Acceptance: the emitted tokens are the target's own, for any draft."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spec import acceptance as spec
from shared.spec import draft_tree
from tests.support.implementations import Implementation, each_implementation
from tests.support.random_trees import random_trees
from tests.support.sampling_rows import neutral


def walk_one(
    tokens: np.ndarray, parents: np.ndarray, num_nodes: int, choices: np.ndarray, depth: int
) -> list[int]:
    way = [0]
    while len(way) <= depth:
        children = [n for n in range(1, num_nodes) if parents[n] == way[-1]]
        found = [n for n in children if tokens[n] == choices[way[-1]]]
        if not found:
            break
        way += found
    return way


@given(seed=st.integers(0, 10_000), N=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_accept_greedy_path_follows_choices_from_root(seed: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, parents, num_nodes = random_trees(rng, 4, N)
    depth = int(draft_tree.depths(parents).max())
    choices = rng.integers(0, 2, (4, N)).astype(np.int32)
    path, counts = spec.accept_greedy_path(tokens, parents, num_nodes, choices, depth)
    out = spec.emitted(choices, path, counts)
    for b in range(4):
        way = walk_one(tokens[b], parents[b], int(num_nodes[b]), choices[b], depth)
        assert counts[b] == len(way)
        assert path[b].tolist() == way + [way[-1]] * (depth + 1 - len(way))
        assert out[b].tolist() == choices[b, way].tolist() + [0] * (depth + 1 - len(way))


def test_accept_greedy_path_ignores_padding_nodes() -> None:
    # A padding node is a child of the root with token 0, which the target may well choose.
    tokens, parents = np.array([[5, 7, 0, 0]], np.int32), np.zeros((1, 4), np.int32)
    choices = np.zeros((1, 4), np.int32)
    _, counts = spec.accept_greedy_path(tokens, parents, np.array([2], np.int32), choices, 1)
    assert counts.tolist() == [1]


def test_accept_greedy_path_root_not_own_child() -> None:
    tokens, parents = np.array([[3, 4]], np.int32), np.zeros((1, 2), np.int32)
    _, counts = spec.accept_greedy_path(
        tokens, parents, np.array([2], np.int32), np.array([[3, 3]], np.int32), 1
    )
    assert counts.tolist() == [1]


def test_force_chain_emits_row_tokens() -> None:
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 0], [1, 0, 0, 0], [1, 2, 3, 4]], np.int32)
    parents = np.array([[0, 0, 1, 2]] * 4, np.int32)
    num_nodes = np.array([4, 3, 1, 4], np.int32)
    choices = np.full((4, 4), 9, np.int32)
    forced = np.array([True, True, True, False])
    forced_choices, walked = spec.force_chain(tokens, num_nodes, choices, forced)
    path, counts = spec.accept_greedy_path(tokens, parents, walked, forced_choices, 3)
    out = spec.emitted(forced_choices, path, counts)
    # n nodes: n - 1 tokens, and n - 1 positions get KV; one node has nothing to force.
    assert counts.tolist() == [3, 2, 1, 1]
    assert out.tolist() == [[2, 3, 4, 0], [2, 3, 0, 0], [9, 0, 0, 0], [9, 0, 0, 0]]
    assert path[0].tolist() == [0, 1, 2, 2]


def test_failed_only_for_nan_on_accepted_path() -> None:
    path = np.array([[0, 2, 2], [0, 2, 2]], np.int32)
    is_bad = np.array([[False, True, False], [False, False, True]])
    assert spec.failed(is_bad, path).tolist() == [False, True]
    assert not spec.emitted(np.ones((2, 3), np.int32), path, np.zeros(2, np.int32)).any()


@each_implementation
@pytest.mark.parametrize("N", [1, 4, 9])
def test_acceptance_matches_spec(N: int, implementation: Implementation) -> None:
    ops, rng, B, depth = implementation("acceptance"), np.random.default_rng(N), 16, min(N - 1, 4)
    tokens, parents, num_nodes = random_trees(rng, B, N)
    choices = rng.integers(0, 3, (B, N)).astype(np.int32)
    forced = rng.integers(0, 2, B).astype(bool)
    want = spec.force_chain(tokens, num_nodes, choices, forced)
    for got, wanted in zip(ops.force_chain(tokens, num_nodes, choices, forced), want, strict=True):
        np.testing.assert_array_equal(got, wanted)
    path, counts = spec.accept_greedy_path(tokens, parents, num_nodes, choices, depth)
    got_path, got_counts = ops.accept_greedy_path(tokens, parents, num_nodes, choices, depth)
    np.testing.assert_array_equal(got_path, path)
    np.testing.assert_array_equal(got_counts, counts)
    counts[0] = 0  # a failed row emits nothing
    got = ops.emitted(choices, path, counts)
    np.testing.assert_array_equal(got, spec.emitted(choices, path, counts))
    is_nan = rng.integers(0, 2, (B, N)).astype(bool)
    np.testing.assert_array_equal(ops.failed(is_nan, path), spec.failed(is_nan, path))


def random_chains(rng: np.random.Generator) -> tuple:
    """Arguments of the rejection rule's functions, with excluded tokens and greedy rows."""
    B, N, vocab = 64, 4, 6
    tokens = rng.integers(0, vocab, (B, N)).astype(np.int32)
    p, q = rng.dirichlet(np.full(vocab, 0.5), (2, B, N)).astype(np.float32)
    p[rng.random(p.shape) < 0.2] = 0
    return (
        tokens,
        rng.integers(1, N + 1, B).astype(np.int32),
        rng.integers(0, vocab, (B, N)).astype(np.int32),
        p,
        np.where(rng.random((B, 1, 1)) < 0.2, spec.one_hot_q(tokens, vocab), q[:, 1:]),
        neutral(
            B,
            vocab,
            temperature=np.where(rng.random(B) < 0.2, 0, 0.7).astype(np.float32),
            seed=rng.integers(0, 2**32, B, dtype=np.uint32),
        ),
        rng.integers(0, 90_000, B).astype(np.int32),
    )


RULES = ("rejection_choices", "block_choices")


@pytest.mark.parametrize("rule", RULES)
def test_rejection_rules_preserve_greedy_rows_and_bonus_token(rule: str) -> None:
    chains = random_chains(np.random.default_rng(3))
    _, num_nodes, choices, *_, sampling, _ = chains
    got = getattr(spec, rule)(*chains)
    last, rows = num_nodes - 1, np.arange(len(num_nodes))
    assert (got[rows, last] == choices[rows, last]).all()
    assert (got[sampling.temperature == 0] == choices[sampling.temperature == 0]).all()
    assert (got != choices).any()


@pytest.mark.parametrize("rule", RULES)
def test_rejection_rules_never_emit_rejected_draft(rule: str) -> None:
    """So the walk, which follows the choices, stops exactly where the rule does."""
    rng = np.random.default_rng(4)
    tokens, num_nodes, choices, p, q, sampling, lengths = random_chains(rng)
    # A draft that the target excludes is rejected; the draw that takes its place is another token.
    p[np.arange(len(p))[:, None], np.arange(3), tokens[:, 1:]] = 0
    p /= p.sum(axis=2, keepdims=True) + 1e-9
    warm = replace(sampling, temperature=np.full_like(sampling.temperature, 0.7))
    everyone = np.full_like(num_nodes, 4)
    got = getattr(spec, rule)(tokens, everyone, choices, p, q, warm, lengths)
    has_mass = p[:, :3].sum(axis=2) > 0.5
    assert (got[:, 0] != tokens[:, 1])[has_mass[:, 0]].all()


def test_rejection_rules_accept_drafts_of_equal_distributions() -> None:
    rng = np.random.default_rng(5)
    tokens, num_nodes, choices, p, _, sampling, lengths = random_chains(rng)
    p = rng.dirichlet(np.full(6, 0.5), p.shape[:2]).astype(np.float32)
    warm = replace(sampling, temperature=np.full_like(sampling.temperature, 0.7))
    given = (tokens, np.full_like(num_nodes, 4), choices, p, p[:, :3], warm, lengths)
    for rule in RULES:
        got = getattr(spec, rule)(*given)
        assert (got[:, :3] == tokens[:, 1:]).all()


@each_implementation
@pytest.mark.parametrize("rule", RULES)
def test_rejection_rules_match_spec(rule: str, implementation: Implementation) -> None:
    ops, chains = implementation("acceptance"), random_chains(np.random.default_rng(6))
    np.testing.assert_array_equal(getattr(ops, rule)(*chains), getattr(spec, rule)(*chains))
    tokens, scores = chains[0], np.log(chains[4] + np.float32(1e-9))
    scores[0, 0, 0] = np.nan
    got, want = ops.draft_probs(scores, tokens), spec.draft_probs(scores, tokens)
    # Float32 on both sides: only the order of the sum over the vocabulary differs.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(ops.one_hot_q(tokens, 6), spec.one_hot_q(tokens, 6))


@each_implementation
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_accept_greedy_path_chain_without_parents_matches_spec(
    depth: int, implementation: Implementation
) -> None:
    ops, rng, B = implementation("acceptance"), np.random.default_rng(depth), 32
    parents = np.tile(np.maximum(np.arange(depth + 1, dtype=np.int32) - 1, 0), (B, 1))
    tokens, choices = rng.integers(0, 2, (2, B, depth + 1)).astype(np.int32)
    num_nodes = rng.integers(1, depth + 2, B).astype(np.int32)
    given = (tokens, parents, num_nodes, choices, depth)
    for got, want in zip(
        ops.accept_greedy_path(*given, True), spec.accept_greedy_path(*given), strict=True
    ):
        np.testing.assert_array_equal(got, want)
