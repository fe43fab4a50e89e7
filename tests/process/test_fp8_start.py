"""FP8 checkpoints: outputs equal those of the dequantised model on every backend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.models.checkpoint import Checkpoint, open_checkpoint
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.device import Device
from shared.process.model_check import check_model
from shared.process.start import prepare
from tests.support.fp8_files import LAYOUTS, write_fp8, write_widened
from tests.support.serve_reference import platform_of
from tests.support.texts import packed_weights, texts
from tests.support.tiny_models import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden"
MIXTURE: dict[str, Any] = json.loads((GOLDEN / "qwen3_moe_fp8" / "config.json").read_text())
MIXTURE |= {"quantization_config": None, "vocab_size": 256, "moe_intermediate_size": 256}
MODELS = {
    "experts": MIXTURE,
    "dense": tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False),
    **{
        family: tiny_config(family, nested=False, with_mtp=family == "nemotron_h", tied=False)
        | {"hidden_size": 128, "shared_intermediate_size": 128}
        | {"moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128}
        for family in ("granitemoehybrid", "nemotron_h")
    },
}
WITH_MTP = ("dense", "nemotron_h")
"""Models with an MTP layer."""


def line_of(folder: Path, *more: str) -> list[str]:
    line = ["--model-path", str(folder), "--max-running-requests", "2", "--context-length", "64"]
    return [*line, "--chunked-prefill-size", "64", *more]


CASES = [("experts", layout) for layout in LAYOUTS]
CASES += [("dense", layout) for layout in ("compressed-tensors, channel", "Mistral")]
CASES += [("nemotron_h", "ModelOpt"), ("granitemoehybrid", "compressed-tensors, channel")]
MORE = [("nemotron_h", "compressed-tensors, block"), ("granitemoehybrid", "ModelOpt")]
MORE += [("granitemoehybrid", "compressed-tensors, block")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *CASES,
        *(pytest.param(model, layout, marks=pytest.mark.matrix) for model, layout in MORE),
    ],
)
def test_fp8_layouts_match_dequantized_model(layout, model, tmp_path) -> None:
    write_fp8(tmp_path / "fp8", MODELS[model], LAYOUTS[layout])
    write_widened(tmp_path / "fp8", tmp_path / "wide")
    drafts = ("--speculative-algorithm", "NEXTN") if model in WITH_MTP else ()
    want = texts("reference", line_of(tmp_path / "wide", "--dtype", "float32"))
    assert len({token for text in want for token in text}) > 4
    assert texts("torch", line_of(tmp_path / "fp8", "--dtype", "float32", *drafts)) == want
    halves = [
        texts("torch", line_of(tmp_path / name, "--dtype", "bfloat16")) for name in ("fp8", "wide")
    ]
    assert halves[0] == halves[1]


PARTIAL = [("torch", layout, ranks) for layout in LAYOUTS for ranks in (1, 2, 4)]
PARTIAL += [("jax", layout, 1) for layout in ("ModelOpt", "compressed-tensors, block")]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == ("torch", "ModelOpt", 2) else pytest.mark.matrix)
        for case in PARTIAL
    ],
    ids=str,
)
def test_packed_fp8_experts_match_dequantized_model(case, tmp_path) -> None:
    """The experts are 208 wide, no multiple of 128, and a rank of two has 104 columns."""
    backend, layout, ranks = case
    sizes = {"moe_intermediate_size": 208, "moe_latent_size": 192}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    write_fp8(tmp_path / "fp8", MODELS["nemotron_h"] | sizes, LAYOUTS[layout])
    write_widened(tmp_path / "fp8", tmp_path / "wide")
    line = ("--dtype", "bfloat16", "--speculative-algorithm", "NEXTN", "--tp-size", str(ranks))
    with packed_weights() as found:
        got = texts(backend, line_of(tmp_path / "fp8", *line))
        want = texts(backend, line_of(tmp_path / "wide", *line[:2]))
    assert {"experts.gate_up", "experts.down", "mtp.layer.experts.down"} <= found[0].keys()
    assert not found[-1]
    assert got == want


def test_quantization_fp8_requires_fp8_weights(tmp_path) -> None:
    write_fp8(tmp_path / "fp8", MIXTURE, LAYOUTS["compressed-tensors, block"])
    write_widened(tmp_path / "fp8", tmp_path / "wide")
    options = parse(line_of(tmp_path / "fp8", "--quantization", "fp8"))
    assert check_model(options, open_checkpoint).options.model.quantization == "fp8"
    with pytest.raises(
        ConfigError, match="--quantization fp8 requires a checkpoint with FP8 weights"
    ):
        check_model(parse(line_of(tmp_path / "wide", "--quantization", "fp8")), open_checkpoint)


@pytest.mark.parametrize(
    ("kind", "dtype", "count"), [("cpu", "bfloat16", 0), ("gpu", "float32", 0), ("gpu", None, 13)]
)
def test_fp8_scales_read_only_when_weights_stay_fp8(
    kind, dtype, count, tmp_path, monkeypatch
) -> None:
    write_fp8(tmp_path, MIXTURE, LAYOUTS["compressed-tensors, block"])
    read, tensor = [], Checkpoint.tensor

    def noted(self: Checkpoint, name: str) -> Any:
        read.append(name)
        return tensor(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    platform = replace(platform_of("torch"), find_device=lambda: Device(kind, "one", 1 << 34))
    start = prepare(parse(line_of(tmp_path, *(("--dtype", dtype) if dtype else ()))), platform)
    assert len(read) == count
    assert bool(start.memory.blueprint.formats) == bool(count)


@pytest.mark.parametrize(("ranks", "are_whole"), [(1, True), (2, True), (4, False)])
def test_fp8_ranks_keep_weights_with_cut_blocks(ranks, are_whole, tmp_path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 512}
    write_fp8(tmp_path, MIXTURE | sizes, LAYOUTS["compressed-tensors, block"])
    platform = replace(platform_of("jax"), find_device=lambda: Device("gpu", "one", 1 << 34))
    platform = replace(platform, take_devices=lambda count: None)
    start = prepare(parse(line_of(tmp_path, "--tp-size", str(ranks))), platform)
    whole = FP8W8A16(Granularity.BLOCK)
    cut = whole if are_whole else FP8W8A16(Granularity.BLOCK, by_output=True)
    want = dict.fromkeys(("attention.inputs", "experts.gate_up"), cut)
    want |= dict.fromkeys(("attention.out", "experts.down"), whole)
    assert start.memory.blueprint.formats == want


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("experts", layout) for layout in ("compressed-tensors, channel", "AutoFP8")),
        *CASES[-2:],
    ],
)
def test_jax_fp8_layouts_match_dequantized_model(layout, model, tmp_path) -> None:
    write_fp8(tmp_path / "fp8", MODELS[model], LAYOUTS[layout])
    write_widened(tmp_path / "fp8", tmp_path / "wide")
    want = texts("reference", line_of(tmp_path / "wide", "--dtype", "float32"))
    assert texts("jax", line_of(tmp_path / "fp8", "--dtype", "float32")) == want
