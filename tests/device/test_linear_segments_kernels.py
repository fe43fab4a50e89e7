"""GEMMs with their inputs in segments: equal bits in one program and in separate programs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import torch_impl.ops
from kernels.tiles import LinearTiles, Tiles
from shared.spec import reduction_order
from shared.spec.linear import Matrix
from shared.spec.reduction_order import LinearOrder
from tests.support.kernels import (
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    in_languages,
    in_pallas,
    share_arithmetic,
)
from tests.support.linear_segments import (
    FACTOR,
    FORMATS,
    INPUTS,
    OUTPUTS,
    added,
    calls_of,
    cut_of,
    product_of,
    specified,
)
from torch_impl.ops.gemm import linear

pytestmark = pytest.mark.usefixtures("interpreted")
CELLS = [(format, "added") for format in FORMATS] + [("plain", "biased"), ("INT4", "biased")]
CELLS += [(format, "adapted") for format in ("plain", "FP8")]
CELLS += [(format, "alone") for format in ("FP8", "INT4")]
each_cell = pytest.mark.parametrize(
    ("language", "cell"), in_languages(CELLS, [("INT4", "added"), ("INT4", "alone")]), ids=str
)


def cuts(format: str, language: str) -> list[Any]:
    """Tiles of one program and of separate programs; W8A8 has only wide ones."""
    wide = {"swapped": False, "rows": 64}
    found = [cut_of(format), cut_of(format, separate=True)]
    found += [cut_of(format, **wide), cut_of(format, separate=True, **wide)]
    if format in ("plain", "W8A8"):
        copied = wide | {"described": True}
        found += [cut_of(format, persistent=language == "pallas", **copied)]
        found += [cut_of(format, persistent=language == "pallas" or format == "plain", **copied)]
    else:
        narrow = {"swapped": False, "rows": 16, "stages": 3}
        found += [cut_of(format, separate=True, **narrow), cut_of(format, **narrow)]
    return found


@each_cell
def test_linear_segments_match_spec(
    cell: tuple[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, kind = cell
    given = product_of(format, kind).of_rows(20)
    want = specified(given, 2, monkeypatch)
    # Float32 sums in other orders, of at most 1,024 terms and of numbers up to 10. An input of an
    # adapter is rounded to bfloat16 in the kernels.
    tolerance = 1e-2 if kind == "adapted" else 1e-5
    if format == "W8A8" and not INTERPRET:
        tolerance = 1e-3  # tensor cores keep fewer bits of FP8 sums: 1.6e-4 off on an H200
    for cut in cuts(format, language)[:3]:
        got = added(language, given, cut, 2)[0]
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@each_cell
def test_linear_segments_bits_independent_of_programs(
    cell: tuple[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    format, kind = cell
    whole = product_of(format, kind)
    want = added(language, whole, cut_of(format), 2)
    assert (want[0] != added(language, whole, cut_of(format), 1)[0]).any()
    for rows, cut in zip((1, 20, 70, 3, 40), cuts(format, language)[1:], strict=True):
        got = added(language, whole.of_rows(rows), cut, 2)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other[:rows], err_msg=f"{cut}, {rows}")


COPIED = ("FP8", "INT4", "AWQ")
"""Formats of `linear_swap_ab`."""


@pytest.fixture
def copied_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Returns the launches of `linear_swap_ab`, see `calls_of`."""
    return calls_of(monkeypatch, "linear_swap_ab")


def copied(format: str, *, separate: bool) -> LinearTiles:
    how = {"rows": 32, "depth": 256, "stages": 3, "described": True}
    return cut_of(format, separate=separate, **how)


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(("is_normed", "has_norm"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(
    ("format", "kind"),
    [*((x, "added") for x in COPIED), ("INT4", "biased"), ("INT4", "alone"), ("FP8", "alone")],
)
def test_triton_packed_segments_bitwise_equal(
    format: str,
    kind: str,
    rows: int,
    is_normed: bool,
    has_norm: bool,
    copied_calls: list[tuple[int, bool]],
) -> None:
    """GEMMs of different rows in turn, with the same counters, have the ordinary kernel's bits."""
    first = product_of(format, kind, rows=rows, inputs=4096, outputs=896)
    second = first._replace(x=np.ascontiguousarray(first.x[:, ::-1]))
    arrivals = torch.zeros(14, dtype=torch.int32, device="cuda")
    run = partial(added, "triton", is_normed=is_normed, has_norm=has_norm)
    for segments in (2, 4):
        wants = [run(x, cut_of(format), segments) for x in (first, second)]
        assert (wants[0][0] != wants[1][0]).any()
        cuts = [copied(format, separate=separate) for separate in (True, False)]
        cuts += [replace(cut, depth=512, stages=2) for cut in cuts]
        for cut in cuts:
            for given, want in zip((first, second), wants, strict=True):
                got = run(given, cut, segments, arrivals=arrivals)
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=f"{cut}, {segments}")
            assert not arrivals.any()
    assert copied_calls == [(x, y) for x in (2, 4) for y in (True, True, False, False) * 2]


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("format", COPIED)
@pytest.mark.parametrize("kind", ["added", "alone"])
def test_triton_packed_segments_match_spec(
    kind: str,
    format: str,
    rows: int,
    separate: bool,
    copied_calls: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = product_of(format, kind, rows=rows)
    want = specified(given, 2, monkeypatch)
    got = added("triton", given, copied(format, separate=separate), 2)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # sums in other orders
    assert copied_calls == [(2, separate)]


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_triton_packed_segments_detect_planted_arrival(
    copied_calls: list[tuple[int, bool]],
) -> None:
    """A block with a counter below zero has no last program; the next launch is right again."""
    given = product_of("INT4", "added", rows=8)
    want = added("triton", given, cut_of("INT4"), 4)
    arrivals = torch.tensor([0, -1, 0, 0], dtype=torch.int32, device="cuda")
    added("triton", given, copied("INT4", separate=True), 4, arrivals=arrivals)
    assert arrivals.tolist() == [0, 3, 0, 0]
    arrivals.zero_()
    got = added("triton", given, copied("INT4", separate=True), 4, arrivals=arrivals)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert copied_calls == [(4, True)] * 2


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("change", "segments", "taken"),
    [
        ({}, 1, True),
        ({}, 2, True),
        ({"separate": True}, 1, True),
        ({"separate": True}, 2, True),
        ({"depth": 512}, 2, True),
        ({"depth": 512}, 4, False),  # segments of one and a half steps
        ({"rows": 8}, 2, False),
    ],
    ids=str,
)
def test_triton_packed_takes_whole_steps_of_segments(
    change: dict[str, int], segments: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = KERNELS["triton"]["linear"].linear_swap_ab
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)
    found = module.takes(
        torch.empty((16, 3072), dtype=torch.bfloat16),
        torch.empty((OUTPUTS, 384), dtype=torch.int32),
        torch.empty((OUTPUTS, 24), dtype=torch.bfloat16),
        format="int4_w4a16",
        is_gated=False,
        segments=segments,
        tiles=replace(copied("INT4", separate=False), **change),
    )
    assert found == taken


def persistent(columns: int, **changed: int | bool) -> LinearTiles:
    """Returns tiles of `linear_sm90` for segments."""
    how = {"swapped": False, "described": True, "persistent": True, "rows": 128, "warps": 8}
    return cut_of("plain", columns=columns, **(how | {"stages": 3} | changed))


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("kind", "has_norm"),
    [("added", True), ("added", False), ("biased", True), ("alone", False)],
)
@pytest.mark.parametrize("rows", [300, 512, 2048])
def test_triton_sm90_segments_bitwise_equal(
    rows: int, kind: str, has_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, "linear_sm90")
    given = product_of("plain", kind, rows=rows, inputs=2048, outputs=896)
    run = partial(added, "triton", given, out_type="bfloat16", has_norm=has_norm)
    want = {segments: run(cut_of("plain"), segments) for segments in (1, 2, 4)}
    assert (want[1][0] != want[2][0]).any()
    assert (want[2][0] != want[4][0]).any()
    wide, pair, narrow = persistent(256), persistent(192, stages=4), persistent(128, stages=6)
    for cut, segments in ((wide, 2), (wide, 4), (pair, 2), (narrow, 2)):
        got = run(cut, segments)
        for one, other in zip(got, want[segments], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{cut}, {segments}")
    assert calls == [(2, False), (4, False), (2, False), (2, False)]


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("cut", "inputs", "taken"),
    [
        (persistent(256), 3072, True),
        (persistent(128, stages=6), 3072, True),
        (persistent(256, rows=64, warps=4), 3072, True),
        (persistent(192, stages=4), 3072, True),
        (persistent(256), 3136, False),  # segments of 24 and a half steps
        (persistent(256), 128, False),  # segments of one step
        (persistent(256, stages=4), 3072, False),  # more than the shared memory
        (persistent(256, warps=4), 3072, False),  # more than the registers
        (persistent(256, persistent=False), 3072, False),
        (persistent(192, rows=256), 3072, False),
    ],
    ids=str,
)
def test_triton_sm90_takes_segments_that_fit(
    cut: LinearTiles, inputs: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = KERNELS["triton"]["linear"].linear_sm90
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)
    x, weight = (torch.empty((size, inputs), dtype=torch.bfloat16) for size in (300, OUTPUTS))
    how = {"is_added": True, "segments": 2, "tiles": cut}
    assert module.takes(x, weight, is_gated=False, **how) == taken
    assert not module.takes(x, weight, is_gated=True, **how)


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="of the tiles of a GPU")
@pytest.mark.parametrize("language", KERNELS)
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (25600, 1280), (4096, 5120)])
@pytest.mark.parametrize(("format", "kind"), CELLS)
def test_linear_segments_tuned_tiles_bitwise_equal(
    format: str, kind: str, inputs: int, outputs: int, language: str
) -> None:
    """Each row has Triton's bits for 1 to 600 rows, in separate programs or in one."""
    whole = product_of(format, kind, rows=600, inputs=inputs, outputs=outputs)
    sizes = {"outputs": outputs, "gated": 0, "one_segment": 0}
    sizes |= {"item_bytes": whole.weight.format.item_bytes if format != "plain" else 2}

    def tiles_of(language: str, rows: int) -> LinearTiles:
        tables = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name())
        return (tables.fp8_activations if format == "W8A8" else tables.linear).of(
            rows=rows, **sizes
        )

    first = "triton" if "triton" in KERNELS else language
    want = added(first, whole, tiles_of(first, 600), 2, "bfloat16")
    for rows in (600, 512, 256, 128, 50, 20, 8, 1):
        cut, given = tiles_of(language, rows), whole.of_rows(rows)
        for tiles in {cut, replace(cut, separate=False)}:
            for one, other in zip(added(language, given, tiles, 2, "bfloat16"), want, strict=True):
                np.testing.assert_array_equal(one, other[:rows], err_msg=f"{tiles}, {rows}")


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    "cell", in_pallas(CELLS, [("plain", "adapted"), ("FP8", "added"), ("FP8", "alone")]), ids=str
)
def test_linear_segments_bitwise_equal_in_languages(
    cell: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    format, kind = cell
    given = product_of(format, kind).of_rows(20)
    cuts = cut_of(format, rows=32), cut_of(format, rows=32, separate=True)
    want = added("triton", given, cuts[0], 2)
    for language, cut in (("triton", cuts[1]), ("pallas", cuts[0]), ("pallas", cuts[1])):
        for one, other in zip(added(language, given, cut, 2), want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=language)


LATER = tuple(range(512, 1024, 128))
"""Inputs of the second half, at most one for each instruction of a tensor core."""
ROUNDED = [
    (1, 0, LATER, 0),  # 2^24 + 1 is rounded to 2^24, four times
    (2, 0, LATER, 4),
    (4, 0, (256, 512), 0),
    (4, 512, (0, 256), 2),
]
"""Segments, the input with weight 2^24, those with weight 1, and their sum less 2^24."""


@pytest.mark.parametrize("is_separate", [False, True])
@pytest.mark.parametrize(("language", "case"), in_languages(ROUNDED, ROUNDED[1:3]), ids=str)
def test_linear_segments_start_from_zero_in_order(
    case: tuple[int, int, tuple[int, ...], float], is_separate: bool, language: str
) -> None:
    segments, large, ones, total = case
    weight = np.zeros((OUTPUTS, INPUTS), np.float32)
    weight[:, large], weight[:, list(ones)] = 2**24, 1
    given = product_of("plain", "added").of_rows(3)
    given = given._replace(
        x=np.ones_like(given.x),
        weight=Matrix.plain(weight),
        stream=np.full((len(given.x), OUTPUTS), -(2**24) * FACTOR, np.float32),
    )
    got = added(language, given, cut_of("plain", separate=is_separate), segments)[0]
    np.testing.assert_array_equal(got, np.full_like(got, total * FACTOR))


def check_separate(patch: pytest.MonkeyPatch, spoil: Callable[..., None] | None) -> None:
    """Two GEMMs in separate programs with one set of counters have the bits of one program."""
    share_arithmetic(patch)
    given = product_of("plain", "added").of_rows(3)
    cut, want = cut_of("plain", separate=True), added("triton", given, cut_of("plain"), 4)
    if spoil is not None:
        spoil(patch, KERNELS["triton"]["linear"])
    arrivals = torch.zeros(8, dtype=torch.int32, device="cuda" if ON_GPU else "cpu")
    for _ in range(2):
        for one, other in zip(added("triton", given, cut, 4, arrivals=arrivals), want, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not arrivals.any()


def store_backwards(patch: pytest.MonkeyPatch, module: Any) -> None:
    healthy = module.arrives_last

    def arrives_last(
        part: Any, args: Any, tile: Any, number: Any, segment: Any, sizes: Any, config: Any
    ) -> Any:
        return healthy(part, args, tile, number, 3 - segment, sizes, config)

    patch.setattr(module, "arrives_last", arrives_last)


def sum_too_early(patch: pytest.MonkeyPatch, module: Any) -> None:
    healthy = module.arrives_last

    def arrives_last(
        part: Any, args: Any, tile: Any, number: Any, segment: Any, sizes: Any, config: Any
    ) -> Any:
        healthy(part, args, tile, number, segment, sizes, config)
        return segment == 2

    patch.setattr(module, "arrives_last", arrives_last)


def keep_counters(patch: pytest.MonkeyPatch, module: Any) -> None:
    healthy = module.sum_of_parts

    def sum_of_parts(args: Any, tile: Any, number: Any, sizes: Any, config: Any) -> Any:
        total = healthy(args, tile, number, sizes, config)
        module.tl.store(args.arrivals + number, config.segments)
        return total

    patch.setattr(module, "sum_of_parts", sum_of_parts)


def continue_chain(patch: pytest.MonkeyPatch, module: Any) -> None:
    healthy = module.accumulate

    def accumulate(acc: Any, rows: Any, outputs: Any, first: Any, last: Any, *rest: Any) -> Any:
        return healthy(acc, rows, outputs, 0, last, *rest)

    patch.setattr(module, "accumulate", accumulate)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_linear_segments_reset_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    check_separate(monkeypatch, None)


@pytest.mark.skipif(not INTERPRET, reason="planted in the interpreter")
@pytest.mark.parametrize("fault", [store_backwards, sum_too_early, keep_counters, continue_chain])
def test_linear_segments_detect_planted_fault(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        check_separate(monkeypatch, fault)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.skipif(ON_GPU, reason="the tiles of a GPU are too large for float32 weights")
@pytest.mark.parametrize(("segments", "total"), [(1, 0), (2, 4)])
def test_linear_add_passes_segments_to_kernel(
    segments: int, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    order = LinearOrder(segments=segments, least=INPUTS // 2, unit=64)
    monkeypatch.setattr(reduction_order, "LINEAR", order)
    kernels = torch_impl.ops.KERNELS
    assert kernels is not None  # bound above
    x, wide = torch.ones((3, INPUTS)), torch.zeros((OUTPUTS, INPUTS))
    wide[:, 0], wide[:, list(LATER)] = 2**24, 1
    weight = linear.Matrix.plain(wide)
    stream = linear.kernel_stream(kernels, torch.full((3, OUTPUTS), -(2.0**24)))
    once = linear.kernel_added(kernels, x, weight, stream, 1.0, None, 1)
    assert (once.rows == 0).all()
    found = linear.kernel_linear_add(kernels, x, weight, stream)
    assert (found.rows == total).all()
    assert (found.arrivals is not None) == (segments > 1)
    again = linear.kernel_linear_add(kernels, x, weight, found)
    assert again.arrivals is found.arrivals  # those of the pass from then on
    assert (linear.kernel_product(kernels, x, weight) == 2**24).all()
    for arrivals in (None, found.arrivals):
        alone = linear.kernel_residual_product(kernels, x, weight, arrivals)
        assert (alone == 2**24 + total).all()


def test_linear_segments_reject_partial_steps() -> None:
    given = product_of("INT4", "added").of_rows(3)
    with pytest.raises(ValueError, match="8 segments must be whole steps of 256 inputs, got 1024"):
        added("triton", given, cut_of("INT4"), 8)
