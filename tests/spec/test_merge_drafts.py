"""Merged draft trees: alignment, merge and ranking of two sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spec import draft_tree
from shared.spec import merge_drafts as spec
from shared.spec.merge_drafts import DraftedTrees, MergedTrees, NgramTrees
from tests.support.implementations import Implementation, each_implementation

NEWEST = 5


def grown_of(*chains: list[tuple[int, float]]) -> DraftedTrees:
    """Chains of tokens and the log weights of their edges, below the newest token."""
    D = 1 + max(map(len, chains))
    tokens, parents = np.zeros((2, len(chains), D), np.int32)
    weights = np.zeros((len(chains), D), np.float32)
    for b, chain in enumerate(chains):
        tokens[b, : len(chain) + 1] = [NEWEST, *(token for token, _ in chain)]
        parents[b, 1 : len(chain) + 1] = np.arange(len(chain))
        weights[b, 1 : len(chain) + 1] = np.cumsum([edge for _, edge in chain])
    return DraftedTrees(tokens, parents, np.array([1 + len(c) for c in chains], np.int32), weights)


def copies_of(*rows: list[tuple[int, int, float]], at: list[int]) -> NgramTrees:
    """Trees of nodes below the root: token, parent and log weight of the edge."""
    M = 1 + max(map(len, rows))
    tokens, parents = np.zeros((2, len(rows), M), np.int32)
    weights = np.zeros((len(rows), M), np.float32)
    for b, nodes in enumerate(rows):
        for node, (token, parent, edge) in enumerate(nodes, 1):
            tokens[b, node], parents[b, node] = token, parent
            weights[b, node] = weights[b, parent] + np.float32(edge)
    counts = np.array([1 + len(nodes) for nodes in rows], np.int32)
    return NgramTrees(tokens, parents, counts, weights, np.array(at, np.int32))


def chain(*tokens: int, edge: float = -0.1) -> list[tuple[int, int, float]]:
    return [(token, parent, edge) for parent, token in enumerate(tokens)]


def join(
    grown: DraftedTrees, copies: NgramTrees, *, ahead: int, nodes: int, rows: int = 0, **how
) -> MergedTrees:
    lengths = (copies.at + ahead).astype(np.int32)
    B = len(lengths)
    most = np.array(how.pop("most", [63] * B), np.int32)
    return spec.merge(grown, copies, lengths, most, nodes, how.pop("depth", 8), rows or B * nodes)


def paths_of(joined: MergedTrees, b: int = 0) -> list[tuple[tuple[int, ...], bool, bool]]:
    """Returns the path below the root of each draft token, and the sources that contain it."""
    paths, found = {0: ()}, []
    for node in range(1, int(joined.num_nodes[b])):
        paths[node] = (*paths[int(joined.parents[b, node])], int(joined.tokens[b, node]))
        found.append((paths[node], bool(joined.drafted[b, node]), bool(joined.copied[b, node])))
    return found


def test_merge_aligns_ngram_drafts_to_newest_token():
    """Two tokens were committed since; 5 is the newest, 11 and 12 follow it."""
    copies = copies_of(chain(10, NEWEST, 11, 12), at=[30])
    found = paths_of(join(grown_of([(7, -1.0)]), copies, ahead=2, nodes=4))
    assert found == [((7,), True, False), ((11,), False, True), ((11, 12), False, True)]


def test_merge_drops_ngram_drafts_with_other_tokens():
    grown = grown_of([(7, -1.0)])
    for ahead, tokens in ((2, (10, 6, 11)), (1, (10, NEWEST, 11)), (9, (NEWEST,) * 4)):
        assert paths_of(join(grown, copies_of(chain(*tokens), at=[30]), ahead=ahead, nodes=4)) == [
            ((7,), True, False)
        ]


def test_merge_without_inflight_step_attaches_to_root():
    copies = copies_of(chain(11, 12), at=[30])
    assert paths_of(join(grown_of([(11, -1.0), (9, -1.0)]), copies, ahead=0, nodes=4)) == [
        ((11,), True, True),
        ((11, 9), True, False),
        ((11, 12), False, True),
    ]


def test_merge_drops_branches_without_newest_token():
    branches = [(10, 0, -0.1), (NEWEST, 0, -0.1), (11, 1, -0.1), (12, 2, -0.1), (13, 2, -0.2)]
    found = paths_of(join(grown_of([(7, -1.0)]), copies_of(branches, at=[3]), ahead=1, nodes=5))
    assert [path for path, *_ in found] == [(7,), (12,), (13,)]


def test_merge_continues_both_sources_below_shared_node():
    """The n-gram drafts give 11 a high probability, so the drafter's child of it gains weight."""
    unsure = grown_of([(11, -3.0), (9, -0.1)])
    sure = copies_of(chain(11, 12, 13, edge=-0.2), at=[30])
    weigh = [path for path, *_ in paths_of(join(unsure, sure, ahead=0, nodes=3))]
    assert weigh == [(11,), (11, 9)]  # -0.3, before (11, 12) with -0.4
    unsure = grown_of([(11, -3.0), (9, -0.3)])
    weigh = [path for path, *_ in paths_of(join(unsure, sure, ahead=0, nodes=3))]
    assert weigh == [(11,), (11, 12)]
    sure, unsure = grown_of([(11, -0.1), (9, -0.5)]), copies_of(chain(11, 12, edge=-2.0), at=[0])
    other = copies_of([*chain(11, edge=-2.0), (12, 1, -0.4)], at=[0])
    assert [p for p, *_ in paths_of(join(sure, unsure, ahead=0, nodes=3))] == [(11,), (11, 9)]
    assert [p for p, *_ in paths_of(join(sure, other, ahead=0, nodes=3))] == [(11,), (11, 12)]


def test_merge_verify_budget_goes_to_best_nodes():
    grown = grown_of([(7, -0.1), (8, -0.1)], [(7, -3.0), (8, -0.1)])
    copies = copies_of(chain(11, 12, edge=-4.0), chain(11, 12, edge=-0.2), at=[0, 0])
    joined = join(grown, copies, ahead=0, nodes=5, rows=2 + 4)
    assert [path for path, *_ in paths_of(joined, 0)] == [(7,), (7, 8)]
    assert [path for path, *_ in paths_of(joined, 1)] == [(11,), (11, 12)]


def test_merge_respects_max_drafts_and_depth():
    grown, copies = grown_of([(7, -0.3)]), copies_of(chain(11, 12, 13), at=[0])
    assert paths_of(join(grown, copies, ahead=0, nodes=6, most=[0])) == []
    assert len(paths_of(join(grown, copies, ahead=0, nodes=6, most=[2]))) == 2
    deep = paths_of(join(grown, copies, ahead=0, nodes=6, depth=2))
    assert [path for path, *_ in deep] == [(7,), (11,), (11, 12)]


def drawn(seed: int, B: int, D: int, M: int) -> tuple[DraftedTrees, NgramTrees, np.ndarray]:
    """Trees of few tokens, so that both sources have many nodes together, and weights that tie."""
    rng = np.random.default_rng(seed)

    def tree(size: int) -> tuple[np.ndarray, ...]:
        tokens, parents = np.zeros((2, B, size), np.int32)
        weights = np.zeros((B, size), np.float32)
        counts = rng.integers(1, size + 1, B).astype(np.int32)
        for b in range(B):
            for node in range(1, int(counts[b])):
                siblings = {(0, 0)} | {(parents[b, n], tokens[b, n]) for n in range(1, node)}
                parent, token = 0, 0
                while (parent, token) in siblings or token == 0:
                    parent = int(rng.integers(max(0, node - 3), node))
                    token = int(rng.integers(1, 5))
                tokens[b, node], parents[b, node] = token, parent
                edge = rng.choice(np.array([-0.25, -0.5, -1.0], np.float32))
                weights[b, node] = weights[b, parent] + edge
        return tokens, parents, counts, weights

    tokens, parents, counts, weights = tree(D)
    tokens[:, 0] = rng.integers(1, 5, B)
    if D > 2:
        weights[0, draft_tree.ancestors(parents)[0, :, 1]] = -np.inf  # as of a row that failed
    grown = DraftedTrees(tokens, parents, counts, weights)
    at = rng.integers(0, 50, B).astype(np.int32)
    ahead = rng.integers(0, 4, B).astype(np.int32)
    return grown, NgramTrees(*tree(M), at), at + ahead


drawn_trees = given(
    seed=st.integers(0, 10_000), B=st.integers(1, 4), D=st.integers(1, 6), M=st.integers(1, 9)
)


@drawn_trees
@settings(max_examples=80, deadline=None)
def test_merge_siblings_differ_and_parents_come_first(seed, B, D, M):
    grown, copies, lengths = drawn(seed, B, D, M)
    N = min(7, D + M)
    rows = B + B * (N - 1) // 2
    joined = spec.merge(grown, copies, lengths, np.full(B, 63, np.int32), N, D + 2, rows)
    assert joined.num_nodes.sum() <= rows
    for b in range(B):
        count = int(joined.num_nodes[b])
        nodes = range(1, count)
        edges = [(int(joined.parents[b, n]), int(joined.tokens[b, n])) for n in nodes]
        assert len(set(edges)) == len(edges)
        assert all(parent < node for node, (parent, _) in zip(nodes, edges, strict=True))
        assert all(joined.drafted[b, n] or joined.copied[b, n] for n in nodes)
        assert not joined.tokens[b, count:].any()
        assert not joined.copied[b, count:].any()
        assert joined.tokens[b, 0] == grown.tokens[b, 0]
        for n in nodes:
            if joined.copied[b, n]:
                assert copies.tokens[b, joined.copied[b, n]] == joined.tokens[b, n]


@drawn_trees
@settings(max_examples=40, deadline=None)
def test_merge_with_enough_rows_keeps_every_node(seed, B, D, M):
    grown, copies, lengths = drawn(seed, B, D, M)
    N = D + M
    joined = spec.merge(grown, copies, lengths, np.full(B, 63, np.int32), N, N, B * N)
    roots = spec.align_to_newest(copies, grown.tokens[:, 0], lengths)
    below = draft_tree.ancestors(copies.parents)
    for b in range(B):
        drafts = (np.arange(D) > 0) & (np.arange(D) < grown.num_nodes[b])
        assert joined.drafted[b].sum() == (drafts & (grown.weights[b] > -np.inf)).sum()
        real = np.arange(M) < copies.num_nodes[b]
        found = sorted(joined.copied[b][joined.copied[b] > 0].tolist())
        want = np.flatnonzero(real & below[b, :, roots[b]]) if roots[b] < M else []
        assert found == [node for node in want if node != roots[b]]


@each_implementation
@pytest.mark.parametrize(("B", "D", "M", "N"), [(3, 4, 9, 8), (2, 2, 1, 3), (2, 1, 7, 5)])
def test_merge_matches_spec(B: int, D: int, M: int, N: int, implementation: Implementation) -> None:
    ops = implementation("merge_drafts")
    both = 0
    for seed in range(6):
        grown, copies, lengths = drawn(seed, B, D, M)
        most = np.random.default_rng(seed).integers(0, N + 2, B).astype(np.int32)
        for rows in (B * N, B + N):
            given = (grown, copies, lengths, most, N, 4, rows)
            got, want = ops.merge(*given), spec.merge(*given)
            for name in ("tokens", "parents", "num_nodes", "drafted", "copied"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
            both += int((want.drafted & (want.copied > 0)).sum())
    assert both > 3 or min(D, M) == 1
