"""PTX of packed weights, evaluated in numpy: interpreted kernels compute without it."""

import numpy as np
import pytest

from shared.models.formats.int4_encoding import ZERO
from shared.models.formats.mxfp4 import EXPONENT_SHIFT, NUMBERS
from tests.support.kernels import KERNELS
from tests.support.ptx import evaluated, halves, pairs

CODES = np.arange(256, dtype=np.uint32)
WORDS = [CODES * np.uint32(0x01010101), CODES[::-1] * np.uint32(0x01010101)]
each_byte = pytest.mark.parametrize("byte", range(4))
each_language = pytest.mark.parametrize("language", KERNELS)


def parts(language: str, assembly, byte: int, scales: list[np.ndarray]) -> list:
    """Both parts of a byte of two words: lower and upper four bits, each of both words."""
    if language == "triton":
        return [halves(x) for x in evaluated(assembly(byte), WORDS + scales + scales, 2)]
    found = [evaluated(assembly(2 * byte + part), WORDS + scales, 1) for part in (0, 1)]
    return [halves(x) for (x,) in found]


def column(value: float) -> np.ndarray:
    numbers = np.full(256, value)
    return pairs(numbers, numbers)


def codes(part: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = ((CODES >> 4 * part & 15).astype(np.int64) for _ in range(2))
    return first, second[::-1]


@each_byte
@each_language
def test_int4_assembly_dequantises_every_code(language: str, byte: int) -> None:
    scale = pairs(np.full(256, 0.75), np.full(256, 1.125))
    module = KERNELS[language]["int4_w4a16"]
    found = parts(language, lambda x: module.int4_assembly(x, False), byte, [scale])
    for part, values in enumerate(found):
        for value, code, factor in zip(values, codes(part), (0.75, 1.125), strict=True):
            np.testing.assert_array_equal(value, (code - ZERO) * np.float32(factor))


@each_byte
@each_language
@pytest.mark.parametrize("zero", range(16))
def test_int4_assembly_applies_zero_points(language: str, byte: int, zero: int) -> None:
    upper, rest = 0.75, 2.0**-12
    columns = [column(x) for x in (upper, rest, -128.0 - zero)]
    module = KERNELS[language]["int4_w4a16"]
    found = parts(language, lambda x: module.int4_assembly(x, True), byte, columns)
    for part, values in enumerate(found):
        for value, code in zip(values, codes(part), strict=True):
            want = (code - zero) * np.float32(upper + rest)
            np.testing.assert_array_equal(value, halves(pairs(want, want))[0])


@each_byte
@each_language
def test_mxfp4_assembly_dequantises_every_code(language: str, byte: int) -> None:
    module = KERNELS[language]["mxfp4_w4a16"]
    scales = [column(2.0**EXPONENT_SHIFT)]
    for part, values in enumerate(parts(language, module.mxfp4_assembly, byte, scales)):
        for value, code in zip(values, codes(part), strict=True):
            np.testing.assert_array_equal(value, NUMBERS[code])
