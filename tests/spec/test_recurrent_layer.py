"""GDN layer on the states of slots: it changes those of the batch only."""

from collections.abc import Callable

import numpy as np
import pytest

from shared.spec import recurrent_layer as spec
from shared.spec.recurrent_state import RecurrentState, ReplayInputs
from tests.support.cases.gdn.recurrent_layer import (
    SMALL,
    arguments,
    block_trees,
    commit_arguments,
    parents_of,
    states_of,
    weights_of,
)
from tests.support.implementations import Implementation, each_implementation

# Float32 on both sides: the orders of short sums differ.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
B = 3


def arrays(x: RecurrentState | ReplayInputs) -> list[np.ndarray]:
    return list(vars(x).values())


def given(N: int, trees: Callable[..., np.ndarray] | None = None) -> dict:
    return arguments(N, B=B, N=N, sizes=SMALL, trees=trees)


def parts(made: dict, *names: str) -> list:
    return [made[name] for name in names]


LAYER = ("inputs", "weights", "sizes", "states", "layer", "slots")


def assert_close(got: RecurrentState | ReplayInputs, want: RecurrentState | ReplayInputs) -> None:
    for g, w in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_allclose(g, w, **CLOSE)


def test_gdn_decode_equals_verify_and_commit() -> None:
    """A verify of one node and its commit leave the same bits."""
    made = given(1)
    out, advanced = spec.decode(*parts(made, *LAYER))
    verified, kept = spec.verify(*parts(made, *LAYER), made["nodes"].specified)
    np.testing.assert_array_equal(out, verified)
    one = np.ones(B, np.int32)
    how = (made["slots"], np.zeros((B, 1), np.int32), one, 0 * one, 0 * one)
    none = spec.take(made["states"], np.zeros(1, int))
    layer, slots = made["layer"], made["slots"]
    # What was kept is of one layer; the other's inputs do not matter here.
    inputs = np.repeat(kept.inputs, 2, axis=0)
    states, _ = spec.commit(advanced, none, inputs, *how)
    whole = ReplayInputs(**{name: np.repeat(x, 2, axis=0) for name, x in vars(kept).items()})
    wanted, _ = spec.commit(made["states"], none, whole, *how)
    np.testing.assert_array_equal(states.recurrent[layer, slots], wanted.recurrent[layer, slots])
    np.testing.assert_array_equal(states.window[layer, slots], wanted.window[layer, slots])


def test_gdn_decode_preserves_other_slots_and_layers() -> None:
    made = given(1)
    _, states = spec.decode(*parts(made, *LAYER))
    others = np.setdiff1d(np.arange(B + 2), made["slots"])
    np.testing.assert_array_equal(states.recurrent[:, others], made["states"].recurrent[:, others])
    np.testing.assert_array_equal(states.recurrent[0], made["states"].recurrent[0])
    np.testing.assert_array_equal(states.window, made["states"].window)


def test_gdn_commit_writes_snapshot_on_accepted_path() -> None:
    made = commit_arguments(0, B=B, N=4, sizes=SMALL, layers=2)
    made["counts"] = np.array([4, 2, 1], np.int32)
    made["save_after"] = np.array([4, 3, 1], np.int32)
    made["save"] = np.array([2, 1, 0], np.int32)
    states, snapshots = spec.commit(**made)
    first = made["slots"][0]
    np.testing.assert_array_equal(snapshots.recurrent[:, 2], states.recurrent[:, first])
    np.testing.assert_array_equal(snapshots.window[:, 2], states.window[:, first])
    for untouched in (0, 1, 3):
        np.testing.assert_array_equal(
            snapshots.recurrent[:, untouched], made["snapshots"].recurrent[:, untouched]
        )


def run(implementation: Implementation, name: str, made: dict) -> tuple:
    """Returns outputs, states and replay inputs: JAX returns them, torch writes in place."""
    order = (*LAYER, "nodes", "scratch")
    places = (order.index("states"), order.index("scratch"))
    found, left = implementation("recurrent_layer").leaving(places, name, *parts(made, *order))
    out, states, room = found if isinstance(found, tuple) else (found, *left)
    return out, states, room.kept


@each_implementation
@pytest.mark.parametrize(
    "trees", [None, parents_of, block_trees], ids=["chains", "trees", "block trees"]
)
def test_gdn_layer_verify_matches_spec(trees, implementation: Implementation):
    made = given(5, trees)
    found, states, got = run(implementation, "verify", made)
    out, kept = spec.verify(*parts(made, *LAYER), made["nodes"].specified)
    assert_close(states, made["states"])
    assert_close(ReplayInputs(*(x[made["layer"]][None] for x in arrays(got))), kept)
    np.testing.assert_allclose(found, out, **CLOSE)


@each_implementation
def test_gdn_layer_decode_matches_spec(implementation: Implementation) -> None:
    made = given(1)
    found, states, kept = run(implementation, "decode", made)
    out, advanced = spec.decode(*parts(made, *LAYER))
    assert_close(states, advanced)
    channels = made["inputs"][:, : SMALL.channels]
    np.testing.assert_array_equal(kept[made["layer"], :, 0], channels)
    np.testing.assert_allclose(found, out, **CLOSE)


@each_implementation
@pytest.mark.parametrize("has_advanced", [False, True], ids=["replayed", "advanced"])
def test_gdn_layer_commit_matches_spec(has_advanced: bool, implementation: Implementation) -> None:
    made = commit_arguments(1, B=B, N=1 if has_advanced else 4, sizes=SMALL, layers=2)
    if has_advanced:
        made["kept"] = made["kept"].inputs
        made["counts"][1] = 0  # it has failed
    want = spec.commit(**made)
    got = implementation("recurrent_layer").commit(**made)
    for g, w in zip(got, want, strict=True):
        # Slot and snapshot 0 are sinks.
        for x, y in zip(arrays(g), arrays(w), strict=True):
            np.testing.assert_allclose(x[:, 1:], y[:, 1:], **CLOSE)


@each_implementation
def test_gdn_layer_prefill_matches_spec(implementation: Implementation) -> None:
    rng = np.random.default_rng(3)
    states, snapshots = states_of(rng, SMALL, 2, 5), states_of(rng, SMALL, 2, 3)
    row_starts, slots = np.array([0, 66, 70], np.int32), np.array([3, 1], np.int32)
    width = SMALL.channels + SMALL.num_value_heads * (SMALL.value_size + 2)
    inputs = rng.standard_normal((70, width), np.float32)
    layer = (inputs, weights_of(rng, SMALL), SMALL)
    request = np.repeat([0, 1], [66, 4]).astype(np.int32)
    save_after, save = np.array([64, 4], np.int32), np.array([2, 0], np.int32)
    where = (row_starts, request, save_after, save)
    given = (*layer, states, snapshots, 1, slots, *where)
    found, left = implementation("recurrent_layer").leaving((3, 4), "prefill", *given)
    found, new, saved = found if isinstance(found, tuple) else (found, *left)
    out, want = spec.prefill(*layer, states, 1, slots, row_starts)
    assert_close(new, want)
    first = (slots[:1], np.array([0, 64], np.int32))
    _, partly = spec.prefill(inputs[:64], *layer[1:], states, 1, *first)
    np.testing.assert_allclose(saved.recurrent[1, 2], partly.recurrent[1, 3], **CLOSE)
    np.testing.assert_allclose(saved.window[1, 2], partly.window[1, 3], **CLOSE)
    np.testing.assert_allclose(found, out, **CLOSE)
