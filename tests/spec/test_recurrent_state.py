"""State of GDN layers: state replay of an accepted path equals plain decoding."""

import itertools

import numpy as np
import pytest

from shared.spec import gated_delta, layers
from shared.spec import recurrent_state as spec
from tests.support.implementations import Implementation, each_implementation

L, B, N, H, K, V, C = 2, 3, 6, 2, 4, 3, 5
PARENTS = np.array([[0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0]])
PATHS = np.array([[0, 2, 4, 5], [0, 1, 2, 3], [0, 3, 3, 3]])
COUNTS = np.array([4, 2, 1])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def state_and_kept(seed: int) -> tuple[spec.RecurrentState, spec.ReplayInputs]:
    rng = np.random.default_rng(seed)
    state = spec.RecurrentState(normal(rng, L, B, H, K, V), normal(rng, L, B, spec.WINDOW, C))
    kept = spec.ReplayInputs(
        k=layers.l2norm(normal(rng, L, B, N, H, K)),
        v=normal(rng, L, B, N, H, V),
        log_decay=-np.abs(normal(rng, L, B, N, H)),
        beta=layers.sigmoid(normal(rng, L, B, N, H)),
        inputs=normal(rng, L, B, N, C),
    )
    return state, kept


def in_steps(
    state: spec.RecurrentState, kept: spec.ReplayInputs, row: int, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """State and window of one row after these nodes, token by token as plain decoding has them."""
    recurrent, window = state.recurrent[:, row], state.window[:, row]
    for node in nodes:
        parts = (x[:, row, node] for x in (kept.k, kept.k, kept.v, kept.log_decay, kept.beta))
        recurrent, _ = gated_delta.step(recurrent, *parts)
        window = np.concatenate([window[:, 1:], kept.inputs[:, row, node][:, None]], axis=1)
    return recurrent, window


def test_replay_of_path_bitwise_equal() -> None:
    state, kept = state_and_kept(0)
    after, _, _ = spec.replay(state, kept, PATHS, COUNTS, np.zeros(B, int))
    for row in range(B):
        recurrent, window = in_steps(state, kept, row, PATHS[row, : COUNTS[row]])
        np.testing.assert_array_equal(after.recurrent[:, row], recurrent)
        np.testing.assert_array_equal(after.window[:, row], window)


def test_replay_without_accepted_drafts_advances_one_token() -> None:
    state, kept = state_and_kept(1)
    after, _, _ = spec.replay(state, kept, PATHS, np.ones(B, int), np.zeros(B, int))
    for row in range(B):
        recurrent, window = in_steps(state, kept, row, np.array([0]))
        np.testing.assert_array_equal(after.recurrent[:, row], recurrent)
        np.testing.assert_array_equal(after.window[:, row], window)


def test_replay_failed_row_preserves_state() -> None:
    state, kept = state_and_kept(2)
    kept.v[:, 1] = kept.inputs[:, 1] = np.nan
    after, _, _ = spec.replay(state, kept, PATHS, np.array([4, 0, 1]), np.zeros(B, int))
    np.testing.assert_array_equal(after.recurrent[:, 1], state.recurrent[:, 1])
    np.testing.assert_array_equal(after.window[:, 1], state.window[:, 1])
    assert np.isfinite(after.recurrent).all()


@pytest.mark.parametrize("save_after", [[1, 2, 1], [3, 1, 0], [4, 3, 2], [0, 0, -7]])
def test_replay_saves_snapshot_at_exact_position(
    save_after: list[int],
) -> None:
    state, kept = state_and_kept(3)
    after, saved, passed = spec.replay(state, kept, PATHS, COUNTS, np.array(save_after))
    unsaved, _, _ = spec.replay(state, kept, PATHS, COUNTS, np.zeros(B, int))
    np.testing.assert_array_equal(after.recurrent, unsaved.recurrent)
    np.testing.assert_array_equal(after.window, unsaved.window)
    for row in range(B):
        assert passed[row] == (1 <= save_after[row] <= COUNTS[row])
        if passed[row]:
            recurrent, window = in_steps(state, kept, row, PATHS[row, : save_after[row]])
            np.testing.assert_array_equal(saved.recurrent[:, row], recurrent)
            np.testing.assert_array_equal(saved.window[:, row], window)


def test_tree_windows_follow_own_path() -> None:
    state, kept = state_and_kept(4)
    windows = spec.tree_windows(state.window[0], kept.inputs[0], PARENTS)
    for row in range(B):
        for node in range(N):
            path = [node]
            while path[-1]:
                path.append(PARENTS[row, path[-1]])
            _, window = in_steps(state, kept, row, np.array(path[:0:-1], int))
            np.testing.assert_array_equal(windows[row, node], window[0])


def test_chain_windows_equal_tree_windows() -> None:
    state, kept = state_and_kept(5)
    window, inputs = state.window[0, 0], kept.inputs[0, 0]
    windows = spec.chain_windows(window, inputs)
    chain = np.maximum(np.arange(N) - 1, 0)[None]
    as_tree = spec.tree_windows(window[None], inputs[None], chain)[0]
    np.testing.assert_array_equal(windows[:-1], as_tree)
    np.testing.assert_array_equal(windows[-1], inputs[-3:])
    np.testing.assert_array_equal(spec.chain_windows(window, inputs[:0])[-1], window)


def test_conv_is_causal_with_width_four() -> None:
    rng = np.random.default_rng(6)
    inputs, weight = normal(rng, 12, C), normal(rng, C, 4)
    windows = spec.chain_windows(np.zeros((3, C), np.float32), inputs)[:-1]
    got = spec.conv(windows, inputs, weight, None)
    for channel in range(C):
        whole = np.convolve(inputs[:, channel], weight[channel, ::-1])[:12]
        # Four products in another order.
        np.testing.assert_allclose(got[:, channel], layers.silu(whole), rtol=1e-5, atol=1e-6)


# Float32 on both sides: the orders of short sums differ.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@each_implementation
def test_replay_matches_spec(implementation: Implementation) -> None:
    state, kept = state_and_kept(5)
    kept.k[:, 2, 4:] = np.nan  # nodes off the path
    for counts in (COUNTS, np.array([0, 4, 1])):
        args = (state, kept, PATHS, counts, np.array([2, 0, 1]))
        (new, saved, passed), want = (
            implementation("recurrent_state").replay(*args),
            spec.replay(*args),
        )
        np.testing.assert_array_equal(passed, want[2])
        np.testing.assert_allclose(new.recurrent, want[0].recurrent, **CLOSE)
        np.testing.assert_array_equal(new.window, want[0].window)
        np.testing.assert_allclose(
            saved.recurrent[:, passed], want[1].recurrent[:, passed], **CLOSE
        )
        np.testing.assert_array_equal(saved.window[:, passed], want[1].window[:, passed])


@each_implementation
def test_tree_windows_and_conv_match_spec(
    implementation: Implementation,
) -> None:
    ops, (state, kept) = implementation("recurrent_state"), state_and_kept(6)
    args, chain = (state.window[0], kept.inputs[0]), np.array([[0, 0, 1, 2, 3, 4]] * B)
    np.testing.assert_array_equal(
        ops.tree_windows(*args, PARENTS), spec.tree_windows(*args, PARENTS)
    )
    np.testing.assert_array_equal(ops.tree_windows(*args, None), spec.tree_windows(*args, chain))
    weight = normal(np.random.default_rng(7), C, 4)
    windows = spec.tree_windows(*args, PARENTS)
    got, want = (f(windows, kept.inputs[0], weight, None) for f in (ops.conv, spec.conv))
    np.testing.assert_allclose(got, want, **CLOSE)


@each_implementation
def test_chain_windows_of_ragged_prompts_match_spec(
    implementation: Implementation,
) -> None:
    ops, rng, counts = implementation("recurrent_state"), np.random.default_rng(8), [2, 0, 1, 7]
    starts = np.concatenate([[0], np.cumsum(counts)])
    window, inputs = normal(rng, 4, spec.WINDOW, C), normal(rng, sum(counts), C)
    request = np.repeat(np.arange(4), counts)
    places = np.arange(sum(counts)) - starts[request]
    before = ops.chain_windows(window, inputs, request, places)
    after = ops.chain_end(window, inputs, starts, np.array(counts))
    for b, (first, stop) in enumerate(itertools.pairwise(starts)):
        want = spec.chain_windows(window[b], inputs[first:stop])
        np.testing.assert_array_equal(before[first:stop], want[:-1])
        np.testing.assert_array_equal(after[b], want[-1])
