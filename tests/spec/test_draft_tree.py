"""Draft trees: valid shapes, masks and depths, and the choice of candidates."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spec import draft_tree as spec
from shared.spec.draft_tree import TreeShape
from tests.support.implementations import Implementation, each_implementation

GOLDEN = Path(__file__).parents[1] / "golden"


def random_parents(rng: np.random.Generator, B: int, N: int) -> np.ndarray:
    parents = [[0] + [rng.integers(0, node) for node in range(1, N)] for _ in range(B)]
    return np.array(parents, np.int32)


def way_to_root(parents: np.ndarray, node: int) -> list[int]:
    way = [node]
    while way[-1]:
        way.append(int(parents[way[-1]]))
    return way


class TestTreeShape:
    def test_tree_shape_chain_and_plain_constructors(self) -> None:
        assert TreeShape.chain(3, 2) == TreeShape(nodes=4, depth=3, width=1, rows=8)
        assert TreeShape.plain(5) == TreeShape(nodes=1, depth=0, width=0, rows=5)
        assert TreeShape.plain(5).is_plain
        assert not TreeShape.chain(1, 5).is_plain

    @pytest.mark.parametrize(
        "shape",
        [(2, 0, 0, 1), (3, 3, 1, 3), (5, 3, 1, 5), (8, 1, 2, 8), (12, 2, 3, 0), (1, 0, 1, 1)],
    )
    def test_tree_shape_rejects_invalid_sizes(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="must"):
            TreeShape(*shape)

    def test_scratch_covers_growth_rows_beyond_nodes(self) -> None:
        # A wide tree with few nodes drafts k(S-1) rows and the first: more than N.
        assert TreeShape(nodes=8, depth=5, width=8, rows=8).scratch == 33
        assert TreeShape(nodes=60, depth=3, width=8, rows=60).scratch == 60
        assert TreeShape.plain(1).scratch == 1
        assert TreeShape.chain(1, 1).scratch == 2

    def test_scratch_covers_block_wider_than_tree(self) -> None:
        assert TreeShape(nodes=3, depth=2, width=1, rows=3, block=8).scratch == 8
        assert TreeShape(nodes=8, depth=7, width=1, rows=8, block=8).scratch == 8


class TestMasks:
    @given(seed=st.integers(0, 1000), N=st.integers(1, 40))
    @settings(max_examples=25, deadline=None)
    def test_depths_and_ancestors_equal_path_to_root(self, seed: int, N: int) -> None:
        parents = random_parents(np.random.default_rng(seed), 2, N)
        depths, mask = spec.depths(parents), spec.ancestors(parents)
        for b in range(2):
            for node in range(N):
                way = way_to_root(parents[b], node)
                assert depths[b, node] == len(way) - 1
                assert np.flatnonzero(mask[b, node]).tolist() == way[::-1]

    @pytest.mark.parametrize("head", ["eagle1", "eagle3"])
    def test_ancestors_and_depths_of_golden_trees(self, head: str) -> None:
        golden = np.load(GOLDEN / head / "vectors.npz")
        mask = golden["tree_mask"].astype(bool)
        proper = mask & ~np.eye(len(mask), dtype=bool)
        # The nearest ancestor has the largest index.
        parents = np.where(proper, np.arange(len(mask)), 0).max(axis=1).astype(np.int32)
        assert (spec.ancestors(parents[None])[0] == mask).all()
        assert (spec.depths(parents[None])[0] == golden["tree_depth"]).all()


def grown(rng: np.random.Generator, shape: TreeShape, B: int) -> tuple[np.ndarray, ...]:
    """Candidates of a random dynamic tree: tokens, weights, parents, numbered from 1."""
    k = shape.width

    def edges(*lead: int) -> np.ndarray:
        # A coarse grid of weights makes many ties, zeros among them: a child as good as its parent.
        return -np.sort(rng.integers(0, 3, (*lead, k)), axis=-1).astype(np.float32)

    numbers = np.tile(np.arange(1, k + 1, dtype=np.int32), (B, 1))
    weights, first = edges(B), k + 1
    levels = [(rng.integers(0, 9, (B, k)).astype(np.int32), weights, np.zeros((B, k), np.int32))]
    for _ in range(shape.depth - 1):
        parents, path_weights = spec.children(numbers, weights, edges(B, k))
        tokens = rng.integers(0, 9, (B, k * k)).astype(np.int32)
        levels.append((tokens, path_weights, parents))
        _, weights, numbers, _ = spec.next_frontier(tokens, path_weights, first, k)
        first += k * k
    return tuple(np.concatenate(arrays, axis=1) for arrays in zip(*levels, strict=True))


SHAPES = [
    TreeShape.chain(4, 3),
    TreeShape(8, 3, 3, 24),
    TreeShape(13, 2, 3, 39),
    TreeShape(6, 1, 6, 18),
]


def keep_all(
    candidates: tuple[np.ndarray, ...], nodes: int, max_drafts: int
) -> tuple[np.ndarray, ...]:
    B = len(candidates[0])
    limit, relay = np.full(B, max_drafts, np.int32), np.ones(B, bool)
    return spec.keep_best(np.arange(70, 70 + B, dtype=np.int32), *candidates, limit, relay, nodes)


class TestGrowth:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("seed", range(5))
    def test_keep_best_returns_tree_of_best_candidates(self, shape: TreeShape, seed: int) -> None:
        candidates = grown(np.random.default_rng(seed), shape, 3)
        assert candidates[0].shape[1] == shape.num_candidates
        tokens, weights, parents = candidates
        for limit in range(shape.nodes):
            kept_tokens, kept_parents, num_nodes, kept_weights = keep_all(
                candidates, shape.nodes, limit
            )
            assert (num_nodes == limit + 1).all()
            for b in range(3):
                best = sorted(range(shape.num_candidates), key=lambda c: (-weights[b, c], c))[
                    :limit
                ]
                numbers = [0, *sorted(c + 1 for c in best)]
                assert kept_tokens[b, 0] == 70 + b
                for node, number in enumerate(numbers[1:], 1):
                    assert kept_tokens[b, node] == tokens[b, number - 1]
                    assert kept_weights[b, node] == weights[b, number - 1]
                    assert numbers[kept_parents[b, node]] == parents[b, number - 1]
                    assert kept_parents[b, node] < node
            assert (spec.depths(kept_parents) <= shape.depth).all()
            assert not kept_tokens[:, limit + 1 :].any()
            assert not kept_parents[:, limit + 1 :].any()
            assert not kept_weights[:, 0].any()
            assert not kept_weights[:, limit + 1 :].any()

    def test_keep_best_of_chain_preserves_order(self) -> None:
        candidates = grown(np.random.default_rng(0), TreeShape.chain(4, 2), 2)
        tokens, parents, *_ = keep_all(candidates, 5, 4)
        assert (tokens[:, 1:] == candidates[0]).all()
        assert (parents == [0, 0, 1, 2, 3]).all()

    def test_next_frontier_ties_prefer_lower_index(self) -> None:
        weights = np.array([[-1, -2, -1, -2, -1, -2, -2, -2, -2]], np.float32)
        tokens, kept, numbers, parent = spec.next_frontier(
            np.arange(9, dtype=np.int32)[None], weights, 13, 3
        )
        assert tokens.tolist() == [[0, 2, 4]]
        assert kept.tolist() == [[-1, -1, -1]]
        assert numbers.tolist() == [[13, 15, 17]]
        assert parent.tolist() == [[0, 0, 1]]

    def test_keep_best_respects_limit_and_missing_relay(self) -> None:
        candidates = grown(np.random.default_rng(1), SHAPES[1], 3)
        newest = np.zeros(3, np.int32)
        limits, relay = np.array([2, 50, 50], np.int32), np.array([True, True, False])
        _, _, num_nodes, _ = spec.keep_best(newest, *candidates, limits, relay, SHAPES[1].nodes)
        assert num_nodes.tolist() == [3, 8, 1]

    def test_keep_best_nonfinite_weights_return_valid_tokens(self) -> None:
        tokens, _, parents = grown(np.random.default_rng(2), SHAPES[1], 3)
        for value in (-np.inf, np.nan):
            bad = (tokens, np.full(tokens.shape, value, np.float32), parents)
            kept_tokens, kept_parents, *_ = keep_all(bad, 8, 7)
            assert (kept_parents < np.maximum(1, np.arange(8))).all()
            assert (kept_tokens >= 0).all()


class TestFlatRows:
    def test_flatten_orders_real_nodes_before_padding(self) -> None:
        num_nodes = np.array([3, 1, 2], np.int32)
        starts, request, node, is_real = spec.flatten(num_nodes, 8)
        assert starts.tolist() == [0, 3, 4, 6]
        assert request.tolist() == [0, 0, 0, 1, 2, 2, 0, 0]
        assert node.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
        assert is_real.tolist() == [True] * 6 + [False] * 2

    def test_flat_rows_maps_padding_to_root(self) -> None:
        num_nodes = np.array([3, 1, 2], np.int32)
        starts, request, node, _ = spec.flatten(num_nodes, 6)
        rows = spec.flat_rows(starts, num_nodes, 3)
        assert rows.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 4]]
        for b, n in rows_of(num_nodes):
            assert (request[rows[b, n]], node[rows[b, n]]) == (b, n)


def rows_of(num_nodes: np.ndarray) -> Iterator[tuple[int, int]]:
    return ((b, n) for b, count in enumerate(num_nodes) for n in range(count))


@each_implementation
@pytest.mark.parametrize("N", [1, 2, 7, 34])
def test_depths_and_ancestors_match_spec(N: int, implementation: Implementation) -> None:
    ops, parents = implementation("draft_tree"), random_parents(np.random.default_rng(N), 3, N)
    np.testing.assert_array_equal(ops.depths(parents), spec.depths(parents))
    np.testing.assert_array_equal(ops.ancestors(parents), spec.ancestors(parents))


@each_implementation
def test_best_ties_match_spec(implementation: Implementation) -> None:
    weights = -np.random.default_rng(0).integers(0, 4, (5, 40)).astype(np.float32)
    for count in (1, 7, 40):
        got = implementation("draft_tree").best(weights, count)
        np.testing.assert_array_equal(got, spec.best(weights, count))


@each_implementation
@pytest.mark.parametrize(("k", "depth", "nodes"), [(1, 3, 4), (3, 3, 8), (2, 1, 3)])
def test_tree_growth_and_keep_best_match_spec(
    k: int, depth: int, nodes: int, implementation: Implementation
) -> None:
    """A whole growth of trees with many equal weights; every step is compared exactly."""
    ops, rng, B = implementation("draft_tree"), np.random.default_rng(k), 4
    tokens = rng.integers(0, 50, (B, k)).astype(np.int32)
    weights = -rng.integers(0, 3, (B, k)).astype(np.float32)
    numbers = np.tile(np.arange(1, k + 1, dtype=np.int32), (B, 1))
    found = [(tokens, weights, np.zeros((B, k), np.int32))]
    for level in range(2, depth + 1):
        edges = -rng.integers(0, 3, (B, k, k)).astype(np.float32)
        parents, sums = spec.children(numbers, weights, edges)
        same(ops.children(numbers, weights, edges), (parents, sums))
        found.append((rng.integers(0, 50, (B, k * k)).astype(np.int32), sums, parents))
        first = 1 + k + (level - 2) * k * k
        grown = spec.next_frontier(found[-1][0], sums, first, k)
        same(ops.next_frontier(found[-1][0], sums, first, k), grown)
        _, weights, numbers, _ = grown
    drafted = [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]
    newest, most = np.arange(B, dtype=np.int32), np.array([nodes, 0, 1, nodes - 1], np.int32)
    args = (newest, *drafted, most, np.array([True, True, True, False]), nodes)
    same(ops.keep_best(*args), spec.keep_best(*args))


@each_implementation
@pytest.mark.parametrize("num_nodes", [[3, 1, 4], [1, 1, 1], [4, 4, 4]])
def test_flatten_and_flat_rows_match_spec(
    num_nodes: list[int], implementation: Implementation
) -> None:
    ops, counts = implementation("draft_tree"), np.array(num_nodes, np.int32)
    want = spec.flatten(counts, 12)
    same(ops.flatten(counts, 12), want)
    got = ops.flat_rows(want[0], counts, 4)
    np.testing.assert_array_equal(got, spec.flat_rows(want[0], counts, 4))


def same(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_chains_respect_limits_and_can_draft() -> None:
    drafts, newest = np.array([[4, 5, 6]] * 3, np.int32), np.array([1, 2, 3], np.int32)
    limits, can_draft = np.array([9, 2, 9], np.int32), np.array([True, True, False])
    tokens, parents, num_nodes = spec.chains(drafts, newest, limits, can_draft)
    assert tokens.tolist() == [[1, 4, 5, 6], [2, 4, 5, 0], [3, 0, 0, 0]]
    assert parents.tolist() == [[0, 0, 1, 2], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert num_nodes.tolist() == [4, 3, 1]


@each_implementation
def test_chains_match_spec(implementation: Implementation) -> None:
    rng, B, S = np.random.default_rng(4), 16, 5
    drafts = rng.integers(0, 99, (B, S)).astype(np.int32)
    newest, limits = rng.integers(0, S + 3, (2, B)).astype(np.int32)
    given = (drafts, newest, limits, rng.random(B) < 0.7)
    for got, want in zip(
        implementation("draft_tree").chains(*given), spec.chains(*given), strict=True
    ):
        np.testing.assert_array_equal(got, want)
