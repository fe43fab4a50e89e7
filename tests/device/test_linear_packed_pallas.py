"""The GEMM of packed weights in Pallas with TMA: bits by rows, supported calls, fallback tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.pallas_gpu.gemm import linear_packed_sm90
from kernels.pallas_gpu.gemm.linear_launch import GemmTiling
from kernels.tiles import MEASURED, Tiles
from shared.models.formats.fp8 import Granularity
from shared.models.formats.int4_encoding import Int4Encoding
from shared.spec.reduction_order import SQUARES
from tests.support import linear_segments
from tests.support.linear_kernels import Weights, as_w4a16, as_w8a16, copied, in_bfloat16, tiles

pytestmark = pytest.mark.usefixtures("interpreted")
FORMATS: dict[str, Callable[[int, int], Weights]] = {
    "FP8": partial(as_w8a16, Granularity.BLOCK),
    "INT4": partial(as_w4a16, Int4Encoding(128, "BF16", has_zeros=False)),
    "AWQ": partial(as_w4a16, Int4Encoding(128, "F16", has_zeros=True)),
}
BYTES = {"int4_w4a16": 0.5, "fp8_w8a16": 1}


@pytest.mark.parametrize("format", BYTES)
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_pallas_packed_calls_without_tma_have_fast_tiles(
    format: str, rows: int, is_adapted: bool, is_gated: bool
) -> None:
    """INT4 weights of few rows are the wide side of no product there, all others are."""
    table = Tiles.load("pallas_gpu", MEASURED).linear
    sizes = {"rows": rows, "outputs": 6144, "gated": int(is_gated), "one_segment": 1}
    tiles = table.of(item_bytes=BYTES[format], **sizes)
    how = {"is_gated": is_gated, "is_adapted": is_adapted, "segments": 1, "counters": 0}
    found = GemmTiling.of(rows, 6144, 4096, tiles, format, **how).tiles
    assert tiles.copies_swapped
    assert not found.described
    assert found.swapped == (format == "fp8_w8a16" or rows > 16)
    columns = 32 if is_gated else 64
    assert (found.columns, found.depth, found.warps, found.stages) == (columns, 128, 4, 4)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the rows of each call of `linear_packed_sm90` that is traced."""
    calls, healthy = list[int](), linear_packed_sm90.linear

    def counted(x: Any, *args: Any, **how: Any) -> Any:
        calls.append(len(x))
        return healthy(x, *args, **how)

    monkeypatch.setattr(linear_packed_sm90, "linear", counted)
    return calls


def tiles_of(rows: int, kind: str) -> list[dict[str, int]]:
    """Returns tiles for a call: of all its rows, and of row blocks."""
    found = [{"rows": 64, "stages": stages} for stages in (2, 4)]
    if rows <= 32:
        found += [{"rows": 32, "stages": 2, "depth": 512}]
    elif kind != "gated":
        found += [{"rows": 128, "stages": 3}]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "normed", "gated", "added"])
@pytest.mark.parametrize("rows", [1, 16, 32, 33, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("format", FORMATS)
def test_pallas_packed_rows_bitwise_equal(
    format: str, rows: int, kind: str, packed_calls: list[int]
) -> None:
    """Rows that are neither few nor whole groups fall back."""
    given = {"R": rows, "K": 3072, "N": 896, "kind": kind, "out_type": "bfloat16", "first": 0}
    given |= {"weights_of": FORMATS[format]}
    want = in_bfloat16("pallas", cut=tiles(widens=False), **given)
    cuts = tiles_of(rows, kind)
    for change in cuts:
        got = in_bfloat16("pallas", cut=copied("pallas", kind, **change), **given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(change))
    assert packed_calls == [rows] * (0 if rows % 8 and rows > 8 else len(cuts))


@pytest.mark.gpu
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("rows", [33, 64, 100, 128])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_pallas_packed_rows_match_spec(
    format: str,
    segments: int,
    rows: int,
    tile_rows: int,
    packed_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = linear_segments.product_of(format, "added", rows=rows)
    given = given._replace(stream=linear_segments.in_bfloat16(given.stream))
    want = linear_segments.specified(given, segments, monkeypatch)
    cut = copied("pallas", "added", separate=True, rows=tile_rows, stages=4)
    got = linear_segments.added("pallas", given, cut, segments, "bfloat16")[0]
    has_space = segments == 1 or tile_rows == 64 or rows <= 64 or format != "FP8"
    assert packed_calls == [rows] * (rows % 8 == 0 and has_space)
    # The result is rounded to bfloat16, and tensor cores add in another order.
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [2816, 4096, 5376])
@pytest.mark.parametrize("kind", ["plain", "added", "normed", "gated"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize(("group", "has_zeros"), [(32, False), (32, True), (64, False)])
def test_pallas_int4_groups_bitwise_equal(
    group: int, has_zeros: bool, rows: int, kind: str, inputs: int, packed_calls: list[int]
) -> None:
    """A row of 2,816 or 5,376 inputs has 44 or 84 sums of squares, filled to 48 or 88."""
    encoding = Int4Encoding(group, "F16" if has_zeros else "BF16", has_zeros=has_zeros)
    given = {"R": rows, "K": inputs, "N": 896, "kind": kind, "out_type": "bfloat16", "first": 0}
    given |= {"weights_of": partial(as_w4a16, encoding)}
    want = in_bfloat16("pallas", cut=tiles(widens=False), **given)
    cuts = [change for change in tiles_of(rows, kind) if inputs % change.get("depth", 256) == 0]
    for change in cuts:
        got = in_bfloat16("pallas", cut=copied("pallas", kind, **change), **given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(change))
    assert packed_calls == [rows] * len(cuts)


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_pallas_int4_groups_match_spec(
    rows: int, segments: int, packed_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = linear_segments.product_of("INT4 in groups of 32", "added", rows=rows, inputs=4096)
    given = given._replace(stream=linear_segments.in_bfloat16(given.stream))
    want = linear_segments.specified(given, segments, monkeypatch)
    cut = copied("pallas", "added", separate=True, rows=32, stages=4)
    got = linear_segments.added("pallas", given, cut, segments, "bfloat16")[0]
    assert packed_calls == [rows]
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)  # as above


def taken(
    rows: int,
    tile_rows: int,
    kind: str = "added",
    *,
    format: str = "fp8_w8a16",
    inputs: int = 4096,
    group: int = 128,
) -> bool:
    """Returns whether the kernel supports a call with 4,096 outputs."""
    of: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    stored = 2 * 4096 if kind == "gated" else 4096
    words = of((2, stored, inputs // (4 if format == "fp8_w8a16" else 8)), dtype=jnp.int32)
    chunks = of((rows, inputs // SQUARES.chunk), dtype=jnp.float32)
    return linear_packed_sm90.takes(
        of((rows, inputs)),
        words,
        of((2, stored // 128 if format == "fp8_w8a16" else stored, inputs // group)),
        format=format,
        outputs=4096,
        first=0,
        out_type=jnp.bfloat16,
        squares=chunks if kind in ("normed", "gated") else None,
        is_plain=True,
        added=of((rows, 4096)) if kind == "added" else None,
        order=SQUARES,
        segments=1,
        tiles=copied("pallas", kind, rows=tile_rows, stages=4),
    )


@pytest.mark.parametrize(
    ("rows", "tile_rows", "expected"),
    [
        (1, 16, True),
        (8, 16, True),
        (12, 16, False),
        (33, 64, False),
        (64, 32, False),
        (40, 64, True),
        (64, 64, True),
        (80, 64, True),
        (96, 128, True),
        (100, 128, False),
        (128, 64, True),
        (256, 128, True),
    ],
)
def test_packed_sm90_takes_whole_groups_of_rows(
    rows: int, tile_rows: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_packed_sm90, "has_mosaic", lambda: True)
    assert taken(rows, tile_rows) == expected


def test_packed_sm90_rejects_blocks_beyond_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer stages than those of the tiles are supported, one is not."""
    monkeypatch.setattr(linear_packed_sm90, "has_mosaic", lambda: True)
    assert taken(128, 128, "normed")
    assert not taken(128, 128, "normed", inputs=8192)
    assert taken(128, 128, "gated", format="int4_w4a16")
    assert not taken(128, 128, "gated")
    assert taken(128, 64, "gated")


@pytest.mark.parametrize(
    ("format", "group", "inputs", "expected"),
    [
        ("int4_w4a16", 32, 2816, True),
        ("int4_w4a16", 64, 4096, True),
        ("int4_w4a16", 16, 4096, False),
        ("int4_w4a16", 256, 4096, False),
        ("int4_w4a16", 32, 2176, False),  # no whole steps
        ("fp8_w8a16", 64, 4096, False),
    ],
)
def test_packed_sm90_takes_int4_groups(
    format: str, group: int, inputs: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_packed_sm90, "has_mosaic", lambda: True)
    assert taken(8, 16, format=format, group=group, inputs=inputs) == expected
