"""Reduction orders: divisions that a kernel can keep, at positions that are fixed."""

from dataclasses import FrozenInstanceError, replace

import pytest

from shared.spec.reduction_order import ATTENTION, LINEAR, LinearOrder, parts_of_inputs


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"split": 96}, "split must be a multiple of tile 64, got 96"),
        ({"split": 32}, "split must be a multiple of tile 64, got 32"),
        ({"span": 200}, "span must be a multiple of split 128, got 200"),
        ({"span": 64}, "span must be a multiple of split 128, got 64"),
        ({"tile": 48}, "tile must be a power of two from 16, got 48"),
        ({"tile_float32": 8}, "tile_float32 must be a power of two from 16, got 8"),
    ],
)
def test_reduction_order_rejects_uneven_split(changed: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(ATTENTION, **changed)


def test_reduction_order_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        ATTENTION.split = 256


def test_reduction_tile_depends_on_type_only() -> None:
    tiles = {size: ATTENTION.sizes_for(size)["tile"] for size in (2, 4)}
    assert tiles == {2: 64, 4: 16}


HALVES = LinearOrder(segments=2, least=2048, unit=256)


@pytest.mark.parametrize(
    ("inputs", "segments"),
    [
        (4096, 2),
        (12288, 2),
        (25600, 2),
        (4096 - 512, 1),  # segments of fewer inputs than the least
        (4096 + 256, 1),  # no whole units
        (4304, 1),
        (768, 1),
    ],
)
def test_linear_order_segments_are_whole_units(inputs: int, segments: int) -> None:
    for is_packed in (False, True):
        assert HALVES.segments_of(inputs, is_packed=is_packed) == segments
        assert replace(HALVES, segments=1).segments_of(inputs, is_packed=is_packed) == 1
    only = replace(HALVES, packed_only=True)
    assert only.segments_of(inputs, is_packed=True) == segments
    assert only.segments_of(inputs, is_packed=False) == 1
    parts = parts_of_inputs(inputs, segments)
    assert [(part.start, part.stop) for part in parts] == [
        (at * inputs // segments, (at + 1) * inputs // segments) for at in range(segments)
    ]
    assert segments == 1 or all(part.start % HALVES.unit == 0 for part in parts)


def test_only_packed_weights_have_segments() -> None:
    every = range(128, 1 << 16, 128)
    assert {LINEAR.segments_of(inputs, is_packed=False) for inputs in every} == {1}
    assert [LINEAR.segments_of(inputs, is_packed=True) for inputs in (2048, 4096)] == [1, 2]


@pytest.mark.parametrize("name", ["segments", "least", "unit"])
def test_linear_order_rejects_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        replace(LINEAR, **{name: 0})
