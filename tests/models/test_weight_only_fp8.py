"""W8A16 on a GPU: packed loading, exact memory plan, equal numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl import platform as jax_platform
from jax_impl import weights as jax_weights
from jax_impl.formats import registry as jax_formats
from jax_impl.ops.gemm import linear as jax_linear
from jax_impl.ops.moe import experts as jax_experts
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.dummy_elements import init_of
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.families import config_from_dict, stated_encoding
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import QuantizedFormat
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameters import parameters
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.memory_plan import plan
from tests.support.files import Stored as Tensors
from tests.support.files import read_stored, write_stored
from tests.support.fp8_files import compressed
from tests.support.op_records import leaves
from tests.support.weight_formats import ON_GPU, w8a16_of
from torch_impl import platform as torch_platform
from torch_impl import weights as torch_weights
from torch_impl.formats import registry as torch_formats
from torch_impl.ops.gemm import linear as torch_linear
from torch_impl.ops.moe import experts as torch_experts

CONFIG: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "qwen3_5_moe" / "config.json").read_text()
)
STATED = json.loads(
    (Path(__file__).parents[1] / "golden" / "qwen3_moe_fp8" / "config.json").read_text()
)["quantization_config"]
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
EXPERTS = {f"{prefix}experts.{x}" for prefix in ("", "mtp.layer.") for x in ("gate_up", "down")}
DENSE = {"attention.inputs", "mtp.layer.attention.inputs"}
KEPT = EXPERTS | DENSE
FILE, BLOCK = "model.safetensors", Granularity.BLOCK
SCALE = "_scale_inv"
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
HALF = ml_dtypes.bfloat16


def write(folder: Path, granularity: Granularity = BLOCK, **sizes: int) -> ModelConfig:
    """Writes a checkpoint like FP8 releases: separate experts, all projections quantised."""
    text = CONFIG["text_config"] | SIZES | {"num_experts": 4, "num_experts_per_tok": 2} | sizes
    return write_config(folder, CONFIG | {"text_config": text}, granularity)


def write_config(folder: Path, stated: dict[str, Any], granularity: Granularity) -> ModelConfig:
    """Writes an FP8 checkpoint of this config.json with scales of the given granularity."""
    stated = stated | {
        "quantization_config": STATED if granularity is BLOCK else compressed(granularity)
    }
    config = config_from_dict(stated)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    rng, tensors = np.random.default_rng(0), {}
    for parameter in parameters(config, config.has_mtp):
        for source in parameter.sources:
            for each in source.parts or (source,):
                tensors |= stored(rng, each, granularity)
    write_stored(folder / FILE, tensors)
    return config


def stored(rng: np.random.Generator, source: CheckpointTensor, granularity: Granularity) -> Tensors:
    if not fp8.is_quantised(source.name):
        numbers = rng.standard_normal(source.shape, np.float32) / 16
        return {source.name: ("BF16", numbers.astype(HALF))}
    codes = rng.integers(0, 0x7F, source.shape, np.uint8)
    codes |= rng.integers(0, 2, source.shape, np.uint8) << 7
    scales = rng.uniform(1e-4, 3e-4, fp8.scale_shape(source.shape, granularity)).astype(HALF)
    if granularity is Granularity.TENSOR:
        scales = scales.reshape(1)
    return {source.name: ("F8_E4M3", codes), f"{source.name}{SCALE}": ("BF16", scales)}


@pytest.fixture(scope="module", params=list(Granularity), ids=str)
def granularity(request) -> Granularity:
    return request.param


@pytest.fixture(scope="module")
def kept(granularity) -> dict[str, QuantizedFormat]:
    """Formats of the parameters that stay FP8."""
    if granularity is not BLOCK:
        return dict.fromkeys(KEPT, FP8W8A16(Granularity.CHANNEL))
    cut = dict.fromkeys(DENSE, FP8W8A16(BLOCK, by_output=True))
    return cut | dict.fromkeys(EXPERTS, FP8W8A16(BLOCK))


@pytest.fixture(scope="module")
def files(tmp_path_factory, granularity) -> tuple[ModelConfig, Checkpoint]:
    folder = tmp_path_factory.mktemp("fp8")
    config = write(folder, granularity)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, True)
    return config, checkpoint


@pytest.fixture(params=["files", "dummy"])
def model(request, files, granularity) -> tuple[ModelConfig, Stored]:
    config, checkpoint = files
    dummy = DummyCheckpoint.of_model(config, FP8Encoding(granularity))
    return config, checkpoint if request.param == "files" else dummy


def words_in(
    framework: str, checkpoint: Stored, parameter: Parameter, format: QuantizedFormat
) -> tuple[np.ndarray, np.ndarray]:
    if framework == "torch":
        both = torch_formats.read(checkpoint, parameter, format, CPU, lambda count: None)
        return both["values"].numpy(), both["scales"].float().numpy()
    both = jax_formats.read(checkpoint, parameter, format, JAX_CPU, lambda count: None)
    return np.asarray(both["values"]), np.asarray(both["scales"].astype(np.float32))


def test_w8a16_formats_follow_names_blocks_and_scales(files, granularity, kept, tmp_path) -> None:
    config, checkpoint = files
    assert w8a16_of(checkpoint, parameters(config, True)) == kept
    dummy = DummyCheckpoint.of_model(config, FP8Encoding(granularity))
    assert w8a16_of(dummy, parameters(config, True)) == kept
    assert not w8a16_of(DummyCheckpoint.of_model(config, None), parameters(config, True))


def test_scale_dtype_of_experts_follows_scales(granularity, kept, tmp_path) -> None:
    config = write(tmp_path, granularity)
    tensors = read_stored(tmp_path / FILE)
    name, changed = f"layers.1.mlp.experts.2.up_proj.weight{SCALE}", "experts.gate_up"
    wide = replace(kept[changed], scale_dtype="float32")
    without = {name: format for name, format in kept.items() if name != changed}
    for scale, want in ((0.25, kept), (0.3, kept | {changed: wide}), (128, without)):
        scales = np.full(tensors[name][1].shape, scale, np.float32)
        write_stored(tmp_path / FILE, tensors | {name: ("F32", scales)})
        assert w8a16_of(open_checkpoint(tmp_path), parameters(config, True)) == want


def test_mixed_scale_granularities_are_dequantized(tmp_path) -> None:
    config = write(tmp_path)
    tensors = read_stored(tmp_path / FILE)
    name = f"layers.1.mlp.experts.2.up_proj.weight{SCALE}"
    by_channels = np.repeat(tensors[name][1][:, :1], fp8.BLOCK, axis=0)
    write_stored(tmp_path / FILE, tensors | {name: ("BF16", by_channels)})
    found = w8a16_of(open_checkpoint(tmp_path), parameters(config, True))
    assert found.keys() == KEPT - {"experts.gate_up"}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_w8a16_weights_equal_dequantized(model, kept, framework, monkeypatch) -> None:
    config, checkpoint = model
    for parameter in parameters(config, True):
        if parameter.name in KEPT:
            want = checkpoint.load(parameter, HALF).astype(np.float32)
            with monkeypatch.context() as patch:
                patch.setattr(fp8, "apply_scales", None)  # nothing is dequantised
                both = words_in(framework, checkpoint, parameter, kept[parameter.name])
            words, scales = both
            np.testing.assert_array_equal(fp8_w8a16.widened(words, scales), want)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_w8a16_progress_counts_bytes_read(model, framework) -> None:
    config, checkpoint = model
    seen: list[int] = []
    wanted = parameters(config, True)
    load(framework, config, checkpoint, seen)
    assert sum(seen) == checkpoint.num_bytes(wanted)


def load(framework: str, config: ModelConfig, checkpoint: Stored, seen: list[int]) -> Any:
    names = w8a16_of(checkpoint, parameters(config, True))
    if framework == "torch":
        return torch_weights.load(checkpoint, config, True, "bfloat16", CPU, seen.append, names)
    return jax_weights.load(checkpoint, config, True, HALF, JAX_CPU, seen.append, names)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_gpu_memory_plan_counts_w8a16_weights_exactly(model, framework) -> None:
    config, checkpoint = model
    platform = {"torch": torch_platform, "jax": jax_platform}[framework].PLATFORM
    found = {}
    for kind, dtype in (("gpu", "bfloat16"), ("gpu", "float32"), ("cpu", "bfloat16")):
        device = Device(kind, "one", 1 << 34)
        asked = parse(["--dtype", dtype, "--max-total-tokens", "512"])
        drafts = DrafterSpec.of_mtp(config)
        context = replace(ON_GPU, on_gpu=kind == "gpu", dtype=dtype)
        names = choose_formats(parameters(config, True), checkpoint.stored, context)
        assert bool(names) == ((kind, dtype) == ("gpu", "bfloat16"))
        memory = plan(asked, config, drafts, device, platform.costs, lambda dtype, x=names: x)
        assert memory.blueprint.formats == names
        (line,) = (line for line in memory.lines if line.name == "weights")
        found[kind, dtype] = line
    loaded = load(framework, config, checkpoint, [])
    kept = leaves(torch.Tensor, loaded) if framework == "torch" else jax.tree.leaves(loaded)
    line = found["gpu", "bfloat16"]
    assert sum(each.nbytes for each in kept) == line.num_bytes
    assert line.detail.endswith("of them in FP8")
    assert "FP8" not in found["cpu", "bfloat16"].detail
    assert line.num_bytes < 0.7 * found["cpu", "bfloat16"].num_bytes


def test_w8a16_experts_bitwise_equal(model) -> None:
    config, checkpoint = model
    x = np.random.default_rng(1).standard_normal((5, config.hidden), np.float32)
    own, sizes = load("torch", config, checkpoint, []), config.experts
    other = torch_weights.load(checkpoint, config, True, "bfloat16", CPU, lambda count: None, {})
    of_torch = [
        torch_experts.experts(torch.from_numpy(x).bfloat16(), sizes, each.layers[1].feed)
        for each in (own, other)
    ]
    assert own.layers[1].feed.down.values.dtype == torch.int32
    assert torch.equal(*of_torch)
    both = (
        load("jax", config, checkpoint, []),
        jax_weights.load(checkpoint, config, True, HALF, JAX_CPU, lambda count: None, {}),
    )
    for in_stacks in (False, True):
        of_jax = [
            jax_experts.experts(
                x.astype(HALF),
                sizes,
                jax_weights.weights_of(config, each, in_stacks).layers[1].feed,
            )
            for each in both
        ]
        np.testing.assert_array_equal(*of_jax)


def test_dummy_fp8_weights_have_expected_distribution(files, granularity, kept) -> None:
    config, _ = files
    checkpoint, plain = (
        DummyCheckpoint.of_model(config, x) for x in (FP8Encoding(granularity), None)
    )
    differ = set()
    for parameter in parameters(config, True):
        found, want = (each.load(parameter, np.float32) for each in (checkpoint, plain))
        if checkpoint.encoding_of(parameter) is None:
            np.testing.assert_array_equal(found, want)
            continue
        differ.add(parameter.name.rsplit(".", 1)[-1])
        # The scales differ.
        share = found.size / math.prod(
            fp8.scale_shape(found.shape, checkpoint.encoding.granularity)
        )
        assert found.std() == pytest.approx(want.std(), rel=0.9 * (share / found.size) ** 0.5)
        assert abs(found.mean()) < 0.02 * want.std()
        if parameter.name in KEPT:
            words, _ = words_in("torch", checkpoint, parameter, kept[parameter.name])
            codes = fp8_w8a16.unpack(words)
            assert not fp8.has_nan(codes)
            assert set(np.unique(np.abs(fp8.VALUES[codes]))) == set(range(1, 16, 2))
    assert differ == {"inputs", "out", "gate_up", "down"}
    mixed = next(p for p in parameters(config, False) if p.name == "gated_delta.inputs")
    assert checkpoint.encoding_of(mixed) is None
    assert checkpoint.init_spec(mixed) == init_of(mixed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_dequantize_dummy_bitwise_equal(files, granularity, dtype) -> None:
    config, _ = files
    checkpoint = DummyCheckpoint.of_model(config, FP8Encoding(granularity))
    kind, nothing = np.dtype(dtype), lambda count: None
    of_torch = torch_weights.load(checkpoint, config, True, dtype, CPU, nothing, {})
    of_jax = jax_weights.load(checkpoint, config, True, kind, JAX_CPU, nothing, {})
    for parameter in parameters(config, False):
        if checkpoint.encoding_of(parameter) is not None:
            want = checkpoint.load(parameter, kind)
            np.testing.assert_array_equal(np.asarray(of_jax.stacks[parameter.name]), want)
            if parameter.name == "experts.down":
                got = of_torch.layers[1].feed.down.values.float().numpy()
                np.testing.assert_array_equal(got, want[1].astype(np.float32))
    out = next(p for p in parameters(config, False) if p.name == "attention.out")
    got = of_torch.layers[1].mixer.out.values.float().numpy()
    np.testing.assert_array_equal(got, checkpoint.load(out, kind)[0].astype(np.float32))


def test_stated_encoding_follows_quantization_config() -> None:
    for config, want in (
        (CONFIG, None),
        (CONFIG | {"quantization_config": STATED}, BLOCK),
        (CONFIG | {"text_config": CONFIG["text_config"] | {"quantization_config": STATED}}, BLOCK),
        *((CONFIG | {"quantization_config": compressed(x)}, x) for x in Granularity),
        (CONFIG | {"quantization_config": {"quant_method": "fp8"}}, Granularity.TENSOR),
    ):
        assert stated_encoding(config) == (want and FP8Encoding(want))


def dense(folder: Path, granularity: Granularity) -> ModelConfig:
    """Writes a dense FP8 checkpoint."""
    golden = Path(__file__).parents[1] / "golden" / "qwen3_5_dense" / "config.json"
    config = json.loads(golden.read_text())
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    text = config.get("text_config", config) | sizes
    return write_config(folder, text, granularity)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_w8a16_gate_up_bitwise_equal(tmp_path, granularity, framework) -> None:
    config = dense(tmp_path, granularity)
    checkpoint = open_checkpoint(tmp_path)
    names = w8a16_of(checkpoint, parameters(config, config.has_mtp))
    assert {name for name in names if not name.startswith("mtp.")} == {"mlp.gate_up"}
    rows = np.random.default_rng(2).standard_normal((4, config.hidden), np.float32)
    found = []
    for formats in (names, {}):
        how = (lambda count: None, formats)
        if framework == "torch":
            read = torch_weights.load(checkpoint, config, False, "bfloat16", CPU, *how)
            stream = torch_linear.NormedStream(torch.from_numpy(rows).bfloat16())
            found.append(
                torch_linear.act_and_mul_linear(stream, None, read.layers[0].feed.gate_up)
                .float()
                .numpy()
            )
        else:
            read = jax_weights.load(checkpoint, config, False, HALF, JAX_CPU, *how)
            records = jax_weights.weights_of(config, read, True)
            stream = jax_linear.NormedStream(jax.numpy.asarray(rows.astype(HALF)))
            got = jax_linear.act_and_mul_linear(stream, None, records.layers[0].feed.gate_up)
            found.append(np.asarray(got.astype(np.float32)))
    np.testing.assert_array_equal(*found)
