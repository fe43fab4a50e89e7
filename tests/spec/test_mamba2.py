"""Mamba2 layers: the recurrence by its equations, the output norm, and sizes of TP ranks."""

import numpy as np
import pytest

from shared.boundary.tp_group import SINGLE_RANK
from shared.models.mixers import Mamba2Config
from shared.models.mixers.mamba2 import OutputNorm
from shared.spec import gated_delta, layers
from shared.spec import mamba2 as spec
from tests.support.implementations import Implementation, each_implementation

SIZES = Mamba2Config(
    num_heads=6,
    head_size=4,
    num_groups=2,
    state_size=8,
    conv_bias=True,
    input_bias=False,
    out_bias=False,
    norm=OutputNorm.AFTER_GATE,
    norm_size=12,
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(count: int) -> tuple[np.ndarray, ...]:
    """Channels, time steps, and the parameters of each head."""
    heads = (normal(seed, SIZES.num_heads) for seed in (3, 4, 5))
    return normal(1, count, SIZES.channels), normal(2, count, SIZES.num_heads), *heads


def test_mamba2_step_equals_equations() -> None:
    channels, dt, a_log, dt_bias, skip = tokens(1)
    state = normal(6, 1, *SIZES.state_shape)
    own = spec.recurrence_inputs(channels, dt, a_log, dt_bias, skip, SIZES)
    after, out = gated_delta.step(state, own.q, own.k, own.v, own.log_decay, own.beta)
    for head in range(SIZES.num_heads):
        x = channels[0, 4 * head : 4 * head + 4]
        group = head // 3
        b = channels[0, 24 + 8 * group : 32 + 8 * group]
        c = channels[0, 40 + 8 * group : 48 + 8 * group]
        step = np.log1p(np.exp(dt[0, head] + dt_bias[head]))
        want = np.exp(-step * np.exp(a_log[head])) * state[0, head] + np.outer(b, step * x)
        np.testing.assert_allclose(after[0, head], want, **CLOSE)
        read = out[0, head] + own.skipped[0, head]
        np.testing.assert_allclose(read, want.T @ c + skip[head] * x, **CLOSE)


@pytest.mark.parametrize("splits", [(150,), (64, 64, 22), (1, 149)], ids=str)
def test_mamba2_chunks_equal_steps(splits: tuple[int, ...]) -> None:
    own = spec.recurrence_inputs(*tokens(150), SIZES)
    parts = (own.q, own.k, own.v, own.log_decay)
    state = first = normal(7, *SIZES.state_shape)
    outputs = []
    for chunk in zip(*(np.split(x, np.cumsum(splits)[:-1]) for x in parts), strict=True):
        state, out = gated_delta.chunked(state, *chunk, None)
        outputs.append(out)
    stepped, wanted = first[None], []
    for token in zip(*parts, strict=True):
        stepped, out = gated_delta.step(stepped, *(x[None] for x in token), None)
        wanted.append(out[0])
    np.testing.assert_allclose(state, stepped[0], **CLOSE)
    np.testing.assert_allclose(np.concatenate(outputs), np.stack(wanted), **CLOSE)


@each_implementation
def test_mamba2_inputs_match_spec(implementation: Implementation) -> None:
    args = (*tokens(5), SIZES)
    got, want = (x.recurrence_inputs(*args) for x in (implementation("mamba2"), spec))
    assert got.beta is None
    for name in ("q", "k", "v", "log_decay", "skipped"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), **CLOSE)


@each_implementation
@pytest.mark.parametrize("norm", OutputNorm, ids=lambda each: each.name)
def test_mamba2_output_norms_match_spec(norm: OutputNorm, implementation: Implementation) -> None:
    sizes = Mamba2Config(**{**vars(SIZES), "norm": norm})
    out, z = normal(8, 5, sizes.values), normal(9, 5, sizes.values)
    weight = None if norm is OutputNorm.NONE else normal(10, sizes.values)
    got = implementation("mamba2").output_norm(out, z, weight, 1e-5, sizes, SINGLE_RANK)
    want = spec.output_norm(out, z, weight, 1e-5, sizes)
    np.testing.assert_allclose(got, want, **CLOSE)
    if norm is OutputNorm.BEFORE_GATE:
        first = layers.rms_norm(out[:, :12], weight[:12], 1e-5) * layers.silu(z[:, :12])
        np.testing.assert_allclose(want[:, :12], first, **CLOSE)


@each_implementation
def test_mamba2_tree_verification_matches_spec(implementation: Implementation) -> None:
    parents = np.array([[0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 3, 4]])
    own = spec.recurrence_inputs(*tokens(12), SIZES).batched((2, 6))
    given = (normal(11, 2, *SIZES.state_shape), own.q, own.k, own.v, own.log_decay, None)
    got = implementation("gated_delta").verify(*given, parents)
    np.testing.assert_allclose(got, gated_delta.verify(*given, parents), **CLOSE)


def test_mamba2_ranks_share_groups() -> None:
    local = SIZES.local(2)
    assert (local.num_heads, local.num_groups, local.norm_size) == (3, 1, 12)
    one = Mamba2Config(**{**vars(SIZES), "num_groups": 1, "norm_size": 24}).local(2)
    assert (one.num_groups, one.channels, one.values % one.norm_size) == (1, 12 + 16, 12)
    with pytest.raises(ValueError, match="Mamba2 groups .2. must be a multiple or a divisor"):
        SIZES.local(3)
