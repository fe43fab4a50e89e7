"""LoRA adapters in peft's files: rejections, and equality with merged weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.lora import Adapter
from shared.models.lora_shapes import AdapterShapes, adaptable, base_weights
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import parameters
from shared.models.weight_files import CheckpointError
from shared.spec import cache_pools, model
from shared.spec.lora import BatchAdapters
from tests.support.golden_models import NUM_PAGES, PAGE_SIZE, TABLE
from tests.support.lora_files import (
    ROOT,
    batch_adapters,
    module_names,
    write_adapter,
    write_merged,
)

GOLDEN = Path(__file__).parents[1] / "golden"
BASES = {
    "qwen3_lora": "qwen3",
    "qwen3_lora_part": "qwen3",
    "qwen3_lora_dora": "qwen3",
    "qwen3_moe_lora": "qwen3_moe",
}
FAMILIES = (
    *("bamba", "deepseek_v3", "falcon_h1", "gemma4", "gemma4_moe", "granitemoehybrid"),
    *("llama_bias", "minimax_m2", "nemotron_h", "olmo3", "phi3", "qwen3", "qwen3_5_dense"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next"),
)
"""Golden folders with all kinds of parameters that may have adapters."""


def prompt_logits(
    folder: Path, tokens: np.ndarray, lora: BatchAdapters | None = None
) -> np.ndarray:
    config = config_from_folder(folder)
    weights = load_all(folder, config, False)
    pools = cache_pools.new_pools(config, NUM_PAGES, PAGE_SIZE)
    state, starts = cache_pools.new_state(config, 1), np.array([0, len(tokens)])
    first = np.zeros(1, int)
    passed, _ = model.prefill(
        config, weights, pools, state, tokens, starts, first, TABLE, None, None, {}, lora
    )
    return model.logits(config, weights, passed.hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapted_prompt_equals_merged_checkpoint(family: str, tmp_path: Path) -> None:
    base = GOLDEN / family
    modules = module_names(base, parameters(config_from_folder(base), False))
    folder = write_adapter(tmp_path / "adapter", base, modules)
    tokens = np.load(base / "vectors.npz")["short_ids"]
    got = prompt_logits(base, tokens, checked(folder, base))
    want = prompt_logits(write_merged(tmp_path / "merged", base, folder), tokens)
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(want - prompt_logits(base, tokens)).max() > 0.1


@pytest.mark.parametrize("folder", BASES)
def test_adapted_prompt_matches_golden(folder: str) -> None:
    base, want = GOLDEN / BASES[folder], np.load(GOLDEN / folder / "vectors.npz")
    got = prompt_logits(base, want["short_ids"], checked(GOLDEN / folder, base))
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got, want["short_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", BASES)
@pytest.mark.parametrize("count", [2, 4])
def test_adapter_shards_follow_base_shards(folder: str, count: int) -> None:
    base = GOLDEN / BASES[folder]
    config, read = config_from_folder(base), base_weights(open_checkpoint(base))
    adapter = Adapter(GOLDEN / folder)
    for parameter in adaptable(parameters(config, False)):
        whole = adapter.arrays(AdapterShapes(parameter, 4), read)
        for rank in range(count):
            shard = parameter.shard(rank, count)
            own = adapter.arrays(AdapterShapes(shard, 4), read)
            np.testing.assert_array_equal(own.b, shard_array(shard, whole.b))
            factors = shard_array(shard, whole.factors[..., None])[..., 0]
            np.testing.assert_array_equal(own.factors, factors)
            np.testing.assert_array_equal(own.a, whole.a)
            np.testing.assert_array_equal(own.scales, whole.scales)


def test_adapter_without_modules_of_parameter_has_zeros() -> None:
    base = GOLDEN / "qwen3"
    wanted = adaptable(parameters(config_from_folder(base), False))
    adapter = Adapter(GOLDEN / "qwen3_lora_part")
    found = {parameter.name for parameter in wanted if adapter.adapts(parameter)}
    assert found == {"attention.inputs", "mlp.down"}
    inputs = next(x for x in wanted if x.name == "attention.inputs")
    arrays = adapter.arrays(AdapterShapes(inputs, 4), base_weights(open_checkpoint(base)))
    adapted_layers = np.flatnonzero(arrays.b.any(axis=(1, 2)))
    assert adapted_layers.tolist() == [1, 2, 6]
    by_part = arrays.a.reshape(8, 3, 4, -1).any(axis=(0, 2, 3))
    assert by_part.tolist() == [True, False, True]  # q, k, v
    # rsLoRA: alpha 8 and 3 over the square root of rank 4.
    assert set(arrays.scales[1].tolist()) == {0.0, 4.0, 1.5}


def test_version_is_digest_of_contents(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "qwen3_lora", folder)
    assert Adapter(folder).version == Adapter(GOLDEN / "qwen3_lora").version
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[min(tensors)][0, 0] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    changed = Adapter(folder).version
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    versions = {changed, Adapter(folder).version, Adapter(GOLDEN / "qwen3_lora").version}
    assert len(versions) == 3


SETTINGS: dict[str, tuple[Any, str]] = {
    "peft_type": ("IA3", "peft_type 'IA3' is not supported"),
    "bias": ("all", "bias: 'all' is not supported"),
    "lora_bias": (True, "lora_bias is not supported"),
    "fan_in_fan_out": (True, "fan_in_fan_out is not supported"),
    "init_lora_weights": ("pissa", "init_lora_weights: 'pissa' is not supported"),
    "modules_to_save": (["lm_head"], "modules_to_save is not supported"),
    "trainable_token_indices": ([3], "trainable_token_indices is not supported"),
    "alora_invocation_tokens": ([1, 2], "alora_invocation_tokens is not supported"),
    "r": (0, "r in adapter_config.json must be a positive integer"),
    "lora_alpha": ("big", "lora_alpha in adapter_config.json must be a number"),
    "rank_pattern": ({"q_(": 2}, "rank_pattern has the invalid pattern"),
    "alpha_pattern": ({"q_proj": "two"}, "alpha_pattern must have positive ranks or numbers"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_unsupported_adapter_setting_raises(field: str, tmp_path: Path) -> None:
    value, message = SETTINGS[field]
    folder = write_adapter(tmp_path, GOLDEN / "qwen3", [Q_PROJ], **{field: value})
    with pytest.raises(CheckpointError, match="^adapter .*" + _escaped(message)):
        Adapter(folder)


def _escaped(message: str) -> str:
    return message.replace("(", r"\(").replace("[", r"\[")


Q_PROJ = "model.layers.0.self_attn.q_proj"
A, B = (f"{ROOT}{Q_PROJ}.lora_{x}.weight" for x in "AB")


def renamed(name: str, tensors: dict[str, np.ndarray]) -> None:
    for key in tuple(tensors):
        tensors[key.replace(Q_PROJ, name)] = tensors.pop(key)


def added(name: str, tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{ROOT}{name}"] = np.zeros(4, np.float32)


def cut(key: str, tensors: dict[str, np.ndarray]) -> None:
    tensors[key] = np.ascontiguousarray(tensors[key][1:])


def broken(tensors: dict[str, np.ndarray]) -> None:
    tensors[B][0, 0] = np.nan


TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], None], str]] = {
    "embedding": (partial(renamed, "model.embed_tokens"), "embeddings and LM heads are not"),
    "lm_head": (partial(renamed, "lm_head"), "embeddings and LM heads are not supported"),
    "vision": (
        partial(renamed, "model.visual.blocks.0.attn.qkv"),
        "vision and audio encoders are not supported",
    ),
    "other module": (
        partial(renamed, "model.layers.9.self_attn.q_proj"),
        "not an adaptable module",
    ),
    "MTP layer": (partial(renamed, "mtp.layers.0.self_attn.q_proj"), "not an adaptable module"),
    "bias": (partial(added, f"{Q_PROJ}.lora_B.bias"), "lora_B.bias, which is not supported"),
    "magnitude": (partial(added, f"{Q_PROJ}.lora_magnitude_vector"), "use_dora"),
    "inputs": (partial(cut, B), "lora_B.weight must have shape \\[64, 4\\], got \\[63, 4\\]"),
    "rank": (partial(cut, A), "lora_A.weight must have shape \\[4, 32\\], got \\[3, 32\\]"),
    "missing": (lambda tensors: tensors.__delitem__(B), "lora_B.weight must .* got none"),
    "NaN": (broken, "lora_B.weight has values that are not finite"),
    "float64": (
        lambda tensors: tensors.update({A: tensors[A].astype(np.float64)}),
        "stores .* as F64; save it in one of F32, F16, BF16",
    ),
}


def checked(folder: Path, base: Path) -> BatchAdapters:
    config, adapter = config_from_folder(base), Adapter(folder)
    adapter.check(parameters(config, False), config.name)
    return batch_adapters([folder], base, [1])


@pytest.mark.parametrize("fault", TENSORS)
def test_unsupported_adapter_tensor_raises(fault: str, tmp_path: Path) -> None:
    edit, message = TENSORS[fault]
    base = GOLDEN / "qwen3"
    folder = write_adapter(tmp_path, base, [Q_PROJ], edit=edit)
    with pytest.raises(CheckpointError, match=message):
        checked(folder, base)


def test_adapter_of_transposed_experts_raises(tmp_path: Path) -> None:
    base = GOLDEN / "gpt_oss_bf16"
    named = {x.name: x for x in parameters(config_from_folder(base), False)}
    experts, outputs, inputs = named["experts.gate_up"].pieces[0][0].shape

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors.clear()
        of_experts = f"{ROOT}model.layers.0.mlp.experts.lora_"
        tensors[f"{of_experts}A.weight"] = np.zeros((experts * 4, inputs), np.float32)
        tensors[f"{of_experts}B.weight"] = np.zeros((outputs, experts * 4), np.float32)

    folder = write_adapter(tmp_path, base, [Q_PROJ], edit=edit)
    with pytest.raises(CheckpointError, match="not supported with DoRA or transposed experts"):
        checked(folder, base)


def test_dora_of_kv_b_proj_raises(tmp_path: Path) -> None:
    base, module = GOLDEN / "deepseek_v3", "model.layers.0.self_attn.kv_b_proj"
    folder = write_adapter(tmp_path, base, [module], use_dora=True)
    with pytest.raises(CheckpointError, match="kv_b_proj, which is not supported with DoRA"):
        checked(folder, base)


def test_missing_adapter_file_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapter_config.json"):
        Adapter(tmp_path)
    shutil.copy(GOLDEN / "qwen3_lora" / "adapter_config.json", tmp_path)
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors"):
        Adapter(tmp_path)


@pytest.mark.parametrize("folder", BASES)
def test_adapter_memory_is_sum_of_arrays(folder: str) -> None:
    base = GOLDEN / BASES[folder]
    config = config_from_folder(base)
    adapter, read = Adapter(GOLDEN / folder), base_weights(open_checkpoint(base))
    for parameter in adaptable(parameters(config, False)):
        shapes = AdapterShapes(parameter, 16)
        arrays = adapter.arrays(shapes, read)
        made = {x.name: getattr(arrays, x.name).shape for x in fields(arrays)}
        assert made == dict(shapes.arrays)
        assert shapes.num_bytes(4) == sum(getattr(arrays, x).nbytes for x in made)
