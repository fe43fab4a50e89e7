"""Distinct experts of a decode step: counted choices of routers, and limits from them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.pages.results import with_counted_experts
from bench.steps import experts_read
from tests.support.tiny_models import tiny_config
from torch_impl.ops.moe import experts

SHORT = ["--input", "10", "--output", "40", "--dtype", "float32", "--batch", "1", "4"]
LAYERS, TOP_K, EXPERTS = 4, 3, 8


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.support.op_sides.CPU_COPY_FLOATS", 2**16)
    config = tiny_config("qwen3_5_moe", nested=False, with_mtp=True, tied=False)
    assert config["num_hidden_layers"] == LAYERS
    assert (config["num_experts_per_tok"], config["num_experts"]) == (TOP_K, EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_experts_read_counts_distinct_choices_of_steps(model: Path) -> None:
    line = ["--model", str(model), *SHORT, "--drafts", "none", "NEXTN:S=2"]
    report = experts_read.run(experts_read.options().parse_args(line), "the command")
    one, four, chain, _ = report.found["lines"]
    assert one["router_calls"] == LAYERS
    assert one["routed"] == LAYERS * TOP_K  # of one row all experts are distinct
    assert one["bytes"] == pytest.approx(one["even_bytes"], rel=1e-4)
    assert LAYERS * TOP_K < four["routed"] < LAYERS * EXPERTS
    assert chain["router_calls"] == LAYERS + 2  # the MTP layer runs twice


def test_recorded_choices_ignore_padding_and_shared_expert(monkeypatch) -> None:
    ids = torch.tensor([[0, 1, 8], [-1, -1, -1], [1, 2, 8]])
    monkeypatch.setattr(experts, "choose", lambda: SimpleNamespace(ids=ids))
    with experts_read.recorded_choices("cpu", 8) as found:
        assert experts.choose().ids is ids
    assert found == [3]


def test_experts_read_rejects_dense_model(model: Path) -> None:
    config = tiny_config("qwen3", nested=False, with_mtp=False, tied=True)
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the model has no experts"):
        experts_read.run(experts_read.options().parse_args(["--model", str(model), *SHORT]), "")


def test_limits_use_counted_experts_of_same_settings() -> None:
    command = "python -m bench.steps.decode_steps --model bench/shapes/a"
    usual = {"batch": 8, "prompt": 512, "limit_ms": 2.0, "share_of_limit": 0.5}
    lines = [usual | {"drafts": drafts} for drafts in ("none", "NEXTN S=3 L=2.5", "NGRAM")]
    file = {"command": command, "lines": lines}
    counted = {"batch": 8, "prompt": 512, "bytes": 9, "even_bytes": 10}
    counts = {"command": command, "lines": [counted | {"drafts": "none"}]}
    counts["lines"].append(counted | {"drafts": "NEXTN S=3", "bytes": 5})
    found = with_counted_experts(file, [counts])["lines"]
    assert [line["limit_ms"] for line in found] == pytest.approx([1.8, 1.0, 2.0])
    assert [line["share_of_limit"] for line in found] == pytest.approx([0.45, 0.25, 0.5])
    other = {**counts, "command": command + "b"}
    assert with_counted_experts(file, [other]) == file
