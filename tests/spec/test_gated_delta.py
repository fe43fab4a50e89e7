"""Gated delta rule: chunks, trees and steps give the same state and outputs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spec import gated_delta as spec
from tests.support.implementations import Implementation, each_implementation

H, K, V = 3, 8, 4

# Float32 on both sides; the chunked form solves a system, the steps compute sequentially.
CHUNKED = {"rtol": 0, "atol": 2e-5}


def tokens(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, log decays and betas of random tokens."""
    q, k = (rng.standard_normal((*shape, H, K)).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((*shape, H, V)).astype(np.float32)
    log_decay = -rng.exponential(0.3, (*shape, H)).astype(np.float32)
    beta = rng.uniform(0, 1, (*shape, H)).astype(np.float32)
    return q, k, v, log_decay, beta


def state(rng: np.random.Generator, B: int) -> np.ndarray:
    return rng.standard_normal((B, H, K, V)).astype(np.float32)


def in_steps(start: np.ndarray, *rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T tokens of one request, one by one."""
    current, outputs = start[None], []
    for t in range(len(rows[0])):
        current, out = spec.step(current, *(x[t][None] for x in rows))
        outputs.append(out[0])
    return current[0], np.stack(outputs)


def test_step_with_beta_one_stores_value() -> None:
    rng = np.random.default_rng(0)
    _, k, v, _, _ = tokens(rng, 2)
    nothing = np.zeros((2, H), np.float32)
    after, out = spec.step(state(rng, 2), k, k, v, nothing, nothing + 1)
    # Keys have unit length up to 1e-7.
    np.testing.assert_allclose(out, v, atol=1e-5)
    again, _ = spec.step(after, k, k, v, nothing, nothing + 1)
    np.testing.assert_allclose(again, after, atol=1e-5)


def test_step_decays_state_before_read() -> None:
    rng = np.random.default_rng(1)
    q, k, v, log_decay, _ = tokens(rng, 2)
    start = state(rng, 2)
    after, out = spec.step(start, q, k, v, log_decay, np.zeros((2, H), np.float32))
    kept = np.exp(log_decay)[..., None, None] * start
    np.testing.assert_allclose(after, kept, rtol=1e-6)  # the same products
    np.testing.assert_allclose(out, np.einsum("bhk,bhkv->bhv", q, kept), atol=1e-5)


def test_step_rejects_positive_log_decay() -> None:
    rng = np.random.default_rng(2)
    q, k, v, log_decay, beta = tokens(rng, 1)
    with pytest.raises(ValueError, match="log_decay"):
        spec.step(state(rng, 1), q, k, v, -log_decay, beta)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
def test_chunked_equals_steps(T: int) -> None:
    rng = np.random.default_rng(3)
    start, rows = state(rng, 1)[0], tokens(rng, T)
    for got, want in zip(spec.chunked(start, *rows), in_steps(start, *rows), strict=True):
        np.testing.assert_allclose(got, want, **CHUNKED)


def test_chunked_strong_decay_is_finite_and_precise() -> None:
    rng = np.random.default_rng(4)
    start, rows = state(rng, 1)[0], list(tokens(rng, 70))
    rows[3] = np.full_like(rows[3], -30)  # exp of the sums above the diagonal would be infinite
    with np.errstate(over="raise", invalid="raise"):
        got = spec.chunked(start, *rows)
    for g, w in zip(got, in_steps(start, *rows), strict=True):
        np.testing.assert_allclose(g, w, **CHUNKED)


def test_chunked_split_at_64_bitwise_equal() -> None:
    rng = np.random.default_rng(5)
    start, rows = state(rng, 1)[0], tokens(rng, 150)
    whole, out = spec.chunked(start, *rows)
    first, out_1 = spec.chunked(start, *(x[:64] for x in rows))
    both, out_2 = spec.chunked(first, *(x[64:] for x in rows))
    np.testing.assert_array_equal(both, whole)
    np.testing.assert_array_equal(np.concatenate([out_1, out_2]), out)


def test_chunked_without_tokens_preserves_state() -> None:
    rng = np.random.default_rng(6)
    start = state(rng, 1)[0]
    after, out = spec.chunked(start, *tokens(rng, 0))
    np.testing.assert_array_equal(after, start)
    assert out.shape == (0, H, V)


@given(seed=st.integers(0, 1000), N=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_verify_tree_node_equals_steps_of_path(seed: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    parents = np.array([[0] + [rng.integers(0, n) for n in range(1, N)] for _ in range(2)])
    start, rows = state(rng, 2), tokens(rng, 2, N)
    out = spec.verify(start, *rows, parents)
    for b in range(2):
        for node in range(N):
            path = [node]
            while path[-1]:
                path.append(parents[b, path[-1]])
            _, want = in_steps(start[b], *(x[b, path[::-1]] for x in rows))
            # The same recurrence in the same order: the same bits.
            np.testing.assert_array_equal(out[b, node], want[-1])


def test_split_repeats_key_heads_and_normalises() -> None:
    rng = np.random.default_rng(7)
    channels = rng.standard_normal((5, 2 * 2 * K + 6 * V)).astype(np.float32)
    q, k, v = spec.split(channels, 2, 6, K)
    assert q.shape == k.shape == (5, 6, K)
    assert v.shape == (5, 6, V)
    np.testing.assert_array_equal(k[:, 0], k[:, 1])
    np.testing.assert_array_equal(q[:, 3], q[:, 4])
    assert (k[:, 2] != k[:, 3]).any()
    np.testing.assert_array_equal(v.reshape(5, -1), channels[:, 4 * K :])
    np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1, atol=1e-6)  # float32
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), K**-0.5, atol=1e-6)


def test_gates_within_bounds() -> None:
    x = np.array([[-1e4, -5, 0, 5, 1e4]], np.float32)
    log_decay, beta = spec.gates(x, x, np.zeros(5, np.float32), np.zeros(5, np.float32))
    assert (log_decay <= 0).all()
    assert ((beta >= 0) & (beta <= 1)).all()
    np.testing.assert_allclose(log_decay[0, 2], -np.log(2), rtol=1e-6)  # float32


# One rounding for each of K products and sums in another order.
STEP = {"rtol": 1e-5, "atol": 1e-5}


@each_implementation
def test_gated_delta_step_matches_spec(implementation: Implementation) -> None:
    rng = np.random.default_rng(6)
    args = (state(rng, 5), *tokens(rng, 5))
    want, got = spec.step(*args), implementation("gated_delta").step(*args)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, **STEP)


@each_implementation
def test_gated_delta_verify_matches_spec(implementation: Implementation) -> None:
    rng = np.random.default_rng(7)
    args = (state(rng, 3), *tokens(rng, 3, 5))
    chain, tree = (
        np.array([[0, 0, 1, 2, 3]] * 3),
        np.array([[0, 0, 0, 1, 2], [0] * 5, [0, 0, 1, 1, 3]]),
    )
    verify = implementation("gated_delta").verify
    np.testing.assert_allclose(verify(*args, tree), spec.verify(*args, tree), **STEP)
    np.testing.assert_allclose(verify(*args, None), spec.verify(*args, chain), **STEP)


@each_implementation
def test_gated_delta_verify_strong_decay_matches_spec(
    implementation: Implementation,
) -> None:
    rng, N = np.random.default_rng(11), 64
    parents = np.array([[0] + [rng.integers(max(0, n - 9), n) for n in range(1, N)]] * 2)
    start, rows = state(rng, 2), list(tokens(rng, 2, N))
    rows[3][:, 1:4] = -3e4  # a difference of sums of such logarithms would have lost all others
    got = implementation("gated_delta").verify(start, *rows, parents)
    np.testing.assert_allclose(got, spec.verify(start, *rows, parents), **CHUNKED)


@each_implementation
@pytest.mark.parametrize("spoiled", [0, 1, 2, 3, 4], ids=["q", "k", "v", "log_decay", "beta"])
def test_gated_delta_verify_nan_reaches_descendants_only(
    spoiled: int, implementation: Implementation
) -> None:
    rng, parents = np.random.default_rng(12), np.array([[0, 0, 0, 1, 2, 3]] * 2)
    start, rows = state(rng, 2), list(tokens(rng, 2, 6))
    healthy = spec.verify(start, *rows, parents)
    rows[spoiled][0, 1] = np.nan
    got = implementation("gated_delta").verify(start, *rows, parents)
    below = [1] if spoiled == 0 else [1, 3, 5]  # a query is read by its own node alone
    assert np.isnan(got[0, below]).all()
    others = np.delete(got[0], below, axis=0), np.delete(healthy[0], below, axis=0)
    np.testing.assert_allclose(*others, **STEP)
    np.testing.assert_allclose(got[1], healthy[1], **STEP)


@each_implementation
@pytest.mark.parametrize("counts", [(1, 130, 64, 0, 65), (260,), (0, 3, 0)], ids=str)
def test_gated_delta_chunked_ragged_matches_spec(
    counts: tuple[int, ...], implementation: Implementation
) -> None:
    rng, row_starts = np.random.default_rng(8), np.concatenate([[0], np.cumsum(counts)])
    start, rows = state(rng, len(counts)), tokens(rng, sum(counts) + 9)
    save_after = np.minimum(64, counts)
    after, out, saved = implementation("gated_delta").chunked(start, *rows, row_starts, save_after)
    for b, (first, stop) in enumerate(itertools.pairwise(row_starts)):
        want, want_out = spec.chunked(start[b], *(x[first:stop] for x in rows))
        np.testing.assert_allclose(after[b], want, **CHUNKED)
        np.testing.assert_allclose(out[first:stop], want_out, **CHUNKED)
        if counts[b]:
            want, _ = spec.chunked(start[b], *(x[first : first + save_after[b]] for x in rows))
            np.testing.assert_allclose(saved[b], want, **CHUNKED)


@each_implementation
def test_gated_delta_chunked_nan_stays_in_request(implementation: Implementation) -> None:
    rng, row_starts = np.random.default_rng(9), np.array([0, 70, 100])
    start, rows = state(rng, 2), tokens(rng, 128)
    start[0] = np.nan
    rows[2][100:] = np.nan  # padding
    after, out, _ = implementation("gated_delta").chunked(
        start, *rows, row_starts, np.zeros(2, int)
    )
    assert np.isfinite(after[1]).all()
    assert np.isfinite(out[70:100]).all()
    assert np.isnan(after[0]).all()


@each_implementation
def test_gated_delta_split_gates_and_norm_match_spec(
    implementation: Implementation,
) -> None:
    ops, rng = implementation("gated_delta"), np.random.default_rng(10)
    channels = rng.standard_normal((4, 2 * 2 * K + 6 * V)).astype(np.float32)
    for g, w in zip(ops.split(channels, 2, 6, K), spec.split(channels, 2, 6, K), strict=True):
        np.testing.assert_allclose(g, w, **STEP)
    b, a = (30 * rng.standard_normal((4, H)).astype(np.float32) for _ in range(2))
    fixed = tuple(rng.standard_normal((2, H)).astype(np.float32))
    for g, w in zip(ops.gates(b, a, *fixed), spec.gates(b, a, *fixed), strict=True):
        np.testing.assert_allclose(g, w, **STEP)
    out, z = (rng.standard_normal((4, H, V)).astype(np.float32) for _ in range(2))
    weight = np.ones(V, np.float32)
    got, want = (f(out, z, weight, 1e-6) for f in (ops.gated_norm, spec.gated_norm))
    np.testing.assert_allclose(got, want, **STEP)
