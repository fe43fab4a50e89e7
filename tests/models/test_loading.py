"""Loading on both backends: piecewise reads equal whole reads."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jax_impl import weights as jax_weights
from jax_impl.ops.moe import experts
from shared.models import checkpoint as checkpoint_module
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.models.stacks import single
from tests.support.op_records import leaves
from tests.support.tiny_models import write_tiny
from torch_impl import weights as torch_weights

FILE = "model.safetensors"
GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(params=KINDS)
def stored(request, tmp_path) -> tuple[ModelConfig, Checkpoint]:
    """A checkpoint with tensors of one dtype."""
    config = write_tiny(tmp_path, "qwen3_5", 0)
    kind = KINDS[request.param]
    tensors = {name: x.astype(kind) for name, x in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    return config, open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_load_reads_parameters_in_pieces(stored, dtype, monkeypatch):
    config, checkpoint = stored
    whole = {p.name: checkpoint.load(p, KINDS[dtype]) for p in parameters(config, True)}
    want = torch_weights.from_arrays(
        config, {name: x.astype(np.float32) for name, x in whole.items()}, dtype, CPU
    )
    monkeypatch.setattr(Checkpoint, "load", None)
    monkeypatch.setattr(checkpoint_module, "LARGE", 128)
    got = torch_weights.load(checkpoint, config, True, dtype, CPU, lambda count: None, {})
    pairs = list(zip(leaves(torch.Tensor, got), leaves(torch.Tensor, want), strict=True))
    assert len(pairs) > 30
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_load_reads_large_parameters_in_pieces(stored, dtype, monkeypatch):
    config, checkpoint = stored
    device, kind, whole = jax.devices("cpu")[0], KINDS[dtype], []
    want = jax_weights.load(checkpoint, config, True, kind, device, lambda count: None, {})
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda *a: (whole.append(a[1]), load(*a))[1])
    monkeypatch.setattr(jax_weights, "LARGE", 0)
    monkeypatch.setattr(checkpoint_module, "LARGE", 128)
    got = jax_weights.load(checkpoint, config, True, kind, device, lambda count: None, {})
    assert not whole
    pairs = list(zip(*(jax.tree.leaves(each) for each in (got, want)), strict=True))
    assert len(pairs) > 15
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_single_tensor_parameter_loads_without_copy(tmp_path):
    embed = single("embed", "embed_tokens.weight", (20_000, 32))
    (tmp_path / "config.json").touch()
    save_file({embed.sources[0].name: np.ones(embed.shape, np.float32)}, tmp_path / FILE)
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    loaded = checkpoint.load(embed, np.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.nbytes == 4 * 20_000 * 32
    assert peak < 1.5 * loaded.nbytes


def test_large_tensor_is_read_in_row_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "LARGE", 1000 * 32)
    embed = single("embed", "embed_tokens.weight", (20_500, 32))
    (tmp_path / "config.json").touch()
    rows = np.random.default_rng(0).standard_normal(embed.shape, np.float32)
    save_file({embed.sources[0].name: rows}, tmp_path / FILE)
    checkpoint, seen, read = open_checkpoint(tmp_path), [], []
    tracemalloc.start()
    for at, values in checkpoint.pieces(embed, read.append):
        seen.append(np.array_equal(values, rows[at]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == [True] * 21
    assert sum(read) == checkpoint.num_bytes([embed]) == rows.nbytes
    assert peak < 0.2 * rows.nbytes


@pytest.mark.parametrize("folder", ["glm4_moe", "qwen3_5_moe", "qwen3_moe_fp8"])
def test_expert_layouts_load_into_stacks(folder, monkeypatch):
    """Covers separate, stacked, shared and dequantised FP8 experts."""
    config, checkpoint = config_from_folder(GOLDEN / folder), open_checkpoint(GOLDEN / folder)
    wanted = parameters(config, config.has_mtp)
    whole = {p.name: checkpoint.load(p, ml_dtypes.bfloat16) for p in wanted}
    monkeypatch.setattr(jax_weights, "LARGE", 0)
    given, device = (config, config.has_mtp), jax.devices("cpu")[0]
    in_jax = jax_weights.load(
        checkpoint, *given, ml_dtypes.bfloat16, device, lambda count: None, {}
    )
    in_torch = torch_weights.load(checkpoint, *given, "bfloat16", CPU, lambda count: None, {})
    names = [name for name in whole if ".shared" not in name and "experts." in name]
    assert len(names) >= 3
    for name in names:
        np.testing.assert_array_equal(np.asarray(in_jax.stacks[name]), whole[name])
    places = [i for i, each in enumerate(config.layers) if each.mlp.kind == "experts"]
    for place, number in enumerate(places):
        feed = in_torch.layers[number].feed
        for name in ("router", "gate_up", "down"):
            got = getattr(feed, name).values.float().numpy()
            want = whole[f"experts.{name}"][place].astype(np.float32)
            np.testing.assert_array_equal(got, want, err_msg=name)


def test_jax_stacked_experts_bitwise_equal():
    config = config_from_folder(GOLDEN / "glm4_moe")
    checkpoint, device = open_checkpoint(GOLDEN / "glm4_moe"), jax.devices("cpu")[0]
    loaded = jax_weights.load(checkpoint, config, False, np.float32, device, lambda count: None, {})
    alone, stacked = (jax_weights.weights_of(config, loaded, each) for each in (False, True))
    x = np.random.default_rng(0).standard_normal((3, config.hidden), np.float32)
    got = [experts.experts(x, config.experts, each.layers[2].feed) for each in (alone, stacked)]
    np.testing.assert_array_equal(*got)
    other = experts.experts(x, config.experts, stacked.layers[1].feed)
    assert np.abs(np.asarray(other - got[0])).max() > 0.1
