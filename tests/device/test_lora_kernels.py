"""Kernels of LoRA adapters against the specification: on a GPU, or interpreted.

And that a row's bits depend on neither the rows beside it nor their adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.pallas_gpu.gemm import linear_mainloop
from kernels.pallas_gpu.gemm import lora as lora_kernels
from kernels.shrink_tiles import (
    FEW_ROWS,
    ShrinkTiles,
    adapters_at_once,
    is_within_gemm,
    programs_ahead,
)
from kernels.tiles import Tiles
from shared.models.formats.fp8 import Granularity
from shared.models.formats.int4_encoding import Int4Encoding
from shared.spec.lora import AdapterWeights, RowAdapters
from shared.spec.reduction_order import SHRINK
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages, share_arithmetic
from tests.support.linear_kernels import Weights, as_w4a16, as_w8a16, normal, tiles
from tests.support.lora_kernels import PARTS, adapters, multiplied, specified

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = [("product", True), ("normed", False), ("gated", False), ("gated", True), ("added", True)]
each_case = pytest.mark.parametrize(
    ("language", "case"), in_languages(CASES, [("normed", False), ("gated", True)]), ids=str
)
each_language = pytest.mark.parametrize("language", KERNELS)
INPUTS = SHRINK.chunk + 96
"""Inputs of two chunks, of which the second is short."""
HUGE = 2
"""Adapter slot with huge weights, some of which are NaN."""

Given = tuple[np.ndarray, np.ndarray, RowAdapters]


def given(kind: str, rows: int, num: int, rank: int) -> Given:
    """Returns rows, a weight and adapters; some rows have none."""
    x, weight = normal(0, rows, INPUTS), normal(1, sum(PARTS[kind]), INPUTS) / 8
    slots = np.arange(rows) * 3 % (num + 1)
    return x, weight, RowAdapters(adapters(num, rank, PARTS[kind], INPUTS), slots)


def with_huge(weights: AdapterWeights) -> AdapterWeights:
    """Returns the adapters with one that is broken."""
    a, b = weights.a.copy(), weights.b.copy()
    a[HUGE - 1] *= 1e30
    b[HUGE - 1] *= 1e30
    b[HUGE - 1, 0] = np.nan
    return replace(weights, a=a, b=b)


@each_case
@pytest.mark.parametrize("rank", [16, pytest.param(64, marks=pytest.mark.matrix)])
def test_adapted_products_match_spec(case: tuple[str, bool], rank: int, language: str) -> None:
    kind, is_swapped = case
    x, weight, lora = given(kind, 20, 6, rank)
    got = multiplied(language, kind, x, weight, lora, tiles(swapped=is_swapped))
    want = specified(kind, x, weight, lora)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # order of the sums
    others = replace(lora, slots=np.roll(lora.slots, 1))
    changed = np.abs(specified(kind, x, weight, others) - want).max(axis=1)
    assert changed[lora.slots != others.slots].min() > 0.1


@each_language
def test_forty_adapters_match_spec(language: str) -> None:
    """A batch has slots 1 and 33, which share a bit of a tile, and slots without such a row."""
    x, weight, lora = given("product", 20, 40, 16)
    assert {1, 33} < set(lora.slots)
    got = multiplied(language, "product", x, weight, lora, tiles())
    np.testing.assert_allclose(got, specified("product", x, weight, lora), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("language", "rows"), in_languages([1, 3, 20, 130, 512], [130]), ids=str)
def test_adapted_row_bits_independent_of_neighbours(
    rows: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours have a broken adapter; rows are alone, few or many."""
    share_arithmetic(monkeypatch)
    x, weight, lora = given("normed", rows, 3, 16)
    lora = RowAdapters(with_huge(lora.weights), (lora.slots + 1) % 4)
    many = multiplied(language, "normed", x, weight, lora, tiles(rows=64))
    without = multiplied(language, "normed", x, weight, None, tiles(rows=64))
    checked = [row for row in range(min(rows, 4)) if lora.slots[row] != HUGE]
    assert rows < 4 or len(checked) == 3
    for row in checked:
        at = slice(row, row + 1)
        own = replace(lora, slots=lora.slots[at])
        (alone,) = multiplied(language, "normed", x[at], weight, own, tiles())
        assert alone.tobytes() == many[row].tobytes()
        assert (alone.tobytes() == without[row].tobytes()) == (lora.slots[row] == 0)
    plain = lora.slots == 0
    assert many[plain].tobytes() == without[plain].tobytes()


@each_language
@pytest.mark.parametrize("num", [1, 8])
def test_rows_without_adapters_keep_plain_bits(num: int, language: str) -> None:
    x, weight, lora = given("added", 20, num, 16)
    lora = replace(lora, slots=np.zeros(len(x), int))
    weight[0] = -0.0
    got = multiplied(language, "added", x, weight, lora, tiles())
    want = multiplied(language, "added", x, weight, None, tiles())
    assert got.tobytes() == want.tobytes()


def test_shrink_within_gemm_keeps_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    x, weight, lora = given("normed", 20, 3, 32)
    within, apart = (
        multiplied("pallas", "normed", x, weight, lora, tiles(rows=32), may_join=may_join)
        for may_join in (True, False)
    )
    assert within.tobytes() == apart.tobytes()


@pytest.mark.skipif(ON_GPU, reason="reads the order of a trace")
@pytest.mark.parametrize("kind", PARTS)
def test_sums_within_gemm_load_after_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def record(module: Any, name: str) -> None:
        real = getattr(module, name)

        def recorded(*args: Any) -> Any:
            found.append(name)
            return real(*args)

        monkeypatch.setattr(module, name, recorded)

    record(linear_mainloop, "wait_for_sums")
    record(lora_kernels, "_load_sums")
    x, weight, adapted = given(kind, 3, 2, 16)
    multiplied("pallas", kind, x, weight, adapted, tiles(rows=32))
    assert found[0] == "wait_for_sums"
    assert "_load_sums" in found
    found.clear()
    multiplied("pallas", kind, x, weight, adapted, tiles(rows=32), may_join=False)
    assert set(found) == {"_load_sums"}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(("kind", "rows"), [("normed", 20), ("gated", 3), ("added", 130)], ids=str)
def test_adapted_products_bitwise_equal_in_languages(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    x, weight, lora = given(kind, rows, 3, 32)
    found = [
        multiplied(language, kind, x, weight, lora, cut, "bfloat16")
        for language, cut in (
            ("pallas", tiles(rows=32)),
            ("triton", tiles(rows=32)),
            ("triton", tiles(columns=128, swapped=False)),
        )
    ]
    for got in found[1:]:
        np.testing.assert_array_equal(got, found[0])


FORMATS: dict[str, Callable[[int, int], Weights]] = {
    "FP8": partial(as_w8a16, Granularity.BLOCK),
    "FP8 by channels": partial(as_w8a16, Granularity.CHANNEL),
    "INT4": partial(as_w4a16, Int4Encoding(128, "BF16", has_zeros=False)),
    "AWQ": partial(as_w4a16, Int4Encoding(128, "F16", has_zeros=True)),
}


@pytest.mark.parametrize(("language", "format"), in_languages(FORMATS, ["FP8"]))
def test_adapted_packed_weights_equal_widened_ones(
    format: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are dequantised in registers, or in memory before the product."""
    share_arithmetic(monkeypatch)
    weights, parts = FORMATS[format](256, 256), (128, 128)
    x, lora = normal(0, 20, 256), adapters(3, 16, parts, 256)
    rows = RowAdapters(lora, np.arange(20) % 4)
    in_memory, in_registers, plain = (
        multiplied(language, "gated", x, weights, own, cut, "bfloat16")
        for own, cut in (
            (rows, tiles(depth=32)),
            (rows, tiles(widens=False)),
            (None, tiles(widens=False)),
        )
    )
    np.testing.assert_allclose(in_registers, in_memory, rtol=2**-7)  # depth of a step
    np.testing.assert_array_equal(in_registers[::4], plain[::4])
    assert (np.abs(in_registers - plain).max(axis=1) > 0.1).sum() == 15


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="of the tiles of a GPU")
@pytest.mark.parametrize(("num", "rank"), [(8, 16), (1, 64)])
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("counts", [(512, 130, 40, 20, 9, 1), (2048, 300)], ids=["few", "many"])
def test_adapted_tuned_tiles_bitwise_equal(
    counts: tuple[int, ...], kind: str, num: int, rank: int
) -> None:
    """Each row has the same bits in both languages, for 1 to 2048 rows, beside a broken adapter.

    Rows without an adapter have those of a GEMM without adapters, which may run by WGMMA.
    """
    parts, K = {"gated": (6144, 6144), "added": (4096,)}.get(kind, (4096, 1024, 1024)), 4096
    x, weight = normal(0, counts[0], K), normal(1, sum(parts), K) / 64
    weights, slots = adapters(num, rank, parts, K), np.arange(1, len(x) + 1) % (num + 1)
    healthy, want = slots != HUGE, None
    for language in KERNELS:
        table = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name()).linear
        outputs = sum(parts) // (2 if kind == "gated" else 1)
        for rows in counts:
            sizes = {"outputs": outputs, "gated": int(kind == "gated"), "one_segment": 1}
            cut = table.of(item_bytes=2, rows=rows, **sizes)
            lora = RowAdapters(weights, slots[:rows])
            run = partial(multiplied, language, kind, x[:rows], weight, lora, cut, "bfloat16")
            got = run()
            if want is None:  # of whole adapters
                want, weights = got, with_huge(weights) if num >= HUGE else weights
            same = healthy[:rows]
            np.testing.assert_array_equal(
                got[same], want[:rows][same], err_msg=f"{language}, {cut}"
            )
            if language == "pallas" and rows <= FEW_ROWS:  # the shrink as a kernel
                apart = run(may_join=False)
                np.testing.assert_array_equal(apart[same], want[:rows][same], err_msg=f"{cut}")
            bare = multiplied(language, kind, x[:rows], weight, None, cut, "bfloat16")
            own = slots[:rows] == 0
            np.testing.assert_array_equal(got[own], bare[own], err_msg=f"{language}, {cut}")


@pytest.mark.parametrize(("rows", "splits"), [(1, 24), (128, 24), (129, 1), (4096, 1)])
def test_few_rows_split_inputs_among_programs(rows: int, splits: int) -> None:
    cut = ShrinkTiles.of(rows, 48, 12288, SHRINK)
    assert (cut.splits, cut.splits * cut.chunks) == (splits, 24)
    assert 48 % cut.ranks == 0
    assert SHRINK.chunk % (2 * cut.depth) == 0


def test_few_rows_shrink_within_gemm() -> None:
    assert [is_within_gemm(rows, 192) for rows in (1, 32, 33)] == [True, True, False]
    assert not is_within_gemm(1, 257)


@pytest.mark.parametrize(("blocks", "programs"), [(64, 24), (120, 12), (132, 4), (384, 12)])
def test_shrink_takes_idle_multiprocessors(blocks: int, programs: int) -> None:
    assert programs_ahead(24, blocks) == programs


def test_few_rows_load_adapters_of_64_ranks_together() -> None:
    assert [adapters_at_once(8, rank) for rank in (16, 32, 64, 256)] == [4, 2, 1, 1]
    assert adapters_at_once(3, 16) == 3
