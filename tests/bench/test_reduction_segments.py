"""Bench of segments along K: sums in order, equal bits over tiles, and its decision rule."""

import json
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tests.support.kernels import triton_interpreter

TILES = ({"outputs": 16, "depth": 32}, {"outputs": 32, "depth": 64})


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with triton_interpreter():
        yield import_module("bench.kernels.reduction_segments")


def multiplied(bench: ModuleType, x, weight, segments: int, *, separate: bool, tile: int):
    buffers = bench.Buffers.of(x, len(weight), segments)
    how = {"segments": segments, "separate": separate}
    how["tile"] = TILES[tile] | {"stages": 2, "num_warps": 4}
    first = bench.linear_of(x, weight, buffers, **how).clone()
    assert torch.equal(bench.linear_of(x, weight, buffers, **how), first)  # counters are zero again
    return first


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 256).bfloat16(), torch.randn(64, 256).bfloat16()


@pytest.mark.parametrize("separate", [True, False])
def test_segmented_linear_adds_segments_in_order(bench, given, separate):
    x, weight = given
    halves = [slice(0, 128), slice(128, 256)]
    want = sum(x[:, half].float() @ weight[:, half].float().T for half in halves)
    found = multiplied(bench, x, weight, 2, separate=separate, tile=0)
    torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=2e-2)  # rounded to bfloat16
    assert torch.equal(found, multiplied(bench, x, weight, 2, separate=not separate, tile=1))


def test_segmented_linear_rejects_partial_tiles(bench, given):
    x, weight = given
    with pytest.raises(ValueError, match="no multiple of the tile"):
        multiplied(
            bench, x[:, :96].contiguous(), weight[:, :96].contiguous(), 2, separate=True, tile=1
        )


@pytest.mark.parametrize(
    ("gain", "loss", "adopts"), [(12.0, 0.1, True), (9.0, 0.1, False), (12.0, 9.0, False)]
)
def test_decision_requires_gain_and_small_loss(bench, gain, loss, adopts):
    tp, alone = bench.LAYERS
    lines = [
        {"layer": tp, "rows": 1, "segments": segments, "us": us}
        for segments, us in ((1, 60.0), (2, 60.0 - gain))
    ]
    for rows in (1, 8, 32):
        lines += [
            {"layer": alone, "rows": rows, "segments": segments, "us": us}
            for segments, us in ((1, 40.0), (2, 40.0 + loss))
        ]
    assert bench.decision(lines)["adopts"] == adopts
    assert bench.decision(lines)["gain_us"] == gain


def test_failure_keeps_lines_before_it(bench, tmp_path, monkeypatch):
    def measured(layer, num_rows, segments):
        yield {"gemm": "o", "us": 60.0}
        raise RuntimeError("out of memory")

    path = tmp_path / "found.json"
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "card")
    with pytest.raises(RuntimeError):
        bench.main(["--out", str(path)])
    found = json.loads(path.read_text())
    assert [line["us"] for line in found["lines"]] == [60.0]
    assert "decision" not in found
