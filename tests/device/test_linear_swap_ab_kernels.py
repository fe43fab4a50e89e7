"""GEMMs of few rows in bfloat16, copied by TMA with swap-AB: bits of the ordinary kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SQUARES
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU
from tests.support.linear_kernels import KINDS, check_close, copied, in_bfloat16, normal, tiles
from tests.support.linear_segments import added, cut_of, product_of

pytestmark = pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
on_gpu = pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
FEW, MANY = (1, 2, 8, 16, 17, 32), (33, 64, 100, 128)
SIZES = ((16, 128, 2), (16, 128, 6), (16, 256, 2), (32, 128, 4), (32, 256, 3))
LARGE_SIZES = ((32, 128, 5), (64, 128, 6), (128, 128, 4), (128, 256, 2))
"""Rows, inputs and stages of tiles."""


def cuts(rows: int, kind: str) -> list[LinearTiles]:
    """Returns tiles for a call: of all its rows, and of row blocks."""
    sizes = LARGE_SIZES if rows > 32 else [size for size in SIZES if rows <= size[0]]
    return [copied("triton", kind, rows=x, depth=y, stages=z) for x, y, z in sizes]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(3072, 832), (2880, 840)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", FEW + MANY)
def test_triton_swap_ab_bitwise_equal(
    rows: int, kind: str, inputs: int, outputs: int, copied_calls: list[int]
) -> None:
    given = {"R": rows, "K": inputs, "N": outputs, "kind": kind, "out_type": "bfloat16", "first": 0}
    want = in_bfloat16("triton", cut=tiles(), **given)
    assert not copied_calls
    for cut in cuts(rows, kind):
        for one, other in zip(in_bfloat16("triton", cut=cut, **given), want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(cut))
    assert len(copied_calls) == len(cuts(rows, kind))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 32, 100])
def test_triton_swap_ab_segments_bitwise_equal(
    rows: int, separate: bool, copied_calls: list[int]
) -> None:
    given = product_of("plain", "added", rows=rows, inputs=4096, outputs=896)
    want = added("triton", given, cut_of("plain"), 2)
    for cut in cuts(rows, "added"):
        found = added("triton", given, replace(cut, separate=separate), 2)
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(cut))
    assert len(copied_calls) == len(cuts(rows, "added"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [3, 20])
def test_triton_swap_ab_keeps_nan_in_its_row(rows: int, copied_calls: list[int]) -> None:
    given = product_of("plain", "added", rows=rows, inputs=3072, outputs=896)
    x = given.x.copy()
    x[1, 5] = np.nan
    others = np.arange(rows) != 1
    for cut in cuts(rows, "added"):
        want = added("triton", given, cut, 1)
        found = added("triton", given._replace(x=x), cut, 1)
        assert np.isnan(found[0][1]).all()
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(one[others], other[others], err_msg=str(cut))
    assert len(copied_calls) == 2 * len(cuts(rows, "added"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("rows", [1, 32])
def test_triton_swap_ab_waits_for_previous_gemm(rows: int, is_added: bool) -> None:
    """GEMMs of a captured graph, each of the result of the one before, overlap and stay equal."""
    product = KERNELS["triton"]["linear"].product
    size, layers, replays = 2048, 24, 20
    weights = torch.from_numpy(normal(1, layers, size, size) / size**0.5).bfloat16().cuda()
    x = torch.from_numpy(normal(0, rows, size)).bfloat16().cuda()
    how = {"format": "plain", "out_type": torch.bfloat16, "order": SQUARES}

    def chained(cut: LinearTiles) -> torch.Tensor:
        out = x
        for weight in weights:
            stream = out if is_added else None
            out = product(out, weight, None, added=stream, tiles=cut, **how)[0]
        return out

    want = chained(tiles())
    cut = copied("triton", "plain", rows=32, depth=128, stages=4)
    assert torch.equal(chained(cut), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chained(cut)
    for _ in range(replays):
        found.zero_()
        graph.replay()
        assert torch.equal(found, want)


@pytest.mark.parametrize(("kind", "out_type"), [("added", "float32"), ("adapted", "bfloat16")])
@pytest.mark.parametrize("rows", [1, 20])
def test_triton_swap_ab_tiles_without_tma_bitwise_equal(
    rows: int, kind: str, out_type: str, copied_calls: list[int]
) -> None:
    """Adapters have the ordinary kernel everywhere, and all calls where no GPU has WGMMA."""
    given = product_of("plain", kind, rows=rows)
    want = added("triton", given, cut_of("plain"), 1, out_type)
    found = added("triton", given, copied("triton", kind, rows=32, depth=128), 1, out_type)
    check_close(found, want)
    assert len(copied_calls) == (ON_GPU and kind != "adapted")


@pytest.mark.parametrize(
    ("rows", "change", "weight", "segments", "taken"),
    [
        (16, {"rows": 16}, torch.bfloat16, 1, True),
        (17, {"rows": 16}, torch.bfloat16, 1, False),
        (300, {"rows": 32}, torch.bfloat16, 1, True),
        (16, {"depth": 128}, torch.bfloat16, 2, True),
        (16, {"depth": 2048}, torch.bfloat16, 1, True),  # the last step is partial
        (16, {"depth": 2048}, torch.bfloat16, 2, False),
        (16, {}, torch.float32, 1, False),
    ],
    ids=str,
)
def test_triton_swap_ab_takes_bfloat16(
    rows: int,
    change: dict[str, int],
    weight: torch.dtype,
    segments: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = KERNELS["triton"]["linear"].linear_swap_ab
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)
    found = module.takes(
        torch.empty((rows, 3072), dtype=torch.bfloat16),
        torch.empty((896, 3072), dtype=weight),
        None,
        format="plain",
        is_gated=False,
        segments=segments,
        tiles=copied("triton", "added", **change),
    )
    assert found == taken
