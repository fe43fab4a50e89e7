"""Dummy weights: equal bits on every backend, realistic sizes, no files."""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl import dummy_weights as jax_dummy
from jax_impl import weights as jax_weights
from shared.drafts.checkpoint import check_head, draft_ids, dummy_head, head_parameters
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig
from shared.models.dummy_elements import (
    InitSpec,
    hash_u32,
    init_of,
    keys_of,
    parameter_array,
    random_elements,
)
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_folder, stated_encoding
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.model_folder import ModelFolder
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.stacks import single, stack
from shared.spec import experts, layer_weights, linear
from tests.support.tiny_heads import tiny_head_config
from tests.support.tiny_models import EXPERTS, FAMILIES, tiny_model
from tests.support.weight_formats import w8a16_of
from torch_impl import dummy_weights as torch_dummy
from torch_impl import weights as torch_weights

SHAPES = Path(__file__).resolve().parents[2] / "bench" / "shapes"
CPU = torch.device("cpu")
HEADS = dict.fromkeys(
    (f"qwen3-8b-{each}" for each in ("eagle3", "dflash", "dspark", "dflash2")), "qwen3-8b"
)
HEADS |= {f"{name}-eagle3": name for name in ("llama-3.1-8b", "qwen3-32b")}
HEADS |= {"qwen3.5-9b-dflash": "qwen3.5-9b", "gemma-4-31b-assistant": "gemma-4-31b"}
TARGETS = sorted({path.name for path in SHAPES.iterdir()} - HEADS.keys())


def tiny_config(family: str) -> ModelConfig:
    return tiny_model(family, 0)[0]


def tiny_parameters(family: str) -> list[Parameter]:
    config = tiny_config(family)
    return parameters(config, config.has_mtp)


def in_torch(parameter: Parameter, law: InitSpec, dtype: str) -> np.ndarray:
    made = torch_dummy.parameter_array(parameter, law, getattr(torch, dtype), CPU)
    return made.float().numpy()


def in_jax(parameter: Parameter, law: InitSpec, dtype: str) -> np.ndarray:
    made = jax_dummy.parameter_array(parameter, law, np.dtype(dtype), jax.devices("cpu")[0])
    return np.asarray(made.astype(np.float32))


MADE = {"torch": in_torch, "jax": in_jax}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, "glm4_moe"])
def test_dummy_parameter_array_bitwise_equal(family, dtype, made):
    laws = set()
    for parameter in tiny_parameters(family):
        law = init_of(parameter)
        if (law, parameter.shape) in laws:
            continue  # saves a compilation
        laws.add((law, parameter.shape))
        want = parameter_array(parameter, law)
        found = made(parameter, law, dtype)
        np.testing.assert_array_equal(found, want.astype(KINDS[dtype]), parameter)


def test_dummy_parameter_in_pieces_bitwise_equal(monkeypatch):
    parameter = single("mlp", "mlp", (37, 11))
    law = init_of(parameter)
    monkeypatch.setattr(torch_dummy, "PIECE", 100)
    np.testing.assert_array_equal(
        in_torch(parameter, law, "float32"), parameter_array(parameter, law)
    )


def test_dummy_elements_past_2_31_bitwise_equal():
    places = np.array([2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    law, key = InitSpec.of_matrix(1.0), np.uint32(0xDEADBEEF)
    want = random_elements(law, key, places)
    as_words = torch.from_numpy(places.view(np.int32))
    key_word = torch.tensor(int(key) - 2**32, dtype=torch.int32)
    np.testing.assert_array_equal(torch_dummy.elements(law, key_word, as_words).numpy(), want)
    found = jax_dummy.elements(law, jax.numpy.uint32(key), jax.numpy.asarray(places))
    np.testing.assert_array_equal(found, want)


def test_dummy_definition_equals_recorded_values():
    places = np.arange(4, dtype=np.uint32)
    assert hash_u32(places).tolist() == [0, 1364076727, 821347078, 2247144487]
    parameter = stack("mlp.down", ["a", "b"], {"w": (2, 3)})
    assert keys_of(parameter).tolist() == [1601088520, 678010014]


def test_dummy_values_are_uniform_and_uncorrelated():
    matrix = single("matrix", "matrix", (512, 1024))
    found = parameter_array(matrix, init_of(matrix)) * 32  # sqrt(1024)
    assert abs(found.mean()) < 0.01
    assert found.std() == pytest.approx(1, abs=0.01)
    assert np.abs(found).max() < np.sqrt(3)
    assert len(np.unique(found)) > 0.9 * found.size
    layers = parameter_array(stack("s", list("ab"), {"w": (64, 64)}), InitSpec.of_matrix(1.0))
    assert abs(np.corrcoef(layers[0].ravel(), layers[1].ravel())[0, 1]) < 0.05


@dataclass(frozen=True)
class Range:
    low: float
    high: float


RANGES = {
    ("qwen3", "final_norm"): Range(0.875, 1.125),
    ("qwen3_5", "final_norm"): Range(-0.125, 0.125),
    ("qwen3_5", "gated_delta.norm"): Range(0.875, 1.125),
    ("qwen3_5", "gated_delta.a_log"): Range(-2.75, 1.25),
    ("qwen3_5", "gated_delta.dt_bias"): Range(-3.0, 1.0),
}


@pytest.mark.parametrize(("family", "name"), RANGES)
def test_dummy_norms_and_decays_in_trained_range(family, name):
    config, wanted = tiny_config(family), RANGES[family, name]
    parameter = next(p for p in parameters(config, False) if p.name == name)
    found = parameter_array(parameter, init_of(parameter))
    assert wanted.low < found.min() <= found.max() < wanted.high


KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", KINDS)
def test_backends_load_dummy_checkpoint_values(dtype):
    config = tiny_config("qwen3_5")
    checkpoint, seen = DummyCheckpoint.of_model(config, None), []
    loaded = torch_weights.load(checkpoint, config, True, dtype, CPU, seen.append, {})
    kind, device = KINDS[dtype], jax.devices("cpu")[0]
    in_jax = jax_weights.load(checkpoint, config, True, kind, device, seen.append, {})
    wanted = parameters(config, True)
    assert (
        sum(seen) == 2 * checkpoint.num_bytes(wanted) == 2 * 2 * sum(prod(p.shape) for p in wanted)
    )
    want = {p.name: checkpoint.load(p, kind) for p in wanted}
    assert want["gated_delta.a_log"].dtype == np.float32
    delta = loaded.layers[0].mixer
    pairs = [
        (loaded.embed, in_jax.alone["embed"], want["embed"]),
        (loaded.final_norm, in_jax.alone["final_norm"], want["final_norm"].astype(np.float32) + 1),
        (delta.a_log, in_jax.stacks["gated_delta.a_log"][0], want["gated_delta.a_log"][0]),
    ]
    for of_torch, of_jax, one in pairs:
        np.testing.assert_array_equal(of_torch.float().numpy(), one.astype(np.float32))
        np.testing.assert_array_equal(np.asarray(of_jax[...], np.float32), one.astype(np.float32))


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("vocab", [1024, 32000])
def test_dummy_logits_have_entropy_of_trained_models(vocab, temperature):
    head = single("lm_head", "lm_head", (vocab, 256))
    weights, entropy = parameter_array(head, init_of(head)), []
    for row in np.random.default_rng(0).standard_normal((200, 256), np.float32):
        logits = weights @ (row / np.sqrt(np.square(row).mean())) / temperature
        probs = np.exp(logits - logits.max()) + 1e-30
        probs /= probs.sum()
        entropy.append(-np.sum(probs * np.log(probs)))
    assert 1 < np.mean(entropy) < 2


@pytest.mark.parametrize("family", EXPERTS)
def test_dummy_routers_spread_rows_over_experts(family):
    config = tiny_config(family)
    checkpoint, sizes = DummyCheckpoint.of_model(config, None), config.experts
    arrays = {p.name: checkpoint.load(p, np.float32) for p in parameters(config, False)}
    rows = np.random.default_rng(0).standard_normal((256, config.hidden), np.float32)
    layer = layer_weights.experts_of(config, arrays, "experts.", 0)
    logits = linear.product_float32(rows, layer.router)[:, : sizes.num_experts]
    ids = experts.choose(logits, sizes, layer.score_bias).ids
    counts = np.bincount(ids.ravel(), minlength=sizes.num_experts)
    assert counts.min() > 0.3 * ids.size / sizes.num_experts
    assert len({tuple(row) for row in ids.tolist()}) > 10


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_dummy_head_has_kind_and_vocabulary_map(kind):
    target = tiny_config("qwen3")
    config = DraftConfig.from_dict(tiny_head_config(target, kind), target)
    checkpoint = dummy_head(config)
    assert check_head(checkpoint, config) == head_parameters(config, checkpoint.names)
    if config.has_draft_vocab:
        ids = draft_ids(checkpoint, config)
        assert ids[0] == 0
        assert 0.9 * target.vocab < ids[-1] < target.vocab


BILLIONS = {
    "glm-4.7-flash": 30,
    "glm-4.7-flash-fp8": 30,
    "deepseek-v3-8-layers-fp8": 62,
    "nemotron-3-nano": 31.6,
    "nemotron-3-nano-fp8": 31.6,
}
"""Parameters of shapes without a size in their name; for layers of DeepSeek-V3, their sum."""


@pytest.mark.parametrize("name", TARGETS)
def test_public_model_shapes_can_be_served(name):
    config = config_from_folder(SHAPES / name)
    billions = sum(prod(p.shape) for p in parameters(config, False)) / 1e9
    stated = re.search(r"-([0-9.]+)b", name)
    assert billions == pytest.approx(float(stated[1]) if stated else BILLIONS[name], rel=0.1)
    encoding = stated_encoding(ModelFolder(SHAPES / name).config)
    assert isinstance(encoding, FP8Encoding) == name.endswith("-fp8")
    checkpoint = DummyCheckpoint.of_model(config, encoding)
    assert checkpoint.has_mtp(config) == name.startswith(("qwen3.5", "glm", "deepseek", "nemotron"))
    kept = w8a16_of(checkpoint, parameters(config, False))
    is_packed = encoding is not None
    assert ("experts.down" in kept) == (is_packed and config.experts is not None)
    has_parallel = name.endswith("-int4") and config.experts is not None
    assert ("experts.parallel_gate_up" in kept) == has_parallel
    assert ("mlp.gate_up" in kept) == (is_packed and config.dense is not None)


@pytest.mark.parametrize("name", HEADS)
def test_public_head_shapes_fit_their_targets(name):
    target = config_from_folder(SHAPES / HEADS[name])
    config = DraftConfig.from_folder(SHAPES / name, target)
    check_head(dummy_head(config), config)
    assert config.kind.lower() == name.rsplit("-", 1)[-1]
    assert {path.name for path in (SHAPES / name).iterdir()} == {"config.json"}
    stated = json.loads((SHAPES / name / "config.json").read_text())
    assert stated.get("text_config", stated)["vocab_size"] == target.vocab
