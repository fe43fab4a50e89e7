"""Best prefixes: brute force, golden trees of JetSpec heads, and failed rows."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shared.spec import best_prefixes as spec
from shared.spec import draft_tree
from tests.support.block_tree_cells import has_branches
from tests.support.cases.trees.best_prefixes import grow_arguments
from tests.support.implementations import each_implementation

GOLDEN = Path(__file__).parents[1] / "golden" / "jetspec"


def paths(found) -> list[tuple[int, ...]]:
    """The slots from below the root to each prefix."""
    got = [()]
    for parent, slot, _ in found:
        got.append((*got[parent], slot))
    return got[1:]


def every_prefix(
    edges: np.ndarray, lists: np.ndarray | None, known: np.ndarray
) -> dict[tuple[int, ...], np.float32]:
    """The weights of all prefixes that can be drafted."""
    (_, P, K), weights, level = edges.shape, {}, {(): (np.float32(0), 0, False)}
    for depth in range(len(edges)):
        following = {}
        for (path, (above, below, is_off)), rank in product(level.items(), range(K)):
            slot, edge = (depth * P + below) * K + rank, edges[depth, below, rank]
            weight = above + (edge + known[depth] if is_off else edge)
            if weight > -np.inf:
                weights[*path, slot] = weight
                below_it = 0 if lists is None else int(lists[depth, below, rank])
                following[*path, slot] = weight, below_it, is_off or rank > 0
        level = following
    return weights


CASES = [
    {"S": S, "K": K, "N": N, "P": P, "is_tied": is_tied}
    for S, K, N, P in ((1, 4, 4, 1), (3, 2, 15, 1), (4, 5, 16, 1), (5, 3, 40, 1), (4, 4, 12, 4))
    for is_tied in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_best_prefixes_equal_brute_force(seed, case):
    made = grow_arguments(seed, B=4, **case)
    for b, edges in enumerate(made["edges"]):
        lists = None if made["lists"] is None else made["lists"][b]
        known = made["branch_calibration"][b]
        found = spec.best_prefixes(edges, lists, known, case["N"] - 1)
        every = every_prefix(edges, lists, known)
        got = paths(found)
        assert [every[path] for path in got] == [weight for *_, weight in found]
        best = sorted(every.values(), reverse=True)[: case["N"] - 1]
        assert [weight for *_, weight in found] == best
        if not case["is_tied"] and b < 2:  # the others have a certain depth or few candidates
            assert set(got) == set(sorted(every, key=every.__getitem__)[-len(best) :])
        assert len(set(got)) == len(got)
        assert all(parent <= i for i, (parent, *_) in enumerate(found))


def test_smaller_tree_begins_larger_one():
    made = grow_arguments(1, B=1, S=7, K=8, N=64)
    edges, known = made["edges"][0], made["branch_calibration"][0]
    whole = spec.best_prefixes(edges, None, known, 63)
    for most in (0, 1, 15, 31):
        assert spec.best_prefixes(edges, None, known, most) == whole[:most]


@each_implementation
def test_calibrated_tree_becomes_chain_with_leaves(implementation):
    """Without acceptance off the first path, no sibling has children."""
    made = grow_arguments(1, B=2, S=7, K=8, N=32) | {"max_drafts": np.full(2, 32, np.int32)}
    grow = implementation("best_prefixes").grow
    for known, expected in ((0, True), (-np.inf, False)):
        made["branch_calibration"] = np.full((2, 7), known, np.float32)
        _, parents, num_nodes, _ = grow(**made)
        assert (num_nodes == 32).all()
        assert has_branches(np.asarray(parents), np.tile(np.arange(32) > 0, (2, 1))) is expected


def grown_from_golden(start: int, nodes: int, ranks: int):
    want = np.load(GOLDEN / "vectors.npz")
    tokens, edges = (
        want[f"topk_{name}_{start}"][None, :, None, :ranks] for name in ("ids", "logprobs")
    )
    newest, most = want["tokens"][[start]].astype(np.int32), np.full(1, nodes, np.int32)
    known = np.zeros((1, edges.shape[1]), np.float32)
    return want, spec.grow(newest, tokens, edges, None, known, most, np.ones(1, bool), nodes)


@pytest.mark.parametrize("nodes", [8, 16, 32])
@pytest.mark.parametrize("start", [20, 23, 24, 31])
def test_best_prefixes_match_golden_trees(start, nodes):
    want, (tokens, parents, num_nodes, weights) = grown_from_golden(start, nodes, 32)
    key = f"tree_{start}_{nodes}"
    assert num_nodes[0] == nodes
    np.testing.assert_array_equal(tokens[0], want[f"{key}_tokens"])
    np.testing.assert_array_equal(parents[0], want[f"{key}_parents"])
    np.testing.assert_array_equal(draft_tree.depths(parents)[0], want[f"{key}_depths"])
    np.testing.assert_array_equal(weights[0], want[f"{key}_weights"])
    _, (tokens, parents, *_) = grown_from_golden(start, nodes, 8)
    np.testing.assert_array_equal(tokens[0], want[f"tree8_{start}_{nodes}_tokens"])
    np.testing.assert_array_equal(parents[0], want[f"tree8_{start}_{nodes}_parents"])


@each_implementation
@pytest.mark.parametrize("case", [*CASES[2::3], {"S": 15, "K": 2, "N": 64}], ids=str)
def test_best_prefixes_match_spec(case, implementation):
    made = grow_arguments(5, B=5, **case)
    got = implementation("best_prefixes").grow(**made)
    for one, want in zip(got, spec.grow(**made), strict=True):
        np.testing.assert_array_equal(one, want)


@each_implementation
def test_nan_and_excluded_candidates_never_drafted(implementation):
    made = grow_arguments(2, B=3, S=3, K=4, N=16)
    made["edges"][0], made["edges"][1, 1, 0, 2] = np.nan, np.nan
    tokens, parents, num_nodes, weights = implementation("best_prefixes").grow(**made)
    assert num_nodes[0] == 1
    assert np.isfinite(weights).all()
    drafted = draft_tree.depths(parents)[1][1 : num_nodes[1]] == 2
    assert not np.isin(tokens[1, 1 : num_nodes[1]][drafted], made["tokens"][1, 1, 0, 2:]).any()
    for got, want in zip((tokens, parents, num_nodes, weights), spec.grow(**made), strict=True):
        np.testing.assert_array_equal(got, want)
