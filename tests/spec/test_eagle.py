"""EAGLE draft heads: expansion of tree nodes, and requests without a draft input."""

from functools import partial

import numpy as np
import pytest

from shared.spec import attention, cache_pools, draft_tree, eagle, sampling
from shared.spec.tree_growth import DraftRequests
from tests.support.tiny_models import tiny_model

LENGTHS = np.array([7, 3])
TABLE = np.array([[4, 1, 7, 2], [3, 6, 5, 8]])
PAGE_SIZE = 8


class Drafting:
    """The MTP layer of a tiny hybrid with the KV of two requests; it records ranked logits."""

    def __init__(self, draft_from: np.ndarray) -> None:
        rng = np.random.default_rng(0)
        self.config, self.weights = tiny_model("qwen3_5", 0)
        self.head = partial(eagle.mtp, self.config, self.weights)
        self.draft_from = draft_from
        starts = np.concatenate([[0], np.cumsum(LENGTHS)])
        self.tokens = rng.integers(0, self.config.vocab, LENGTHS.sum())
        hidden = rng.standard_normal((LENGTHS.sum(), self.config.hidden)).astype(np.float32)
        rows = attention.causal_rows(starts, np.zeros(2, int), draft_from, TABLE, len(self.tokens))
        kv = cache_pools.new_kv(self.config.attention, 1, 10, PAGE_SIZE)
        out, logits, self.kv = self.head(rows, self.tokens, None, hidden, kv)
        self.ranked: list[tuple[np.ndarray, np.ndarray]] = []
        self.relay = eagle.relay_of(out, logits, starts[1:] - 1, self.rank)

    def rank(self, logits: np.ndarray, paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.ranked.append((logits, paths))
        B, k, vocab = logits.shape
        weights = sampling.log_softmax(logits.reshape(-1, vocab))
        ids = sampling.top_candidates(weights, 3)
        edges = np.take_along_axis(weights, ids, axis=1)
        return ids.reshape(B, k, 3), edges.reshape(B, k, 3)

    def draft(self, max_drafts: int) -> tuple[np.ndarray, ...]:
        newest = self.tokens[np.cumsum(LENGTHS) - 1]
        shape = draft_tree.TreeShape(nodes=8, depth=4, width=3, rows=16)
        limits = np.full(2, max_drafts)
        requests = DraftRequests(newest, LENGTHS, self.draft_from, limits, TABLE)
        tree, kv = eagle.draft(self.head, self.kv, self.relay, requests, shape, self.rank)
        return (*tree, kv)

    def along(self, request: int, path: np.ndarray) -> np.ndarray:
        """The logits after a path of drafts, token by token on the head's own hidden states."""
        hidden, kv = self.relay.hidden[request : request + 1], self.kv
        for i, token in enumerate(path):
            first = LENGTHS[request : request + 1] + i
            rows = attention.causal_rows(
                np.array([0, 1]), first, self.draft_from[[request]], TABLE[[request]], 1
            )
            hidden, logits, kv = self.head(rows, np.array([token]), None, hidden, kv)
        return logits[0]


def test_eagle_tree_node_equals_chain_of_its_path() -> None:
    drafting = Drafting(np.array([0, 2]))
    drafting.draft(7)
    levels = drafting.ranked[1:]
    assert [paths.shape for _, paths in levels] == [(2, 3, 1), (2, 3, 2), (2, 3, 3)]
    for logits, paths in levels:
        for request in range(2):
            for place in range(3):
                want = drafting.along(request, paths[request, place])
                # Float32, sums over at most 16 keys in another order, logits of magnitude 8.
                np.testing.assert_allclose(logits[request, place], want, atol=2e-5)


def test_eagle_tree_holds_best_paths_within_limit() -> None:
    drafting = Drafting(np.array([0, 2]))
    tokens, parents, num_nodes, *_ = drafting.draft(7)
    np.testing.assert_array_equal(num_nodes, [8, 8])
    np.testing.assert_array_equal(tokens[:, 1], drafting.relay.tokens[:, 0])
    few, few_parents, num_nodes, *_ = drafting.draft(2)
    np.testing.assert_array_equal(num_nodes, [3, 3])
    np.testing.assert_array_equal(few[:, 3:], 0)
    assert all(set(few[b, 1:3]) <= set(tokens[b]) for b in range(2))
    assert (few_parents[:, 1:3] < [1, 2]).all()
    assert (parents[:, 1:] < np.arange(1, 8)).all()


def test_eagle_request_without_relay_drafts_nothing() -> None:
    drafting = Drafting(np.array([0, 3]))  # draft KV of the second begins at its length
    drafting.relay.hidden[1] = np.nan
    before = attention.read(drafting.kv[0, 0], TABLE, 32)[1]
    tokens, _, num_nodes, _, kv = drafting.draft(7)
    np.testing.assert_array_equal(num_nodes, [8, 1])
    np.testing.assert_array_equal(tokens[1, 1:], 0)
    np.testing.assert_array_equal(attention.read(kv[0, 0], TABLE, 32)[1], before)
    alone = Drafting(np.array([0, 0]))
    np.testing.assert_array_equal(tokens[0], alone.draft(7)[0][0])


def test_eagle_drafting_writes_within_scratch() -> None:
    drafting = Drafting(np.array([0, 0]))
    *_, kv = drafting.draft(7)
    before, after = (attention.read(pools[0, 0], TABLE, 32) for pools in (drafting.kv, kv))
    changed = (before != after).any(axis=(2, 3))
    for request, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(np.flatnonzero(changed[request]), length + np.arange(9))


@pytest.mark.parametrize("counts", [[3, 1], [0, 4]])
def test_extend_rows_follow_length_and_count(counts: list[int]) -> None:
    draft_from = np.array([2, 0])
    rows = eagle.extend_rows(LENGTHS, np.array(counts), draft_from, TABLE, depth=3)
    for request, count in enumerate(counts):
        mine = rows.is_real & (rows.request == request)
        np.testing.assert_array_equal(rows.positions[mine], LENGTHS[request] + np.arange(count))
        np.testing.assert_array_equal(rows.until[mine], rows.places[mine] + 1)
        assert (rows.first[mine] == draft_from[request]).all()
