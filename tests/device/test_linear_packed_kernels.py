"""GEMMs with packed weights in `linear_swap_ab`: bits of the ordinary kernel.

Of 33 to 256 rows, and of few rows by `mma.sync`, or with INT4 scales of less than 128 inputs or a
partial last step.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from kernels.tiles import LinearTiles
from shared.models.formats import four_bit
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


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["plain", "normed", "gated", "biased, times, added"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("format", WEIGHTS)
def test_triton_packed_mma_sync_bitwise_equal(
    format: str,
    rows: int,
    kind: str,
    copied_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that share a multiprocessor multiply by another instruction."""
    given = {"R": rows, "K": 3072, "N": 896, "kind": kind, "out_type": "bfloat16", "first": 0}
    given |= {"weights_of": WEIGHTS[format]}
    want = in_bfloat16("triton", cut=tiles(widens=False), **given)
    for multiprocessors in (1, 132):
        module = KERNELS["triton"]["linear"]
        monkeypatch.setattr(module, "_multiprocessors", lambda _, each=multiprocessors: each)
        for depth in (256, 512):
            cut = copied("triton", kind, rows=16, depth=depth, stages=3)
            for one, other in zip(in_bfloat16("triton", cut=cut, **given), want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{cut}, {multiprocessors}")
    assert copied_calls == [8] * 4


GROUP_TILES = ((16, 256, 4), (16, 512, 3), (32, 256, 5), (128, 256, 3))
"""Rows, inputs and stages of tiles for INT4 scales of less than 128 inputs."""


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(2816, 896), (2112, 832), (2240, 840)])
@pytest.mark.parametrize("kind", ["gated", "added", "biased, normed", "biased, times, added"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 100])
@pytest.mark.parametrize(
    ("group", "has_zeros"), [(32, False), (32, True), (64, False), (128, True)]
)
def test_triton_int4_groups_bitwise_equal(
    group: int,
    has_zeros: bool,
    rows: int,
    kind: str,
    inputs: int,
    outputs: int,
    copied_calls: list[int],
) -> None:
    """The last step of 2,112 or 2,240 inputs is partial, of blocks of 128 and of 256 inputs."""
    encoding = Int4Encoding(group, "F16" if has_zeros else "BF16", has_zeros=has_zeros)
    given = {"R": rows, "K": inputs, "N": outputs, "kind": kind, "out_type": "bfloat16", "first": 0}
    given |= {"weights_of": partial(as_w4a16, encoding)}
    want = in_bfloat16("triton", cut=tiles(widens=False), **given)
    assert not copied_calls
    sizes = [size for size in GROUP_TILES if rows <= size[0]]
    for most, depth, stages in sizes:
        cut = copied("triton", kind, rows=most, depth=depth, stages=stages)
        for one, other in zip(in_bfloat16("triton", cut=cut, **given), want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(cut))
    assert len(copied_calls) == len(sizes)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("inputs", "segments"), [(4096, 2), (2816, 1), (2112, 1)])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_triton_int4_groups_match_spec(
    rows: int,
    inputs: int,
    segments: int,
    copied_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    format = "INT4 in groups of 32"
    given = product_of(format, "added", rows=rows, inputs=inputs)
    want = added("triton", given, cut_of(format), segments)
    sizes = [size for size in GROUP_TILES if rows <= size[0]]
    for most, depth, stages in sizes:
        for separate in (False, True):
            how = {"rows": most, "depth": depth, "stages": stages}
            cut = replace(copied("triton", "added", **how), separate=separate)
            for one, other in zip(added("triton", given, cut, segments), want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=str(cut))
    assert len(copied_calls) == 2 * len(sizes)
    spec = specified(given, segments, monkeypatch)
    np.testing.assert_allclose(want[0], spec, rtol=1e-5, atol=1e-5)  # sums in other orders


@pytest.mark.parametrize(
    ("inputs", "scales_in", "kind", "segments", "taken"),
    [
        (2816, 22, torch.bfloat16, 1, True),
        (2816, 44, torch.bfloat16, 1, True),
        (2816, 88, torch.bfloat16, 1, True),
        (2816, 88, torch.int32, 1, True),
        (2816, 176, torch.bfloat16, 1, False),  # of 16 inputs
        (2816, 1, torch.int32, 1, False),
        (2816, 88, torch.float32, 1, False),
        (4096, 128, torch.bfloat16, 2, True),
        (2816, 88, torch.bfloat16, 2, False),
        (2112, 68, torch.bfloat16, 1, True),  # stored as 2,176 inputs
        (2112, 34, torch.bfloat16, 1, True),
        (2112, 17, torch.bfloat16, 1, False),  # not whole int32
        (2112, 17, torch.int32, 1, True),
        (2052, 68, torch.bfloat16, 1, False),  # rows are not copied by TMA
    ],
    ids=str,
)
def test_triton_packed_takes_int4_groups(
    inputs: int,
    scales_in: int,
    kind: torch.dtype,
    segments: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = KERNELS["triton"]["linear"].linear_swap_ab
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)
    found = module.takes(
        torch.empty((8, inputs), dtype=torch.bfloat16),
        torch.empty((896, four_bit.padded(inputs) // four_bit.PARTS), dtype=torch.int32),
        torch.empty((896, scales_in), dtype=kind),
        format="int4_w4a16",
        is_gated=False,
        segments=segments,
        tiles=copied("triton", "added", rows=16),
    )
    assert found == taken


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


@pytest.mark.parametrize(
    ("format", "rows", "programs", "is_sync"),
    [
        ("INT4", 8, 133, True),
        ("INT4", 8, 132, False),
        ("FP8", 9, 384, False),
        (None, 1, 384, False),
    ],
)
def test_triton_packed_programs_that_share_use_mma_sync(
    format: str | None, rows: int, programs: int, is_sync: bool
) -> None:
    launch = import_module("kernels.triton_gpu.gemm.linear_launch")
    stored, scales = torch.empty((896, 3072), dtype=torch.bfloat16), None
    if format is not None:
        per = 4 if format == "FP8" else 8
        stored = torch.empty((896, 3072 // per), dtype=torch.int32)
        scales = torch.empty((7 if format == "FP8" else 896, 24), dtype=torch.bfloat16)
    names = {"FP8": "fp8_w8a16", "INT4": "int4_w4a16", None: "plain"}
    tiling = launch.GemmTiling.of(
        torch.empty((rows, 3072), dtype=torch.bfloat16),
        stored,
        scales,
        copied("triton", "added", rows=16),
        format=names[format],
        is_gated=False,
        is_wide=False,
        is_copied=True,
        is_adapted=False,
        segments=1,
    )
    assert tiling.is_sync(programs, 132) == is_sync
