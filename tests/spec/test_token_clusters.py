"""Clustered LM heads: tokens of the best clusters keep their logits, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest

from shared.spec import token_clusters as spec
from shared.spec.linear import Matrix
from tests.support.implementations import each_implementation

VOCAB, CLUSTERS, HIDDEN = 24, 6, 8


def case(top_k: int, *, ties: bool = False) -> tuple[np.ndarray, np.ndarray, spec.TokenClusters]:
    rng = np.random.default_rng(top_k)
    centroids = rng.standard_normal((CLUSTERS, HIDDEN)).astype(np.float32)
    if ties:
        centroids[:] = centroids[0]
    of_tokens = rng.permutation(np.arange(VOCAB) // (VOCAB // CLUSTERS)).astype(np.int32)
    rows = rng.standard_normal((5, HIDDEN)).astype(np.float32)
    logits = rng.standard_normal((5, VOCAB)).astype(np.float32)
    return logits, rows, spec.TokenClusters(Matrix.plain(centroids), of_tokens, top_k)


def test_kept_tokens_are_those_of_best_clusters():
    logits, rows, clusters = case(2)
    got = spec.kept(logits, rows, clusters)
    for row in range(len(rows)):
        scores = rows[row] @ clusters.centroids.planes["values"].T
        best = np.argsort(scores)[-2:]
        is_in = np.isin(clusters.of_tokens, best)
        assert is_in.sum() == 2 * VOCAB // CLUSTERS
        np.testing.assert_array_equal(got[row, is_in], logits[row, is_in])
        assert np.isneginf(got[row, ~is_in]).all()


def test_tied_clusters_go_to_lower():
    logits, rows, clusters = case(2, ties=True)
    kept = np.isfinite(spec.kept(logits, rows, clusters))
    np.testing.assert_array_equal(kept, np.broadcast_to(clusters.of_tokens < 2, kept.shape))


@each_implementation
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, CLUSTERS])
def test_implementations_keep_same_tokens(top_k, ties, implementation):
    logits, rows, clusters = case(top_k, ties=ties)
    got = implementation("token_clusters").kept(logits, rows, clusters)
    np.testing.assert_array_equal(got, spec.kept(logits, rows, clusters))
