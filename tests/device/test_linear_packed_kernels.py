"""GEMMs of 33 to 256 rows with packed weights in `linear_swap_ab`: bits of the ordinary kernel."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kernels.tiles import LinearTiles
from shared.models.formats.fp8 import Granularity
from shared.models.formats.int4_encoding import Int4Encoding
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU
from tests.support.linear_kernels import KINDS, as_w4a16, as_w8a16, copied, in_bfloat16, tiles
from tests.support.linear_segments import added, cut_of, product_of, specified

pytestmark = pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
on_gpu = pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
WEIGHTS = {
    "FP8": partial(as_w8a16, Granularity.BLOCK),
    "INT4": partial(as_w4a16, Int4Encoding(128, "BF16", has_zeros=False)),
    "AWQ": partial(as_w4a16, Int4Encoding(128, "F16", has_zeros=True)),
}
ROWS = (33, 64, 100, 128, 200)
TILES = {
    "FP8": ((32, 256, 5), (64, 256, 4), (128, 256, 2)),
    "INT4": ((32, 256, 6), (64, 256, 5), (128, 256, 3)),
}
"""Rows, inputs and stages of tiles that fill a multiprocessor."""


def cuts(format: str, kind: str) -> list[LinearTiles]:
    sizes = TILES["FP8" if format == "FP8" else "INT4"]
    return [copied("triton", kind, rows=x, depth=y, stages=z) for x, y, z in sizes]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", WEIGHTS)
def test_triton_packed_many_rows_bitwise_equal(
    format: str, rows: int, kind: str, copied_calls: list[int]
) -> None:
    given = {"R": rows, "K": 3072, "N": 896, "kind": kind, "out_type": "bfloat16", "first": 0}
    given |= {"weights_of": WEIGHTS[format]}
    want = in_bfloat16("triton", cut=tiles(widens=False), **given)
    assert not copied_calls
    for cut in cuts(format, kind):
        for one, other in zip(in_bfloat16("triton", cut=cut, **given), want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(cut))
    most = 64 if rows <= 64 else 128
    assert copied_calls == [min(cut.rows, most) for cut in cuts(format, kind)]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", ["FP8", "INT4", "AWQ"])
def test_triton_packed_many_rows_match_spec(
    format: str,
    rows: int,
    segments: int,
    copied_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = product_of(format, "added", rows=rows)
    want = added("triton", given, cut_of(format), segments)
    for cut in cuts(format, "added"):
        for separate in (False, True):
            found = added("triton", given, replace(cut, separate=separate), segments)
            for one, other in zip(found, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=str(cut))
    assert len(copied_calls) == 2 * len(cuts(format, "added"))
    spec = specified(given, segments, monkeypatch)
    np.testing.assert_allclose(want[0], spec, rtol=1e-5, atol=1e-5)  # sums in other orders


@pytest.mark.parametrize(
    ("format", "rows", "change", "taken"),
    [
        ("fp8_w8a16", 16, {"rows": 16}, True),
        ("fp8_w8a16", 17, {"rows": 16}, False),
        ("fp8_w8a16", 300, {"rows": 32}, True),
        ("fp8_w8a16", 300, {"rows": 128}, True),
        ("fp8_w8a16", 300, {"rows": 256}, False),
        ("fp8_w8a16", 16, {"depth": 128}, False),
    ],
    ids=str,
)
def test_triton_packed_takes_tiles_of_many_rows(
    format: str, rows: int, change: dict[str, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = KERNELS["triton"]["linear"].linear_swap_ab
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)
    found = module.takes(
        torch.empty((rows, 3072), dtype=torch.bfloat16),
        torch.empty((896, 768), dtype=torch.int32),
        torch.empty((7, 24), dtype=torch.bfloat16),
        format=format,
        is_gated=False,
        segments=1,
        tiles=copied("triton", "added", **change),
    )
    assert found == taken
