"""Elementary operations: their values, and the absence of overflow."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.models.rotary import RotaryConfig
from shared.spec import layers as spec
from tests.support.implementations import Implementation, each_implementation


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_activations_do_not_overflow_in_float32() -> None:
    x = np.array([-1e4, -100, -1, 0, 1, 100, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = [f(x) for f in (spec.sigmoid, spec.softplus, spec.silu)]
    exact = x.astype(np.float64)
    want = [
        [0, 0, 0.2689414213699951, 0.5, 0.7310585786300049, 1, 1],
        np.logaddexp(0, exact),
        [0, 0, -0.2689414213699951, 0, 0.7310585786300049, 100, 1e4],
    ]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == np.float32
        # A few units in the last place of float32.
        np.testing.assert_allclose(g, w, rtol=5e-7, atol=1e-30)


def test_rms_norm_matches_torch() -> None:
    x, weight = normal(0, 5, 16), normal(1, 16)
    want = torch.nn.functional.rms_norm(torch.tensor(x), (16,), torch.tensor(weight), 1e-5)
    # The same float32 operations in another order.
    np.testing.assert_allclose(spec.rms_norm(x, weight, 1e-5), want, rtol=1e-5, atol=1e-6)


def test_layer_norm_and_gelu_match_torch() -> None:
    x, weight, bias = 3 * normal(3, 5, 16), normal(4, 16), normal(5, 16)
    functional, given = torch.nn.functional, torch.tensor(x)
    want = functional.layer_norm(given, (16,), torch.tensor(weight), torch.tensor(bias), 1e-6)
    # The same float32 operations in another order.
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(spec.layer_norm(x, weight, bias, 1e-6), want, **close)
    np.testing.assert_allclose(spec.gelu(x), functional.gelu(given), **close)
    approximate = functional.gelu(given, approximate="tanh")
    np.testing.assert_allclose(spec.gelu_tanh(x), approximate, **close)
    assert np.abs(spec.gelu(x) - spec.gelu_tanh(x)).max() > 1e-4


def test_l2norm_has_unit_length_and_preserves_zero() -> None:
    x = normal(2, 4, 8)
    x[1] = 0
    lengths = np.linalg.norm(spec.l2norm(x), axis=1)
    # The 1e-6 inside the root shortens by less than that, relative to a squared length near 8.
    np.testing.assert_allclose(lengths, [1, 0, 1, 1], atol=1e-6)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "default": ({}, {}),
    "linear": ({"factor": 4.0}, {}),
    "llama3": ({"factor": 8.0, **LLAMA3}, {"original_context": 8192}),
    "yarn": ({"factor": 4.0}, {"original_context": 8192, "attention_factor": 1.1386294}),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotary_frequencies_match_transformers(kind: str, theta: float) -> None:
    common, ours = SCALINGS[kind]
    rotary = RotaryConfig(theta=theta, width=64, type=kind, **common, **ours)
    theirs = {"rope_type": kind, "rope_theta": theta, **common}
    if "original_context" in ours:
        theirs["original_max_position_embeddings"] = ours["original_context"]
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=32768
    )
    config.rope_parameters = theirs
    if kind == "default":
        want = 1 / theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        assert factor == pytest.approx(rotary.attention_factor)
    got = spec.rotary_frequencies(rotary)
    assert got.dtype == np.float32
    # Both in float32: a few units in the last place, of a power and of one blend.
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_rotary_attention_factor_scales_cos_and_sin() -> None:
    rotary = RotaryConfig(theta=1e4, width=8, attention_factor=1.5)
    cos, sin = spec.rotary_angles(np.arange(4), rotary)
    np.testing.assert_allclose(cos**2 + sin**2, np.full((4, 4), 2.25), rtol=1e-6)  # float32


def test_apply_rotary_rotates_half_pairs() -> None:
    x = normal(7, 3, 2, 12)
    cos, sin = spec.rotary_angles(np.array([0, 5, 900]), RotaryConfig(theta=1e4, width=8))
    y = spec.apply_rotary(x, cos, sin)
    np.testing.assert_array_equal(y[0], x[0])
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    pairs = x[..., :4] + 1j * x[..., 4:8]
    turned = pairs * (cos + 1j * sin)[:, None]
    np.testing.assert_allclose(y[..., :4] + 1j * y[..., 4:8], turned, rtol=1e-5)  # float32


def test_rotary_scores_depend_on_distance_only() -> None:
    q, k = normal(8, 1, 1, 16), normal(9, 1, 1, 16)
    rotary = RotaryConfig(theta=1e4, width=16)

    def score(at_q: int, at_k: int) -> float:
        turned = [
            spec.apply_rotary(x, *spec.rotary_angles(np.array([at]), rotary))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    # Angles of magnitude 1000 in float32 have an error of 6e-5.
    assert score(1007, 1000) == pytest.approx(score(7, 0), abs=2e-3)
    assert score(7, 0) != pytest.approx(score(6, 0), abs=2e-2)


@each_implementation
def test_layers_match_spec(
    implementation: Implementation,
) -> None:
    ops = implementation("layers")
    close = {"rtol": 1e-5, "atol": 1e-5}  # float32, short sums in another order
    x = np.concatenate([10 * normal(0, 5, 8), np.array([[-1e4, -100, -1, 0, 1, 25, 100, 1e4]])])
    x = x.astype(np.float32)
    for name in ("sigmoid", "softplus", "silu", "l2norm", "gelu", "gelu_tanh"):
        np.testing.assert_allclose(getattr(ops, name)(x), getattr(spec, name)(x), **close)
    np.testing.assert_allclose(ops.softcap(x, 30.0), spec.softcap(x, 30.0), **close)
    args = (x, normal(1, 8), 1e-6)
    np.testing.assert_allclose(ops.rms_norm(*args), spec.rms_norm(*args), **close)
    args = (x, normal(1, 8), normal(2, 8), 1e-6)
    np.testing.assert_allclose(ops.layer_norm(*args), spec.layer_norm(*args), **close)


@each_implementation
def test_rotary_far_positions_match_spec(
    implementation: Implementation,
) -> None:
    ops, rotary = implementation("layers"), RotaryConfig(theta=1e4, width=8, attention_factor=1.2)
    positions = np.array([0, 1, 9000, 200_000], np.int32)
    cos, sin = spec.rotary_angles(positions, rotary)
    got = ops.rotary_angles(positions, spec.rotary_frequencies(rotary), rotary.attention_factor)
    # The angles are equal float32 products; only cosine and sine are approximated.
    np.testing.assert_allclose(got[0], cos, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[1], sin, rtol=0, atol=1e-6)
    x = normal(5, 4, 3, 12)
    np.testing.assert_allclose(
        ops.apply_rotary(x, cos, sin), spec.apply_rotary(x, cos, sin), rtol=1e-5, atol=1e-6
    )
