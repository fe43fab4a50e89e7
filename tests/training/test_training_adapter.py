"""LoRA adapters in training: peft's files, the adapted model, and the losses of both parts."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_impl.train import main
from jax_impl.training import losses, tasks
from jax_impl.training.adapter import (
    ALL_LINEAR,
    LoraAdapter,
    LoraPart,
    LoraSettings,
    adapted,
    parts_of,
    save_adapter,
)
from jax_impl.training.nnx_modules import ModelModule, named
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.lora import Adapter
from shared.models.lora_shapes import AdapterShapes, adaptable, base_weights
from shared.models.parameters import parameters
from tests.support.tiny_models import write_tiny

RANK = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model with an MTP layer."""
    folder = tmp_path_factory.mktemp("base")
    write_tiny(folder, "qwen3_5", 3)
    return folder


def made(
    base: Path, config: ModelConfig, target_modules: tuple[str, ...] = ()
) -> tuple[LoraSettings, list[LoraPart], LoraAdapter]:
    """A random adapter with numbers that bfloat16 represents."""
    settings = LoraSettings(rank=RANK, alpha=6, target_modules=target_modules or (ALL_LINEAR,))
    parts = parts_of(parameters(config, True), settings)
    adapter, rng = LoraAdapter(parts, settings, 0), np.random.default_rng(1)
    for stack in (adapter.a, adapter.b):
        for part in parts:
            values = rng.normal(size=stack[part.key][...].shape).astype(ml_dtypes.bfloat16)
            stack[part.key] = nnx.Param(jnp.asarray(values, jnp.float32))
    return settings, parts, adapter


def model_of(base: Path, config: ModelConfig) -> ModelModule:
    return tasks.load_model(base, config, True, np.float32)


@pytest.mark.parametrize("target_modules", [(), ("q_proj", "v_proj", "in_proj_a")])
def test_saved_adapter_equals_adapted_model(
    target_modules: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    config = write_tiny(tmp_path / "same", "qwen3_5", 3)
    settings, parts, adapter = made(base, config, target_modules)
    got = named(adapted(model_of(base, config), adapter, parts, settings.scale))
    save_adapter(tmp_path / "adapter", base, "model.", adapter, parts, settings)
    opened, read = Adapter(tmp_path / "adapter"), base_weights(open_checkpoint(base))
    whole, weights = parameters(config, True), load_all(base, config, True)
    opened.check(whole, "qwen3_5")
    num_changed = 0
    for parameter in adaptable(whole):
        shapes, want = AdapterShapes(parameter, RANK), weights[parameter.name]
        arrays = opened.arrays(shapes, read)
        scaled, first = arrays.scales[..., None] * arrays.a, 0
        for number, outputs in enumerate(shapes.parts):
            rows = slice(first, first + outputs)
            a = scaled[..., number * RANK : (number + 1) * RANK, :]
            change = arrays.b[..., rows, :] @ a
            want[..., rows, :] += change if parameter.stacked else change[0]
            first += outputs
        num_changed += opened.adapts(parameter)
        # Float32 on both sides: only the order of the sums over the rank differs.
        np.testing.assert_allclose(got[parameter.name], want, rtol=0, atol=1e-5)
    assert num_changed == (len(adaptable(whole)) if not target_modules else 3)


def test_new_adapter_changes_no_weight(base: Path, tmp_path: Path) -> None:
    config = write_tiny(tmp_path / "same", "qwen3_5", 3)
    settings = LoraSettings(rank=RANK, alpha=6, target_modules=(ALL_LINEAR,))
    parts = parts_of(parameters(config, True), settings)
    adapter, model = LoraAdapter(parts, settings, 0), model_of(base, config)
    changed = named(adapted(model, adapter, parts, settings.scale))
    assert all(np.array_equal(changed[name], array) for name, array in named(model).items())


def test_mtp_loss_trains_only_mtp_modules(base: Path, tmp_path: Path) -> None:
    config = write_tiny(tmp_path / "same", "qwen3_5", 3)
    settings, parts, adapter = made(base, config)
    model = model_of(base, config)
    graph, params = nnx.split(adapter)
    tokens = jnp.asarray(np.random.default_rng(2).integers(2, 250, (1, 64)), jnp.int32)

    def loss(params: nnx.State, mtp_weight: float) -> jax.Array:
        merged = adapted(model, nnx.merge(graph, params), parts, settings.scale / 100)
        mask = jnp.ones(tokens.shape)
        how = {"compute_dtype": jnp.float32, "mtp_weight": mtp_weight, "depth": 2, "remat": False}
        return losses.adapter_loss(config, merged, tokens, mask, **how)[0]

    def gradients(params: nnx.State) -> list:
        return [jax.grad(loss)(params, weight) for weight in (0.0, 1.0)]

    without, both = (nnx.to_pure_dict(x) for x in jax.jit(gradients)(params))
    for part in parts:
        pair = [np.asarray(each["b"][part.key]) for each in (without, both)]
        if part.parameter.name.startswith("mtp."):
            assert not pair[0].any()
            assert pair[1].any()
        else:
            # The two programs may order sums differently.
            np.testing.assert_allclose(pair[1], pair[0], rtol=1e-4, atol=1e-5)
            assert pair[0].any()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--lora-rank", "4", "--draft", "mtp"], "--draft is not supported with --lora-rank"),
        (["--lora-rank", "4", "--start", "x"], "--start is not supported with --lora-rank"),
        (["--draft", "mtp", "--lora-alpha", "4"], "--lora-alpha requires --target and --lora-rank"),
        (["--lora-rank", "0"], "--lora-rank must be positive"),
        (["--lora-rank", "4", "--lora-target-modules", "o"], "--lora-target-modules o is not a"),
    ],
)
def test_adapter_training_rejects_invalid_flags(
    words: list[str], fault: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n', encoding="utf-8")
    run = ["--target", str(base), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*run, "--steps", "1", *words]) == 2
    assert fault in capsys.readouterr().err
