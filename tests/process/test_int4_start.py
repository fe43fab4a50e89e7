"""INT4 checkpoints: outputs equal those of the dequantised model on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.registry import choose_formats
from shared.models.parameters import parameters
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.model_check import check_model
from tests.support.int4_files import LAYOUTS, write_int4
from tests.support.texts import outcomes, packed_weights, texts, texts_on_devices
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
SIZES |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def model_of(family: str, with_mtp: bool = False) -> dict[str, Any]:
    return tiny_config(family, nested=False, with_mtp=with_mtp, tied=False) | SIZES


def line_of(folder: Path, more: Sequence[str]) -> list[str]:
    line = ["--model-path", str(folder), "--max-running-requests", "2", "--context-length", "64"]
    return [*line, "--chunked-prefill-size", "64", "--dtype", "bfloat16", *more]


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
    ("torch", "compressed-tensors", "gemma4", NGRAM),
    ("torch", "GPTQ", "gemma4", ()),
    ("torch", "AWQ", "gemma4_moe", NGRAM),
    ("jax", "compressed-tensors", "gemma4_moe", ()),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MORE)], ids=str
)
def test_int4_text_equals_dequantized_model(case, tmp_path) -> None:
    backend, layout, family, flags = case
    stated = model_of(family, with_mtp="NEXTN" in flags)
    write_int4(tmp_path / "int4", stated, LAYOUTS[layout], tmp_path / "wide")
    with packed_weights() as found:
        got = texts(backend, line_of(tmp_path / "int4", flags))
    assert bool(found[-1]) != LAYOUTS[layout].is_permuted
    want = texts(backend, line_of(tmp_path / "wide", flags))
    assert got == want
    assert len({token for text in want for token in text}) > 4


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param(backend, kind, marks=() if kind == usual else pytest.mark.matrix)
        for backend, usual in (("torch", "EAGLE3"), ("jax", None))
        for kind in ("EAGLE3", "STANDALONE")
    ],
)
def test_int4_drafted_text_equals_plain(kind, backend, tmp_path) -> None:
    """The draft model is the target itself, dequantised at load."""
    folders = {"STANDALONE": tmp_path / "int4", "EAGLE3": tmp_path / "head"}
    config = write_int4(tmp_path / "int4", model_of("qwen3"), LAYOUTS["AWQ"], tmp_path / "wide")
    weights = load_all(tmp_path / "wide", config, False)
    write_tiny_head(folders["EAGLE3"], config, weights, "EAGLE3", 4)
    drafting = ("--speculative-algorithm", kind, "--speculative-draft-model-path")
    with packed_weights() as found:
        got = outcomes(backend, line_of(tmp_path / "int4", [*drafting, str(folders[kind])]))
    assert found[-1]
    assert [each.tokens for each in got] == texts(backend, line_of(tmp_path / "wide", ()))
    assert max(count for each in got for count in each.accepted) > 0


RANKS = [("compressed-tensors", "qwen3", NGRAM), ("AWQ", "qwen3_moe", ())]
RANKS += [("AWQ", "qwen3", NGRAM), ("GPTQ, desc_act", "qwen3", NGRAM)]
RANKS += [("GPTQ", "gemma4_moe", NGRAM)]


@pytest.mark.parametrize(
    "case", [RANKS[0], *(pytest.param(each, marks=pytest.mark.matrix) for each in RANKS[1:])]
)
def test_int4_text_of_two_ranks_equals_one(case, tmp_path) -> None:
    layout, family, flags = case
    write_int4(tmp_path / "int4", model_of(family), LAYOUTS[layout], tmp_path / "wide")
    with packed_weights() as found:
        got = texts("torch", line_of(tmp_path / "int4", [*flags, "--tp-size", "2"]))
    assert bool(found[-1]) != LAYOUTS[layout].is_permuted
    assert got == texts("torch", line_of(tmp_path / "wide", flags))


PARTIAL = [("torch", "AWQ", 2), ("torch", "AWQ", 4), ("torch", "compressed-tensors", 1)]
PARTIAL += [("torch", "compressed-tensors", 2), ("jax", "compressed-tensors", 1)]


@pytest.mark.parametrize(
    "case",
    [PARTIAL[0], *(pytest.param(each, marks=pytest.mark.matrix) for each in PARTIAL[1:])],
    ids=str,
)
def test_int4_text_of_partial_blocks_equals_dequantized_model(case, tmp_path) -> None:
    """Experts are 320 and MLPs 448 wide, no multiples of 128."""
    backend, layout, ranks = case
    sizes = {"head_dim": 32, "moe_intermediate_size": 320, "intermediate_size": 448}
    stated = model_of("gemma4_moe") | sizes | {"num_key_value_heads": 4}
    write_int4(tmp_path / "int4", stated, LAYOUTS[layout], tmp_path / "wide")
    with packed_weights() as found:
        got = texts(backend, line_of(tmp_path / "int4", [*NGRAM, "--tp-size", str(ranks)]))
    for name in ("experts.down", "experts.parallel_down"):
        assert found[-1][name].padding == 64
    assert got == texts(backend, line_of(tmp_path / "wide", ()))


@pytest.mark.matrix
@pytest.mark.parametrize("case", RANKS)
def test_jax_int4_text_of_two_ranks_equals_one(case, tmp_path) -> None:
    layout, family, flags = case
    write_int4(tmp_path / "int4", model_of(family), LAYOUTS[layout], tmp_path / "wide")
    got = texts_on_devices(2, line_of(tmp_path / "int4", flags))
    assert got == texts("jax", line_of(tmp_path / "wide", flags))


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
