"""INT4 checkpoints: outputs equal those of the dequantised model on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.models.checkpoint import open_checkpoint
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.registry import choose_formats
from shared.models.parameters import parameters
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process import start
from shared.process.model_check import check_model
from tests.support.int4_files import LAYOUTS, write_int4
from tests.support.texts import texts
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
SIZES |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def model_of(family: str, with_mtp: bool = False) -> dict[str, Any]:
    return tiny_config(family, nested=False, with_mtp=with_mtp, tied=False) | SIZES


def line_of(folder: Path, more: Sequence[str]) -> list[str]:
    line = ["--model-path", str(folder), "--max-running-requests", "2", "--context-length", "64"]
    return [*line, "--chunked-prefill-size", "64", "--dtype", "bfloat16", *more]


@pytest.fixture
def stays_packed(monkeypatch) -> list[Any]:
    """Weights stay INT4 as on a GPU; ops without kernels dequantise them in each call."""
    choose, found = start.choose_formats, []

    def as_on_gpu(parameters: Any, stored: Any, context: Any) -> Any:
        found.append(choose(parameters, stored, replace(context, on_gpu=True)))
        return found[-1]

    monkeypatch.setattr(start, "choose_formats", as_on_gpu)
    return found


NGRAM = ("--speculative-algorithm", "NGRAM")
CASES = [
    ("torch", "compressed-tensors", "qwen3", ()),
    ("torch", "AWQ", "qwen3_5", ("--speculative-algorithm", "NEXTN")),
    ("torch", "compressed-tensors", "qwen3_moe", NGRAM),
]
MORE = [
    ("torch", "GPTQ", "qwen3", NGRAM),
    ("jax", "compressed-tensors, asymmetric", "qwen3_5", NGRAM),
    ("jax", "compressed-tensors", "qwen3_moe", ()),
    ("jax", "AWQ", "qwen3", NGRAM),
    ("torch", "AWQ", "qwen3_moe", ()),
    ("torch", "GPTQ, desc_act", "qwen3_5", ()),
    ("torch", "compressed-tensors, asymmetric", "deepseek_v3", ()),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MORE)], ids=str
)
def test_int4_text_equals_dequantized_model(case, stays_packed, tmp_path) -> None:
    backend, layout, family, flags = case
    stated = model_of(family, with_mtp="NEXTN" in flags)
    write_int4(tmp_path / "int4", stated, LAYOUTS[layout], tmp_path / "wide")
    got = texts(backend, line_of(tmp_path / "int4", flags))
    assert bool(stays_packed[-1]) != LAYOUTS[layout].is_permuted
    want = texts(backend, line_of(tmp_path / "wide", flags))
    assert got == want
    assert len({token for text in want for token in text}) > 4


@pytest.mark.parametrize("name", ["int4", "awq", "gptq_marlin"])
def test_quantization_int4_requires_int4_weights(name, tmp_path) -> None:
    write_int4(tmp_path / "int4", model_of("qwen3"), LAYOUTS["AWQ"], tmp_path / "wide")
    options = parse(line_of(tmp_path / "int4", ["--quantization", name]))
    assert check_model(options, open_checkpoint).options.model.quantization == "int4"
    with pytest.raises(
        ConfigError, match="--quantization int4 requires a checkpoint with INT4 weights"
    ):
        check_model(parse(line_of(tmp_path / "wide", ["--quantization", name])), open_checkpoint)


def test_int4_mtp_layer_keeps_its_type(tmp_path) -> None:
    stated = model_of("qwen3_5", with_mtp=True) | {"linear_value_head_dim": 32}
    config = write_int4(tmp_path, stated, LAYOUTS["compressed-tensors"])
    opened = open_checkpoint(tmp_path)
    opened.check(config, True)
    formats = choose_formats(parameters(config, True), opened.stored, ON_GPU)
    names = {"attention.inputs", "attention.out", "gated_delta.out", "mlp.gate_up", "mlp.down"}
    assert formats == dict.fromkeys(names, Int4W4A16(32, has_words=False))
