"""Bench of segments along K: sums in order, equal bits over tiles and rows, and its decision."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from shared.models.formats.weight_format import SCALES, VALUES
from shared.spec.linear import widened
from tests.support.cases.gemm.linear import QUANTIZED
from tests.support.kernels import triton_interpreter

SHAPES = {  # outputs, inputs of a step, swapped, a program for each segment
    "narrow": (16, 64, False, True),
    "wide": (64, 128, False, True),
    "swapped": (32, 128, True, True),
    "one program": (64, 64, False, False),
}
LINE = {
    "model": "m",
    "format": "INT4",
    "gemm": "o",
    "rows": 1,
    "segments": 2,
    "us": 9.0,
    "tile": {"outputs": 16, "warps": 2, "swapped": True},
    "tiles_have_equal_bits": True,
    "error": 1e-3,
    "is_right": True,
    "bits_of_first_row": "aa",
}


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with triton_interpreter():
        yield import_module("bench.kernels.reduction_segments")


def tile_of(bench: ModuleType, name: str) -> Any:
    outputs, depth, swapped, separate = SHAPES[name]
    return bench.Tile(
        outputs=outputs, depth=depth, swapped=swapped, separate=separate, warps=4, stages=2
    )


def multiplied(bench: ModuleType, x, weight, segments: int, tile: str):
    buffers = bench.Buffers.of(x, len(weight.values), segments)
    how = {"segments": segments, "tile": tile_of(bench, tile)}
    first = bench.linear_of(x, weight, buffers, **how).clone()
    assert torch.equal(bench.linear_of(x, weight, buffers, **how), first)  # counters are zero again
    return first


def stored(bench: ModuleType, format: str) -> tuple[Any, torch.Tensor]:
    """A weight of 128 outputs and 512 inputs, and its numbers."""
    torch.manual_seed(0)
    wide = (torch.randn(128, 512) / 512**0.5).bfloat16()
    if format == "BF16":
        return bench.Weight(wide, None, bench.FORMATS[format]), wide.float()
    matrix = QUANTIZED[format](wide.float().numpy())
    values, scales = (torch.from_numpy(matrix.planes[name].copy()) for name in (VALUES, SCALES))
    weight = bench.Weight(values, scales.bfloat16(), bench.FORMATS[format])
    return weight, torch.from_numpy(widened(matrix)).float()


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 512).bfloat16()


@pytest.mark.parametrize("format", ["BF16", "FP8", "INT4"])
def test_segmented_linear_adds_segments_in_order(bench, rows, format):
    weight, wide = stored(bench, format)
    halves = [slice(0, 256), slice(256, 512)]
    want = sum(rows[:, half].float() @ wide[:, half].T for half in halves)
    found = multiplied(bench, rows, weight, 2, "narrow")
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=1e-2)  # rounded to bfloat16
    torch.testing.assert_close(bench.expected_of(rows, weight, 2), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:1], multiplied(bench, rows[:1], weight, 2, "wide"))
    for tile in ("swapped", "one program"):
        assert torch.equal(found, multiplied(bench, rows, weight, 2, tile))


def test_segmented_linear_starts_segments_from_zero(bench):
    wide = torch.zeros(16, 512)
    wide[:, 0], wide[:, 256], wide[:, 320] = 2.0**25, 2, -(2.0**25)
    weight = bench.Weight(wide.bfloat16(), None, bench.FORMATS["BF16"])
    x = torch.ones(1, 512).bfloat16()
    found = {n: multiplied(bench, x, weight, n, "narrow")[0, 0].item() for n in (1, 2)}
    assert found == {1: 0, 2: 2}  # 2^25 + 2 is rounded to 2^25, 2 - 2^25 is exact


def test_segmented_linear_rejects_partial_tiles(bench, rows):
    weight, _ = stored(bench, "INT4")
    with pytest.raises(ValueError, match="4 segments and 128 outputs are no multiple"):
        multiplied(bench, rows, weight, 4, "wide")  # blocks of 256 inputs


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"is_right": False}, "error 1.0e-03"),
        ({"tiles_have_equal_bits": False}, "bits depend on the tiles"),
        ({"bits_of_first_row": "bb"}, "bits depend on the number of rows"),
        ({"bits_of_first_row": "bb", "segments": 4}, ""),
    ],
)
def test_faults_name_wrong_and_unequal_bits(bench, change, fault):
    faults = bench.faults_of([LINE, LINE | {"rows": 8} | change])
    assert len(faults) == bool(fault)
    assert all(fault in each for each in faults)


@pytest.mark.parametrize(
    ("gain", "loss", "adopts"), [(12.0, 0.1, True), (9.0, 0.1, False), (12.0, 9.0, False)]
)
def test_decision_requires_gain_and_small_loss(bench, gain, loss, adopts):
    def layer(model: str, rows: int, segments: int, us: float) -> list[dict[str, Any]]:
        of_layer = {"model": model, "format": "BF16", "rows": rows, "segments": segments}
        both = {"o": us / 4, "down": us * 3 / 4}
        return [LINE | of_layer | {"gemm": name, "us": each} for name, each in both.items()]

    lines = layer(bench.SHARDED, 1, 1, 60.0) + layer(bench.SHARDED, 1, 2, 60.0 - gain)
    for rows in (1, 8, 32):
        lines += layer(bench.ALONE, rows, 1, 40.0) + layer(bench.ALONE, rows, 2, 40.0 + loss)
    assert bench.decision(lines)["adopts"] == adopts
    assert bench.decision(lines)["gain_us"] == gain
    with pytest.raises(KeyError):
        bench.decision(lines[1:])


def test_only_selects_cases_in_order(bench):
    names = [str(case) for case in bench.chosen(["FP8 o, 8", "INT4 down, 1 rows"])]
    assert names == ["qwen3-8b FP8 o, 8 rows", "qwen3-8b INT4 down, 1 rows"]
    assert bench.chosen([]) == bench.CASES
    assert len(set(bench.CASES)) == len(bench.CASES)


@pytest.mark.parametrize("seconds", ["60", "-1"])
def test_failure_keeps_lines_before_it(bench, tmp_path, monkeypatch, seconds):
    def measured(case, segments):
        yield LINE
        raise RuntimeError("out of memory")

    path = tmp_path / "found.json"
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "card")
    command = ["--out", str(path), "--seconds", seconds, "--only", "INT4 down, 1 rows"]
    if seconds == "60":
        with pytest.raises(RuntimeError):
            bench.main(command)
        found = json.loads(path.read_text())
        assert [line["us"] for line in found["lines"]] == [9.0]
        assert "decision" not in found
    else:
        assert bench.main(command) == 1
        assert json.loads(path.read_text())["left_out"] == ["qwen3-8b INT4 down, 1 rows"]


def test_kernels_compile_without_gpu():
    program = """
from bench.kernels import reduction_segments as bench
for case in bench.CASES[:3:2]:
    print(bench.compile_kernel(case, case.kernels[0]).metadata.target)
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]  # this process interprets Triton
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count("arch=90") == 2, done.stderr
