"""Reduction orders: divisions that a kernel can keep, at positions that are fixed."""

from dataclasses import FrozenInstanceError, replace

import pytest

from shared.spec.reduction_order import ATTENTION


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
