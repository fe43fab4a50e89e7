"""Recurrent layers between their projections: prefill, verification and decode."""

import numpy as np
import pytest

from shared.models.mixers import GatedDeltaConfig
from shared.spec import recurrent_mixer as spec
from shared.spec.recurrent_state import WINDOW
from tests.support.implementations import Implementation, each_implementation

B, N = 3, 6
PARENTS = np.array([[0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0]])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_size=4, value_size=3)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def layer(seed: int) -> tuple[spec.RecurrentWeights, tuple[np.ndarray, np.ndarray]]:
    """One layer's weights, and the states and windows of B requests before it."""
    rng, heads = np.random.default_rng(seed), SIZES.num_value_heads
    weights = spec.RecurrentWeights(
        conv=normal(rng, SIZES.channels, 4),
        conv_bias=None,
        a_log=normal(rng, heads),
        dt_bias=normal(rng, heads),
        skip=None,
        norm=1 + normal(rng, SIZES.value_size) / 4,
        eps=1e-6,
    )
    recurrent = normal(rng, B, heads, SIZES.key_size, SIZES.value_size)
    return weights, (recurrent, normal(rng, B, WINDOW, SIZES.channels))


def projected(seed: int, rows: int) -> np.ndarray:
    heads = SIZES.num_value_heads
    outputs = SIZES.channels + heads * SIZES.value_size + 2 * heads
    return normal(np.random.default_rng(seed), rows, outputs)


def all_close(got: tuple, want: tuple) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, **CLOSE)


@each_implementation
def test_gdn_decode_matches_spec(implementation: Implementation) -> None:
    weights, state = layer(9)
    args = (projected(10, B), weights, SIZES, *state)
    all_close(
        implementation("recurrent_mixer").recurrent_decode(*args), spec.recurrent_decode(*args)
    )


@each_implementation
@pytest.mark.parametrize("parents", [PARENTS, None], ids=["trees", "chains"])
def test_gdn_verify_tree_matches_spec(
    parents: np.ndarray | None, implementation: Implementation
) -> None:
    weights, state = layer(11)
    row = np.random.default_rng(12).permutation(B * N)  # nodes in any order of rows
    request, node = np.divmod(row, N)
    row_of = np.argsort(row).reshape(B, N)
    before = (projected(13, B * N), weights, SIZES, *state)
    chains = np.array([[0, 0, 1, 2, 3, 4]] * B)
    where = (row_of, request, node)
    got, kept = implementation("recurrent_mixer").recurrent_verify_tree(*before, parents, *where)
    want = spec.recurrent_verify_tree(*before, chains if parents is None else parents, *where)
    np.testing.assert_allclose(got, want[0], **CLOSE)
    names = ("k", "v", "log_decay", "beta", "inputs")
    all_close(*(tuple(getattr(x, name) for name in names) for x in (kept, want[1])))


@each_implementation
def test_gdn_prefill_with_snapshots_matches_spec(implementation: Implementation) -> None:
    """Requests of many rows and of few; a snapshot is the state of a shorter prompt."""
    weights, state = layer(14)
    counts, save_after = np.array([70, 1, 3]), np.array([64, 5, 3])
    row_starts, request = np.concatenate([[0], np.cumsum(counts)]), np.repeat(np.arange(B), counts)
    before = (weights, SIZES, *state)
    inputs = projected(15, len(request))
    out, *new, saved = implementation("recurrent_mixer").recurrent_prefill(
        inputs, *before, row_starts, request, save_after
    )
    all_close((out, *new), spec.recurrent_prefill(inputs, *before, row_starts))
    _, *want = spec.recurrent_prefill(inputs[:66], *before, np.array([0, 64, 65, 66]))
    all_close([x[0] for x in saved], [x[0] for x in want])
    all_close([x[2] for x in saved], [x[2] for x in new])
