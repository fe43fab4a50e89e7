"""Training of MoE models: the serving forward pass, and the load-balancing loss."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from jax_impl import weights
from jax_impl.training import experts, forward, init, losses
from jax_impl.training.experts import Routed
from jax_impl.training.nnx_modules import ModelModule
from shared.models.families import config_from_dict
from shared.models.mlp import MoEConfig
from tests.support.equality import Oracle
from tests.support.tiny_models import tiny_config, tiny_model
from tests.support.training import CPU, golden_model, jitted, padded, vectors


def test_moe_forward_matches_spec():
    config, arrays = tiny_model("qwen3_moe", 11)
    model = ModelModule(weights.from_arrays(arrays, config, np.float32, CPU).named)
    tokens = np.random.default_rng(5).integers(0, config.vocab, 48).astype(np.int32)
    run = jitted(forward.forward, config, compute_dtype=jnp.float32, remat=True)
    hidden = run(model, jnp.asarray(tokens)[None]).hidden[0]
    got = forward.logits(model, hidden, jnp.float32)
    # Float32 on both sides, logits up to 10: only the orders of the sums differ.
    np.testing.assert_allclose(got, Oracle(config, arrays).logits(tokens), rtol=0, atol=1e-4)


def test_moe_without_renormalisation_matches_golden():
    want, (config, model) = vectors("qwen3_moe"), golden_model("qwen3_moe")
    assert config.experts is not None
    shares = replace(config.experts, is_renormalised=False)
    layers = tuple(
        replace(layer, mlp=shares) if isinstance(layer.mlp, MoEConfig) else layer
        for layer in config.layers
    )
    config = replace(config, layers=layers)
    run = jitted(forward.forward, config, compute_dtype=jnp.float32, remat=False)
    hidden = run(model, padded(want["short_ids"], 32)).hidden[0, :24]
    got = forward.logits(model, hidden, jnp.float32)
    np.testing.assert_allclose(got, want["no_renorm_logits"], rtol=0, atol=1e-4)


def routed(rng: np.random.Generator, rows: int, num_experts: int, num_chosen: int) -> Routed:
    logits = jnp.asarray(rng.standard_normal((rows, num_experts)), jnp.float32)
    return Routed(logits, jax.lax.top_k(logits, num_chosen)[1])


def test_balance_matches_transformers_and_ignores_padding():
    """There it is one over the rows of all layers; ours is a mean over them."""
    rng = np.random.default_rng(0)
    is_real = rng.random(40) < 0.7
    layers = [routed(rng, 40, 8, 3) for _ in range(2)]
    mask = torch.tensor(is_real[None].astype(np.int64))
    want = [
        float(load_balancing_loss_func((torch.tensor(np.array(each.logits)),), 8, 3, mask))
        for each in layers
    ]
    got, least = experts.balance(layers, jnp.asarray(is_real))
    np.testing.assert_allclose(got, np.mean(want), rtol=1e-6)
    loads = [np.bincount(np.asarray(x.ids)[is_real].ravel(), minlength=8) for x in layers]
    np.testing.assert_allclose(least, np.min(loads) / is_real.sum() * 8 / 3, rtol=1e-6)


def test_balance_lowest_for_even_use():
    ids = jnp.asarray(np.arange(24).reshape(8, 3) % 8)
    even, least = experts.balance([Routed(jnp.zeros((8, 8)), ids)], jnp.ones(8, bool))
    assert float(even) == pytest.approx(3.0)
    assert float(least) == pytest.approx(1.0)


def small_mixture():
    fields = tiny_config("qwen3_moe", nested=False, with_mtp=False, tied=True)
    fields |= {"num_hidden_layers": 2, "mlp_only_layers": []}
    config = config_from_dict(fields)
    model = init.fresh_model(config, 0, False)
    # Routers that leave the last two of eight experts idle: all rows have the first channel.
    model.embed[...] = model.embed[...].at[:, 0].set(0.2)
    router = model.layers.experts.router
    router[...] = router[...].at[:, 6:, 0].set(-1.0)
    return config, model


def trained(balance_weight: float, steps: int) -> tuple[dict, dict]:
    """Metrics of the first and of the last of some steps of gradient descent on a few rows."""
    config, model = small_mixture()
    tokens = jax.random.randint(jax.random.key(1), (4, 32), 0, config.vocab)
    mask = jnp.ones((4, 32))

    def loss(model):
        how = (jnp.float32, 0.0, balance_weight, False)
        return losses.language_model_loss(config, model, tokens, mask, *how)

    def step(model, _):
        (_, metrics), slope = jax.value_and_grad(loss, has_aux=True)(model)
        norm = jnp.sqrt(sum((x * x).sum() for x in jax.tree.leaves(slope)))
        return jax.tree.map(lambda own, by: own - 0.3 * by / norm, model, slope), metrics

    run = jitted(lambda model: jax.lax.scan(step, model, length=steps)[1])
    each = run(model)
    return tuple({name: float(x[at]) for name, x in each.items()} for at in (0, -1))


def test_balance_training_revives_idle_experts():
    first, last = trained(0.1, 60)
    assert last["cross_entropy"] < 0.2 * first["cross_entropy"]
    assert first["experts_min_used"] < 0.1
    assert last["experts_min_used"] > 0.65
    _, without = trained(0.0, 60)
    assert without["experts_min_used"] < 0.65
    assert last["experts_balance"] < 3.1 < without["experts_balance"]
