"""Bench of the GEMMs of layers: bits over tile configs, replaced fields, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kernels.tiles import LinearTiles
from tests.support.kernels import triton_interpreter

SIZES = {"qkv": (128, 256), "out": (128, 128), "gate_up": (128, 256), "down": (256, 128)}
TILES = {"rows": 16, "columns": 64, "depth": 128, "swapped": True, "warps": 4, "stages": 2}


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with triton_interpreter(), pytest.MonkeyPatch.context() as patch:
        module = import_module("bench.kernels.layer_gemms")
        for name, value in (("HIDDEN", 128), ("INNER", 256), ("GEMMS", SIZES), ("LAYERS", 2)):
            patch.setattr(module, name, value)
        yield module


def table_of(*, widens: bool) -> Any:
    """Returns a tile table with one config."""
    how = {"described": False, "persistent": False, "widens": widens}
    return SimpleNamespace(of=lambda **sizes: LinearTiles(**TILES, **how))


@pytest.mark.parametrize("format", ["BF16", "FP8", "INT4"])
def test_layer_gemms_bits_independent_of_tiles(bench: ModuleType, format: str) -> None:
    layers, attended = bench.Layers(format, 3, "cpu"), list[int]()
    configs = [{}, {"rows": 32, "down": {"stages": 1}}, {"warps": 3}, {"depths": 64}]
    timed = lambda run: (7.0, run())  # noqa: E731
    table = table_of(widens=format == "BF16")
    found = list(bench.measured(layers, configs, table, timed, lambda: attended.append(1)))
    assert [line.get("us") for line in found] == [3.5, 3.5, None, None], found
    assert [line.get("bits_equal") for line in found] == [True, True, None, None]
    assert "warps" in found[2]["error"]
    assert "depths" in found[3]["error"]
    assert len(attended) == 2 * 2
    assert bench.line_of({"format": format, "rows": 3} | found[0]).startswith(format)


@pytest.mark.parametrize("format", ["BF16", "FP8", "INT4"])
def test_layer_gemms_change_residual(bench: ModuleType, format: str) -> None:
    """Weights of another magnitude would leave it as it was, or make it infinite."""
    layers = bench.Layers(format, 3, "cpu")
    stream, *_ = layers.run(layers.tiles(table_of(widens=format == "BF16"), {}), lambda: None)
    change = (stream.float() - layers.x.float()).abs().mean().item()
    assert 0.01 < change < 100


def test_layer_gemms_detect_other_bits(bench: ModuleType) -> None:
    layers = bench.Layers("BF16", 3, "cpu")
    results = layers.run(layers.tiles(table_of(widens=True), {}), lambda: None)
    others = [results[0].clone(), *results[1:]]
    assert bench.has_equal_bits(results, others)
    others[0][1, 5] += 1
    assert not bench.has_equal_bits(results, others)
    line = {"format": "BF16", "rows": 3, "us": 3.5, "bits_equal": False, "tiles": {}}
    assert "OTHER BITS" in bench.line_of(line)


def test_layer_gemms_attention_needs_known_rows(bench: ModuleType) -> None:
    with pytest.raises(ValueError, match="--rows is 1, 8 or 32"):
        bench.attention_of(7)
