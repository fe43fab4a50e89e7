"""Shared experts of another width, and experts with latents, by kernels: MLPs and projections
around the routed experts.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops
import torch_impl.ops
from jax_impl.ops.gemm import linear as jax_linear
from jax_impl.ops.moe import experts as jax_experts
from shared.models.activation import RELU2, Activation
from shared.models.mlp import MoEConfig
from shared.spec import experts as spec
from shared.spec.linear import Matrix
from tests.support.cases.moe.experts import EPS, added_arguments, config_of
from tests.support.kernels import KERNELS, ON_GPU, bind_kernels
from torch_impl.ops.gemm import linear as torch_linear
from torch_impl.ops.moe import experts as torch_experts

pytestmark = pytest.mark.usefixtures("interpreted")
HIDDEN, OWN = 64, 48
CONFIG = replace(
    config_of(
        num_experts=6,
        num_chosen=2,
        intermediate=32,
        shared=False,
        scores="sigmoid",
        has_score_bias=True,
        routed_factor=2.5,
        activation=Activation(RELU2),
    ),
    shared_intermediate=OWN,
)
LATENTS = replace(CONFIG, latent=32, output_factor=0.22)
each_config = pytest.mark.parametrize("config", [CONFIG, LATENTS], ids=["wider", "latents"])


def made(config: MoEConfig) -> dict[str, Any]:
    """Rows, and experts with a shared one that is wider than the others."""
    given, rng = added_arguments(0, R=3, hidden=HIDDEN, config=config), np.random.default_rng(1)
    shapes = {"shared_gate_up": (OWN, HIDDEN), "shared_down": (HIDDEN, OWN)}
    shared = {
        name: Matrix.plain(rng.standard_normal(shape, np.float32) / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    return given | {"weights": replace(given["weights"], **shared)}


def placed(weights: spec.Experts, to: Any, matrix: Any, made_of: Any) -> Any:
    arrays = {name: x.values for name, x in vars(weights).items() if isinstance(x, Matrix)}
    found = {name: matrix(to(x)) for name, x in arrays.items()}
    return made_of(score_bias=to(weights.score_bias), **found)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_config
def test_torch_wider_shared_expert_matches_spec(config: MoEConfig, monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    given, device = made(config), "cuda" if ON_GPU else "cpu"

    def to(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, device=device)

    weights = placed(given["weights"], to, torch_linear.Matrix.plain, torch_experts.Experts)
    stream = torch_linear.NormedStream(to(given["stream"].rows), to(given["stream"].norm))
    kernels = torch_impl.ops.KERNELS
    assert kernels is not None  # bound above
    given_norm = to(given["norm"])
    got = torch_experts.kernel_added_experts(kernels, stream, EPS, config, weights, given_norm)
    want = spec.added_experts(**given)
    # Float32 on both sides: the orders of the sums differ.
    np.testing.assert_allclose(got.rows.cpu().numpy(), want.rows, rtol=1e-4, atol=1e-4)
    assert np.abs(want.rows - spec.added_experts(**without(given)).rows).max() > 0.1


def without(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"config": replace(given["config"], shared_intermediate=0)}


@each_config
def test_jax_wider_shared_expert_lowered_for_gpu(config: MoEConfig, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    given = made(config)
    weights = placed(given["weights"], jnp.asarray, jax_linear.Matrix.plain, jax_experts.Experts)

    def added(rows: jax.Array, norm: jax.Array) -> jax.Array:
        stream = jax_linear.NormedStream(rows, norm)
        kernels = jax_impl.ops.KERNELS
        assert kernels is not None  # bound above
        return jax_experts.kernel_added_experts(kernels, stream, EPS, config, weights, norm).rows

    traced = jax.jit(added).trace(jnp.asarray(given["stream"].rows), jnp.asarray(given["norm"]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = ("experts_gate_up", "experts_down", "linear")
    assert all(name in text for name in names)
