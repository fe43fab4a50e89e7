"""Choice and ranking of both backends equal the specification."""

import numpy as np
import pytest

from shared.spec import sampling as spec
from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM
from shared.spec.sampling import Sampling
from tests.support.implementations import Implementation, each_implementation
from tests.support.sampling_rows import choose, f32, i32, in_tree, neutral, process


def mixed_rows(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Sampling]:
    """Logits, seen, positions and parameters of rows of which each uses something else."""
    rng, B = np.random.default_rng(5), 8
    logits = (3 * rng.standard_normal((B, vocab))).astype(np.float32)
    seen = rng.integers(0, 6, (B, vocab)).astype(np.int32)
    sampling = neutral(
        B,
        vocab,
        temperature=f32(0, 0.7, 1, 1.3, 0.5, 1, 0, 2),
        top_p=f32(0.9, 0.9, 1, 0.5, 1, 0.99, 1, 1e-6),
        top_k=np.array([3, vocab, 5, vocab, vocab, 20, vocab, vocab], np.int32),
        min_p=f32(0, 0, 0.1, 0, 0.02, 0, 0.5, 0),
        presence=f32(0.5, 0, 0, 1, 0, 0, -1, 0),
        frequency=f32(0, 0.3, 0, 0.2, 0, 0, 0, 0),
        repetition=f32(1, 1.2, 1, 0.8, 1, 1, 1.5, 1),
        min_length=np.array([9, 0, 9, 0, 0, 0, 11, 0], np.int32),
        stop_ids=np.tile(np.array([[4, 4, 17]], np.int32), (B, 1)),
        bias_ids=np.tile(np.array([[2, 0]], np.int32), (B, 1)),
        bias_values=np.stack([f32(0, 5, 0, -np.inf, 0, 0, 9, 0), np.zeros(B, np.float32)], 1),
    )
    return logits, seen, np.arange(5, 5 + B, dtype=np.int32), sampling


@each_implementation
def test_process_and_choose_match_spec(implementation: Implementation) -> None:
    ops, vocab = implementation("sampling"), 61
    logits, seen, positions, sampling = mixed_rows(vocab)
    allowed = np.random.default_rng(1).integers(0, 4, logits.shape) > 0
    for mask in (None, allowed):
        want = process(spec, logits, seen, positions, sampling, mask)
        got = process(ops, logits, seen, positions, sampling, mask)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        # One rounding for each of up to five products and sums on numbers below 30.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(
            choose(ops, logits, positions, sampling, seen, mask),
            choose(spec, logits, positions, sampling, seen, mask),
        )


@each_implementation
@pytest.mark.parametrize("is_own", [False, True], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("stream", [TARGET_STREAM, DRAFT_STREAM + 1])
def test_rank_matches_spec(implementation: Implementation, stream: int, is_own: bool) -> None:
    ops, (B, k, vocab, width) = implementation("sampling"), (8, 3, 61, 4)
    _, counts, positions, sampling = mixed_rows(vocab)
    rng = np.random.default_rng(7)
    logits = (3 * rng.standard_normal((B, k, vocab))).astype(np.float32)
    logits[:, :, 9] = logits[:, :, 3]  # ties go by id
    slots = rng.permutation(B).astype(np.int32)
    path = rng.integers(0, vocab, (B * k, 3)).astype(np.int32)
    seen = spec.TokenCounts(counts, np.repeat(slots, k), path, rng.random(path.shape) < 0.6)
    keys = positions if stream == TARGET_STREAM else positions - 2
    columns = rng.permutation(vocab)[:40].astype(np.int32) if is_own else None
    logits = logits[:, :, columns] if is_own else logits
    given = (logits, seen, positions, sampling, keys, stream, width, True, columns)
    want, got = spec.rank(*given), ops.rank(*given)
    np.testing.assert_array_equal(got.ids, want.ids)
    if columns is not None:
        assert np.isin(want.ids, columns).all()
    # One rounding for each of up to five products and sums, and a sum of 61 terms.
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(got.processed, want.processed, rtol=1e-5, atol=1e-5)


@each_implementation
def test_support_ties_match_spec(implementation: Implementation) -> None:
    logits = np.zeros((3, 12), np.float32)
    logits[1, 5:] = 1
    args = (logits, np.array([4, 3, 12], np.int32), f32(1, 1, 0.45), f32(0, 0, 0))
    np.testing.assert_array_equal(
        implementation("vocab_parallel").support(*args), spec.support(*args)
    )


@each_implementation
def test_seen_in_trees_matches_spec(implementation: Implementation) -> None:
    rng = np.random.default_rng(2)
    seen = rng.integers(0, 4, (2, 9)).astype(np.int32)
    tokens = np.array([[1, 2, 2, 3], [4, 4, 4, 5]], np.int32)
    parents = np.array([[0, 0, 1, 1], [0, 0, 1, 2]], np.int32)
    got = in_tree(implementation("sampling"), seen, tokens, parents)
    np.testing.assert_array_equal(got, in_tree(spec, seen, tokens, parents))


@each_implementation
@pytest.mark.parametrize("N", [1, 2, 5])
def test_seen_in_trees_of_chains_matches_spec(N: int, implementation: Implementation) -> None:
    rng, ops = np.random.default_rng(N), implementation("sampling")
    tokens = rng.integers(0, 9, (3, N)).astype(np.int32)
    parents = np.broadcast_to(np.maximum(np.arange(N, dtype=np.int32) - 1, 0), (3, N)).copy()
    request, node = i32(0, 0, 1, 1, 2), np.minimum(i32(0, 1, 0, 4, 2), N - 1)
    given = (np.zeros((4, 9), np.int32), i32(3, 1, 2), tokens)
    want = spec.counts_in_trees(*given, parents, request, node)
    got = ops.counts_in_trees(*given, 0 * parents, request, node, True)
    np.testing.assert_array_equal(spec.counts_of_rows(want), ops.counts_of_rows(got))


@each_implementation
def test_draft_weights_and_best_match_spec(implementation: Implementation) -> None:
    ops = implementation("sampling")
    logits = np.random.default_rng(3).integers(-3, 4, (4, 30)).astype(np.float32)  # many ties
    temperature = f32(0, 1, 0.5, 0)
    close = {"rtol": 1e-5, "atol": 1e-5}  # a logarithm of a sum of 30 terms
    want = spec.draft_weights(logits, temperature, spec.DRAFT_TAU)
    np.testing.assert_allclose(
        ops.draft_weights(logits, logits, temperature, spec.DRAFT_TAU), want, **close
    )
    for k in (1, 4):
        _, ids = implementation("vocab_parallel").best_of(logits, k)
        np.testing.assert_array_equal(ids, spec.top_candidates(logits, k))


@each_implementation
def test_probabilities_match_spec(implementation: Implementation) -> None:
    ops = implementation("sampling")
    scores = np.random.default_rng(0).normal(size=(3, 33)).astype(np.float32)
    scores[1, 5:] = -np.inf
    got, want = ops.probabilities(scores), spec.probabilities(scores)
    # Float32 on both sides: only the order of the sum differs.
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert (got[1, 5:] == 0).all()
