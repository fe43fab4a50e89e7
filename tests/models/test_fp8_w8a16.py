"""Packed FP8: positions of the four values in an int32, scales, and errors."""

import ml_dtypes
import numpy as np
import pytest

from shared.models.formats import fp8
from shared.models.formats.fp8_w8a16 import (
    SCALE_FACTOR,
    pack,
    packed_scales,
    unpack,
    widened,
)


def test_pack_stores_inputs_in_strided_bytes() -> None:
    codes = np.random.default_rng(0).integers(0, 0x7F, (2, 3, 256), np.uint8)
    words = pack(codes)
    assert words.shape == (2, 3, 64)
    assert words.dtype == np.int32
    for at in (0, 31, 32, 127, 128, 200, 255):
        block, byte, word = at // 128, at % 128 // 32, at % 32
        found = (words[..., 32 * block + word] >> (8 * byte)) & 0xFF
        np.testing.assert_array_equal(found, codes[..., at])


def test_packed_scales_include_scale_factor() -> None:
    scales = np.array([[0.0078125, 2.0**-20]], ml_dtypes.bfloat16)
    want = scales.astype(np.float64) * SCALE_FACTOR
    kept = packed_scales(scales).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(kept.astype(np.float64), want)


def test_rounded_matches_bfloat16() -> None:
    x = np.random.default_rng(0).integers(0, 0x7F000000, 4096, np.uint32).view(np.float32)
    x = np.concatenate([x, -x, np.float32([1.00390625, 1.01171875, 0])])  # ties
    np.testing.assert_array_equal(fp8.rounded(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_unpack_and_widened_invert_pack() -> None:
    codes = np.random.default_rng(1).integers(0, 0x7F, (2, 128, 256), np.uint8)
    scales = np.random.default_rng(2).uniform(0.1, 0.2, (2, 1, 2)).astype(ml_dtypes.bfloat16)
    words = pack(codes)
    np.testing.assert_array_equal(unpack(words), codes)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact *= scales.astype(np.float32).repeat(128, -2).repeat(128, -1)
    want = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(widened(words, packed_scales(scales)), want)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_pack_rejects_nan(code: int) -> None:
    codes = np.zeros((1, 128), np.uint8)
    codes[0, 7] = code
    with pytest.raises(ValueError, match="must not contain NaN"):
        pack(codes)


def test_pack_rejects_partial_blocks() -> None:
    with pytest.raises(ValueError, match="inputs must be a multiple of 128, got 96"):
        pack(np.zeros((1, 96), np.uint8))


def test_packed_scales_reject_inexact_bfloat16() -> None:
    with pytest.raises(ValueError, match="scales must be exact in bfloat16"):
        packed_scales(np.float32([0.1]))
    with pytest.raises(ValueError, match="scales must be exact in bfloat16"):
        packed_scales(np.float32([128]))
    with pytest.raises(ValueError, match="scales must be exact in float32 and below 128"):
        packed_scales(np.float32([128]), "float32")
    assert packed_scales(np.float32([0.1]), "float32") == np.float32(0.1 * 2.0**120)
