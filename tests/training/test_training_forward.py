"""Training forward pass equals the reference implementations and serving."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.ops import compiled_for
from jax_impl.ops.recurrent import gated_delta as ops
from jax_impl.training import forward, gated_delta, init, layers, losses
from shared.models.families import config_from_dict
from shared.models.parameters import parameters
from shared.spec import gated_delta as spec
from tests.support.tiny_models import tiny_config
from tests.support.training import golden_model, jitted, lowered, padded, small_hybrid, vectors

# Float32 on both sides, logits of magnitude 4 to 10: only the orders of the sums differ.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", ["llama", "qwen3", "qwen3_moe", "qwen3_5_dense"])
def test_forward_matches_golden_and_ignores_padding(folder):
    want, (config, model) = vectors(folder), golden_model(folder)
    tokens = jnp.concatenate([padded(want["short_ids"], 64), padded(want["short_ids"][:5], 64)])
    run = jitted(forward.forward, config, compute_dtype=jnp.float32, remat=False)
    passed = run(model, tokens)
    close(passed.hidden[0, :24], want["short_hidden"])
    close(jnp.stack(passed.streams)[:, 0, :24], want["short_layers"])
    close(forward.logits(model, passed.hidden[0, :24], jnp.float32), want["short_logits"])
    close(passed.hidden[1, :5], want["short_hidden"][:5])


@pytest.mark.parametrize("folder", ["qwen3", "qwen3_moe", "qwen3_5_dense"])
def test_forward_gradient_traces_for_gpu(folder):
    """Only programs for a GPU have kernels, and kernels have no gradients."""
    config, model = golden_model(folder)
    tokens = padded(np.arange(5), 64)

    def total(model):
        return forward.forward(config, model, tokens, jnp.bfloat16, remat=False).hidden.sum()

    with compiled_for("NVIDIA H200"):
        jax.eval_shape(jax.grad(total), model)


def test_gdn_state_carried_between_chunks():
    want, (config, model) = vectors("qwen3_5_dense"), golden_model("qwen3_5_dense")
    run = jitted(forward.forward, config, compute_dtype=jnp.float32, remat=True)
    hidden = run(model, padded(want["long_ids"], 192)).hidden[0, 118:150]
    close(forward.logits(model, hidden, jnp.float32), want["long_logits_last32"])


def test_linear_gradients_match_matmul():
    """It has a rule of its own, so that bfloat16 factors are not widened for the gradient."""
    rng = np.random.default_rng(0)
    x, weight, slope = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 5, 16), (8, 16), (2, 5, 8))
    )
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)):  # bfloat16 has 8 bits
        got = jax.grad(
            lambda x, w, dtype=dtype: (layers.linear(x.astype(dtype), w) * slope).sum(), (0, 1)
        )(x, weight)
        want = jax.grad(lambda x, w: ((x @ w.T) * slope).sum(), (0, 1))(x, weight)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())


def test_bfloat16_forward_close_to_float32():
    want, (config, model) = vectors("qwen3_5_dense"), golden_model("qwen3_5_dense")
    run = jitted(forward.forward, config, compute_dtype=jnp.bfloat16, remat=False)
    hidden = run(model, padded(want["short_ids"], 64)).hidden
    got = forward.logits(model, hidden[0, :24], jnp.bfloat16)
    # The rms difference of the reference implementation's own bfloat16 run is 0.1.
    assert np.sqrt(np.mean((got - want["short_logits"]) ** 2)) < 0.1


def spec_outputs(q, k, v, log_decay, beta):
    state, outputs = np.zeros((1, 2, 16, 8), np.float32), []
    for t in range(q.shape[1]):
        state, out = spec.step(state, q[:, t], k[:, t], v[:, t], log_decay[:, t], beta[:, t])
        outputs.append(out)
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize("repeats", [1, 64], ids=["different keys", "one key"])
def test_chunked_gated_delta_and_gradients_match_recurrence(repeats):
    """If one key repeats without decay, powers of A would reach 10^17 before they cancel."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 128, 2, 16)).astype(np.float32) for _ in range(2))
    k = np.repeat(k[:, ::repeats], repeats, axis=1)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((1, 128, 2, 8)).astype(np.float32)
    log_decay = -np.abs(rng.standard_normal((1, 128, 2))).astype(np.float32) / repeats**2
    beta = rng.uniform(0.9 if repeats > 1 else 0, 1, (1, 128, 2)).astype(np.float32)
    inputs = tuple(map(jnp.asarray, (q, k, v, log_decay, beta)))

    def one_by_one(*inputs):
        empty = jnp.zeros((1, 2, 16, 8))
        steps = tuple(jnp.moveaxis(x, 1, 0) for x in inputs)
        scanned = jax.lax.scan(lambda state, token: ops.step(state, *token), empty, steps)
        return jnp.moveaxis(scanned[1], 0, 1)

    want = spec_outputs(*(np.asarray(x) for x in inputs))
    # Float32 on both sides, outputs up to 3.
    np.testing.assert_allclose(jitted(gated_delta.chunked)(*inputs), want, rtol=0, atol=2e-5)
    weights = jnp.asarray(rng.standard_normal(v.shape), jnp.float32)
    slopes = [
        jitted(jax.grad(lambda x, f=f: (f(*x) * weights).sum()))(inputs)
        for f in (one_by_one, gated_delta.chunked)
    ]
    for ours, theirs in zip(slopes[1], slopes[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def small_llama():
    config = config_from_dict(tiny_config("llama", nested=False, with_mtp=False, tied=True))
    return config, init.fresh_model(config, 0, False)


@pytest.mark.parametrize("fresh", [small_llama, small_hybrid])
def test_fresh_model_has_all_parameters_and_uniform_loss(fresh):
    config, model = fresh()
    shapes = sorted(x.shape for x in jax.tree.leaves(model))
    assert shapes == sorted(p.shape for p in parameters(config, config.has_mtp))
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, config.vocab)
    how = {"compute_dtype": jnp.float32, "mtp_weight": 0.3, "balance_weight": 0.1, "remat": False}
    run = jitted(losses.language_model_loss, config, **how)
    metrics = run(model, tokens, jnp.ones((2, 64)))[1]
    # Scores of a fresh model are small, so every token is about as likely as another.
    assert abs(metrics["cross_entropy"] - np.log(config.vocab)) < 0.5


def test_hybrid_loss_decreases_after_gradient_step():
    config, model = small_hybrid()
    tokens = jax.random.randint(jax.random.key(0), (1, 32), 0, config.vocab)

    def loss(model):
        mask = jnp.ones((1, 32))
        how = (jnp.float32, 0.3, 0.0, True)
        return losses.language_model_loss(config, model, tokens, mask, *how)

    before, after = lowered(loss, model)
    assert after < before


def test_loss_mask_weighs_each_label():
    config, model = small_llama()
    tokens = jax.random.randint(jax.random.key(0), (1, 64), 0, config.vocab)
    mask = np.zeros((1, 64), np.float32)
    mask[0, [7, 20]] = 1, 0.5
    how = {"compute_dtype": jnp.float32, "remat": False}
    run = jitted(losses.language_model_loss, config, mtp_weight=0.0, balance_weight=0.0, **how)
    metrics = run(model, tokens, jnp.asarray(mask))[1]
    hidden = jitted(forward.forward, config, **how)(model, tokens).hidden[0]
    scores = forward.logits(model, hidden, jnp.float32)
    each = -jax.nn.log_softmax(scores)[np.arange(63), tokens[0, 1:]]  # of tokens 1 and on
    want = (each[6] + 0.5 * each[19]) / 1.5
    np.testing.assert_allclose(metrics["cross_entropy"], want, rtol=1e-5)
