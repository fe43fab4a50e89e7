"""Tile config files: the choice by GPU and call, and the errors of invalid files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.kernel_limits import MOST_ROW_WARPS, row_warps
from kernels.tiles import CLASSES, FOLDER, MEASURED, Tiles
from shared.spec.reduction_order import SQUARES

LANGUAGES = ("pallas_gpu", "triton_gpu")
LINE = {
    "at_most": {},
    "lanes": 32,
    "ones": 16,
    "described": 0,
    "unroll": 1,
    "warps": 4,
    "stages": 2,
}
MIX = {
    "at_most": {},
    "lanes": 16,
    "programs": 4,
    "splits": 1,
    "ones": 16,
    "placed": False,
    "described": False,
    "warps": 4,
    "stages": 2,
    "registers": 0,
}


def write(folder: Path, name: str, lines: list[dict[str, Any]], **others: Any) -> None:
    measured = json.loads((FOLDER / f"{MEASURED}.json").read_text())
    tables = {each: measured[each] | {"attention": lines, **others} for each in LANGUAGES}
    (folder / f"{name}.json").write_text(json.dumps(tables))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_tile_files_cover_every_call(path: Path, language: str) -> None:
    tiles = Tiles.load(language, path.stem)
    for item_bytes in (2, 4):
        for rows in (1, 16, 17, 64, 100_000):
            for requests, head_size in ((1, 64), (8, 128), (1000, 256)):
                sizes = {"item_bytes": item_bytes, "rows": rows, "head_size": head_size}
                assert tiles.attention.of(**sizes).lanes >= 16
                assert tiles.attention_layer.of(**sizes, requests=requests, nodes=16).warps
    for rows in (1, 16, 32, 128, 4096):
        for outputs, gated in ((64, 0), (4096, 1), (6144, 0), (151936, 0)):
            sizes = {"rows": rows, "outputs": outputs, "inputs": 4096, "gated": gated}
            sizes |= {"item_bytes": 2, "one_segment": gated}
            assert tiles.sampling.of(rows=rows).groups >= 1
            for inner, item_bytes in ((512, 1), (768, 2), (64, 4)):
                of_experts = {"item_bytes": item_bytes, "rows": rows, "inner": inner}
                assert tiles.experts.of(**of_experts).loaded.down_columns >= SQUARES.chunk
            for of_linear in (sizes, sizes | {"item_bytes": 1}):
                assert tiles.linear.of(**of_linear).columns >= (16 if gated else SQUARES.chunk)


def test_tile_table_uses_first_matching_line(tmp_path: Path) -> None:
    lines = [
        LINE | {"at_most": {"item_bytes": 2, "rows": 16}, "lanes": 16},
        LINE | {"at_most": {"rows": 40}},
        LINE | {"lanes": 64},
    ]
    write(tmp_path, "some_gpu", lines)
    table = Tiles.load("triton_gpu", "Some GPU", tmp_path).attention
    found = {
        (item_bytes, rows): table.of(item_bytes=item_bytes, rows=rows, head_size=128).lanes
        for item_bytes, rows in [(2, 16), (2, 17), (4, 16), (4, 41)]
    }
    assert found == {(2, 16): 16, (2, 17): 32, (4, 16): 32, (4, 41): 64}


def test_tile_file_with_longest_name_prefix_used(tmp_path: Path) -> None:
    for lanes, name in ((16, MEASURED), (32, "nvidia_h100"), (64, "nvidia_h100_nvl")):
        write(tmp_path, name, [LINE | {"lanes": lanes}])
    sizes = {"item_bytes": 2, "rows": 1, "head_size": 128}
    lanes = {
        gpu: Tiles.load("pallas_gpu", gpu, tmp_path).attention.of(**sizes).lanes
        for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H1000")
    }
    assert list(lanes.values()) == [16, 32, 64, 16]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([LINE | {"lanes": 24}], "attention, line 1: lanes must be a power of two from 16, got 24"),
        ([LINE | {"ones": 8}], "attention, line 1: ones must be a power of two from 16, got 8"),
        ([LINE | {"stages": 0}], "attention, line 1: stages must be at least 1, got 0"),
        ([LINE | {"described": -1}], "line 1: described must be at least 0, got -1"),
        ([LINE, LINE | {"split": 256}], "attention, line 2: tiles must be .*, got .*'split'"),
        ([LINE | {"at_most": {"batch": 8}}], r"line 1: at_most supports .*, got \['batch'\]"),
        ([{"at_most": {}, "lanes": 16}], r"line 1: tiles must be .*, got \['lanes'\]"),
        ([LINE | {"at_most": {"rows": 8}}], "attention: the last line must have no at_most"),
        ([], "attention: the last line must have no at_most"),
    ],
)
def test_tiles_load_rejects_invalid_line_with_location(
    lines: list[dict[str, Any]], why: str, tmp_path: Path
) -> None:
    write(tmp_path, MEASURED, lines)
    with pytest.raises(ValueError, match=f"^{MEASURED}.json, pallas_gpu.*{why}"):
        Tiles.load("pallas_gpu", "NVIDIA H200", tmp_path)


def test_tiles_load_rejects_invalid_attention_layer_line(tmp_path: Path) -> None:
    for name in ("programs", "splits", "stages"):
        write(tmp_path, MEASURED, [LINE], attention_layer=[MIX | {name: 0}])
        fault = f"attention_layer, line 1: {name} must be at least 1, got 0"
        with pytest.raises(ValueError, match=fault):
            Tiles.load("pallas_gpu", "NVIDIA H200", tmp_path)


def test_tiles_load_rejects_invalid_encoder_attention_line(tmp_path: Path) -> None:
    image = {"at_most": {}, "lanes": 64, "warps": 4, "stages": 2, "described": 2, "groups": 2}
    write(tmp_path, MEASURED, [LINE], encoder_attention=[image])
    assert Tiles.load("pallas_gpu", "NVIDIA H200", tmp_path).encoder_attention
    for wrong, told in (
        ({"described": 1}, "described .* 0, 2, .*, got 1"),
        ({"groups": 4}, "got 4"),
    ):
        write(tmp_path, MEASURED, [LINE], encoder_attention=[image | wrong])
        with pytest.raises(ValueError, match=f"encoder_attention, line 1: .*{told}"):
            Tiles.load("pallas_gpu", "NVIDIA H200", tmp_path)


def test_tiles_load_rejects_unknown_and_missing_tables(tmp_path: Path) -> None:
    write(tmp_path, MEASURED, [LINE], softmax=[LINE])
    with pytest.raises(ValueError, match=r"tables must be \['attention', .*\], got .*'softmax'"):
        Tiles.load("pallas_gpu", "NVIDIA H200", tmp_path)


def test_tile_classes_name_existing_kernels() -> None:
    kernels = {path.stem for path in (FOLDER.parent / "triton_gpu").rglob("*.py")}
    assert CLASSES.keys() <= kernels


def test_row_warps_is_power_of_two() -> None:
    """2,560 and 3,072 columns (Qwen3-4B, Qwen3.5-122B-A10B) are no power of two times 512."""
    warps = {row_warps(size) for size in range(16, 20_000, 16)}
    assert warps == {1, 2, 4, MOST_ROW_WARPS}


@pytest.mark.parametrize("change", ["described", "persistent"])
def test_linear_tiles_reject_separate_copies(change: str) -> None:
    lines = [line.tiles for line in Tiles.load("triton_gpu", MEASURED).linear.lines]
    assert {tiles.separate for tiles in lines} == {False, True}  # optional in a file
    tiles = next(tiles for tiles in lines if tiles.separate)
    with pytest.raises(ValueError, match="separate tiles must be without widens if described"):
        replace(tiles, widens=True, **{change: True})


@pytest.mark.parametrize(
    ("depth", "inputs", "expected"),
    [
        (512, 5376, (256, 6)),
        (512, 5120, (512, 3)),
        (512, 5248, (256, 6)),  # both have a partial last step
        (512, 4992, (512, 3)),
        (256, 5248, (256, 3)),
    ],
)
def test_linear_tiles_halve_depth_for_fewer_inputs(
    depth: int, inputs: int, expected: tuple[int, int]
) -> None:
    table = Tiles.load("triton_gpu", MEASURED).linear
    packed = table.of(item_bytes=0.5, rows=1, outputs=16384, gated=0, one_segment=1)
    found = replace(packed, depth=depth, stages=3).dividing(inputs)
    assert (found.depth, found.stages) == expected
    plain = table.of(item_bytes=2, rows=1, outputs=16384, gated=0, one_segment=1)
    assert plain.dividing(inputs) is plain
