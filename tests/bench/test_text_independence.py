"""Outputs of long prompts over chunk sizes, batches, prefix hits and preemption, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.steps.text_independence import WAYS, difference, fault_of, main
from shared.models.saving import save_checkpoint
from tests.support.tiny_mamba2 import VARIANTS
from tests.support.tiny_models import HYBRIDS, LATENT, MAMBA2, WITH_MTP, tiny_model, write_tiny
from tests.support.tiny_small import small_config, small_model

LONG = 6144
"""Context length of the tiny models here, of which tests use half."""

IN_BOTH = [(family, backend) for family in (*MAMBA2, *VARIANTS) for backend in ("torch", "jax")]
IN_TORCH = [("minimax_m2", "torch"), ("qwen3_next", "torch")]


def tiny(folder: Path, family: str) -> Path:
    write_tiny(folder, family, 3)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "rope_scaling" in config:
        config["rope_scaling"]["factor"] = LONG / 512
    path.write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return folder


def lines(
    folder: Path,
    backend: str,
    drafts: list[str],
    tokens: int,
    output: int,
    count: int = 3,
    small: Path | None = None,
) -> list[dict]:
    out = folder / "found.json"
    words = ["--model", str(folder), "--load-format", "auto", "--dtype", "float32"]
    words += ["--backend", backend, "--input", str(tokens), "--output", str(output)]
    words += ["--count", str(count)]
    words += ["--folders", f"STANDALONE={small}"] if small else []
    flags = "--page-size 4 --chunked-prefill-size 256"
    assert main([*words, "--out", str(out), "--flags", flags, "--drafts", *drafts]) == 0
    return json.loads(out.read_text())["lines"]


def test_latent_outputs_are_equal_in_all_ways(tmp_path: Path):
    found = lines(tiny(tmp_path, "deepseek_v3"), "torch", ["NEXTN:S=3"], 100, 60)
    ways = [way for group in WAYS for way in group]
    assert [line["way"] for line in found] == [way.name for way in ways]
    for way, line in zip(ways, found, strict=True):
        assert line["cached_tokens"] if way.hits else True
        assert line["preemptions"] if way.preempts else True


@pytest.mark.matrix
@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_long_latent_outputs_are_equal(backend: str, family: str, tmp_path: Path):
    """Prompts are longer than the original context of YaRN."""
    folder = tiny(tmp_path, family)
    assert len(lines(folder, backend, ["none", "NEXTN:S=3"], LONG // 2, 80, count=2)) == 10


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "backend"), [*IN_BOTH, *IN_TORCH])
def test_outputs_with_every_drafter_are_equal(family: str, backend: str, tmp_path: Path):
    """The first line, with which all others are compared, is plain decoding one by one."""
    folder, small = tiny(tmp_path / "target", family), tmp_path / "small"
    weights = small_model(*tiny_model(family, 3), family, 4).weights
    save_checkpoint(small, small_config(family), weights, 1)
    drafts = ["none", "NGRAM:N=8", "STANDALONE:S=3"]
    drafts += ["NEXTN:S=3", "NEXTN:S=3,k=2,N=6"] if family in WITH_MTP else []
    # Without states more of a prompt is shared, and pages run short later.
    output = 60 if family in HYBRIDS else 120
    found = lines(folder, backend, drafts, 300, output, small=small)
    assert len(found) == 5 * len(drafts)


def test_difference_names_first_other_token():
    assert difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "request 1 differs at token 1"
    assert difference([[1, 2]], [[1, 2, 3]]) == "request 0 differs at token 2"


def test_fault_of_requires_hits_and_preemptions():
    ways = {way.name: way for group in WAYS for way in group}
    nothing = {"cached_tokens": 0, "preemptions": 0}
    assert fault_of(ways["batch"], nothing) is None
    assert fault_of(ways["prefix hits"], nothing) == "no prefix hit"
    assert fault_of(ways["few pages"], nothing) == "no preemption; raise --output"
