"""`--fp8-activations`: startup with W8A8 weights, or an error of one sentence."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import pytest
import torch

from shared.engine.request import Request, SamplingParams
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process import engines
from shared.process.device import Device
from shared.process.start import Platform, ValidatedStartup, prepare
from tests.support.fp8_files import compressed
from tests.support.in_process_engine import one_bucket
from tests.support.op_records import leaves
from tests.support.run_engine import drive
from tests.support.tiny_models import tiny_config

CPU, GPU = Device("cpu", "CPU", 1 << 31), Device("gpu", "NVIDIA H100 80GB HBM3", 1 << 34)
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WHOLE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
WHOLE |= {"num_key_value_heads": 4}
IN_CODES = {"attention.inputs", "attention.out", "mlp.gate_up", "mlp.down"}


def folder_of(folder: Path, kind: str, **changed: object) -> Path:
    """Writes the config.json of a tiny model."""
    config = tiny_config(kind, nested=False, with_mtp=False, tied=False) | changed
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prepared(folder: Path, platform: Platform, device: Device, *flags: str) -> ValidatedStartup:
    line = ["--model-path", str(folder), "--load-format", "dummy", "--fp8-activations"]
    line += ["--max-running-requests", "2", "--context-length", "64", "--max-total-tokens", "128"]
    line += ["--chunked-prefill-size", "64", *flags]
    return prepare(parse(line), replace(platform, find_device=lambda: device))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_fp8_activations_keep_w8a8_weights_and_serve(tmp_path: Path, framework: str) -> None:
    platform = import_module(f"{framework}_impl.platform").PLATFORM
    folder = folder_of(tmp_path, "qwen3", **WHOLE, **FP8)
    start = prepared(folder, platform, CPU, "--dtype", "bfloat16")
    blueprint = start.memory.blueprint
    assert blueprint.formats == dict.fromkeys(blueprint.formats, FP8W8A8(by_output=True))
    assert blueprint.formats.keys() == IN_CODES
    blueprint = replace(blueprint, capacity=one_bucket(start.memory.capacity))
    start, read = replace(start, memory=replace(start.memory, blueprint=blueprint)), []
    made = start.load(platform, read.append)
    assert sum(read) == start.num_bytes
    made.prepare(made.capacity.programs, lambda program: None)
    engine = engines.make_engine(made, start.memory)
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    asked = [Request(request_id=0, prompt=(5, 9, 3, 200), sampling=sampling)]
    try:
        (outcome,) = drive(engine, asked).values()
    finally:
        engine.close()
    assert len(outcome.tokens) == 12


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_memory_plan_counts_fp8_weights_exactly(tmp_path: Path, framework: str) -> None:
    platform = import_module(f"{framework}_impl.platform").PLATFORM
    folder = folder_of(tmp_path, "qwen3", **WHOLE, **FP8)
    start = prepared(folder, platform, CPU, "--dtype", "bfloat16")
    blueprint = start.memory.blueprint
    weights = import_module(f"{framework}_impl.weights")
    device = torch.device("cpu") if framework == "torch" else jax.devices("cpu")[0]
    how = ("bfloat16", device, lambda num_bytes: None, blueprint.formats)
    loaded = weights.load(start.opened.checkpoint, blueprint.config, False, *how)
    kept = leaves(torch.Tensor, loaded) if framework == "torch" else jax.tree.leaves(loaded)
    (line,) = (line for line in start.memory.lines if line.name == "weights")
    assert sum(each.nbytes for each in kept) == line.num_bytes
    assert line.detail.endswith("of them in FP8")


ADAPTERS = ("--max-lora-rank", "16", "--lora-target-modules", "all")
REFUSED = {
    "weights that are not FP8": (
        ("qwen3", WHOLE, CPU, ("--dtype", "bfloat16")),
        "--fp8-activations requires a checkpoint with FP8 weights",
    ),
    "a type of more digits": (
        ("qwen3", WHOLE | FP8, CPU, ("--dtype", "float32")),
        "--fp8-activations requires bfloat16",
    ),
    "products of both kinds": (
        ("qwen3_5", WHOLE | FP8, CPU, ("--dtype", "bfloat16")),
        "and gated_delta.inputs has others",
    ),
    "scales of channels": (
        ("qwen3", WHOLE | {"quantization_config": compressed(Granularity.CHANNEL)}, CPU, ()),
        "requires FP8 with block scales in all tensors of a fused",
    ),
    "LoRA adapters": (
        ("qwen3", WHOLE | FP8, CPU, ("--dtype", "bfloat16", *ADAPTERS)),
        "--lora-paths is not supported with --fp8-activations; remove one",
    ),
    "another GPU than a Hopper": (
        ("qwen3", WHOLE | FP8, Device("gpu", "NVIDIA A100-SXM4-80GB", 1 << 34), ()),
        "requires a Hopper GPU (H100, H200); found NVIDIA A100",
    ),
    "blocks that are not whole, on a GPU": (
        ("qwen3", WHOLE | FP8 | {"intermediate_size": 192}, GPU, ()),
        "requires whole blocks of 128 x 128 on a GPU, and mlp.gate_up has others",
    ),
    "blocks that ranks cut, on a GPU": (
        ("qwen3", WHOLE | FP8, GPU, ("--tp-size", "2")),
        "requires whole blocks of 128 x 128 on a GPU, and",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fp8_activations_reject_unsupported_configuration(tmp_path: Path, case: str) -> None:
    (kind, changed, device, flags), sentence = REFUSED[case]
    platform = import_module("torch_impl.platform").PLATFORM
    with pytest.raises(ConfigError) as refused:
        prepared(folder_of(tmp_path, kind, **changed), platform, device, *flags)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fp8_experts_rejected_on_gpu_only(tmp_path: Path) -> None:
    platform = import_module("torch_impl.platform").PLATFORM
    golden = Path(__file__).parents[1] / "golden" / "qwen3_moe_fp8"
    (tmp_path / "config.json").write_text((golden / "config.json").read_text())
    start = prepared(tmp_path, platform, CPU, "--dtype", "bfloat16")
    assert {"experts.gate_up", "experts.down"} < start.memory.blueprint.formats.keys()
    with pytest.raises(ConfigError, match="does not support FP8 experts on a GPU"):
        prepared(tmp_path, platform, GPU)
