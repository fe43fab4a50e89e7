"""GEMMs of few rows with packed weights in Pallas: tiles of calls without TMA, on an H200."""

import pytest

from kernels.pallas_gpu.gemm.linear_launch import GemmTiling
from kernels.tiles import MEASURED, Tiles

BYTES = {"int4_w4a16": 0.5, "fp8_w8a16": 1}


@pytest.mark.parametrize("format", BYTES)
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_pallas_packed_calls_without_tma_have_fast_tiles(
    format: str, rows: int, is_adapted: bool
) -> None:
    """INT4 weights of few rows are the wide side of no product there, all others are."""
    table = Tiles.load("pallas_gpu", MEASURED).linear
    sizes = {"rows": rows, "outputs": 6144, "gated": 0, "one_segment": 1}
    tiles = table.of(item_bytes=BYTES[format], **sizes)
    how = {"is_gated": False, "is_adapted": is_adapted, "segments": 1, "counters": 0}
    found = GemmTiling.of(rows, 6144, 4096, tiles, format, **how).tiles
    assert tiles.copies_packed
    assert not found.described
    assert found.swapped == (format == "fp8_w8a16" or rows > 16)
    assert (found.columns, found.depth, found.warps, found.stages) == (64, 128, 4, 4)
