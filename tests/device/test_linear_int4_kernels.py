"""GEMMs with INT4 weights (W4A16): bitwise equal to those with dequantised weights."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from kernels.tiles import Tiles
from shared.models.formats import four_bit
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.int4_w4a16 import Int4W4A16
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU
from tests.support.linear_kernels import (
    KINDS,
    LARGE,
    Weights,
    as_w4a16,
    check_close,
    copied,
    dequantized,
    dequantized_in_memory,
    in_bfloat16,
    tiles,
)

pytestmark = pytest.mark.usefixtures("interpreted")
PLAIN, WORDS = Int4Encoding(32, "BF16", has_zeros=False), Int4Encoding(64, "F16", has_zeros=True)
ENCODINGS = [
    PLAIN,
    WORDS,
    Int4Encoding(128, "BF16", has_zeros=True),
    Int4Encoding(128, "F16", has_zeros=False),
    Int4Encoding(None, "BF16", has_zeros=False),
    Int4Encoding(None, "F16", has_zeros=True),
]
SIZES = [{"R": 3, "K": 384, "N": 80}, {"R": 20, "K": 512, "N": 192}]
PARTIAL = [{"R": 3, "K": 192, "N": 80}, {"R": 20, "K": 320, "N": 192}]
"""Sizes with a last block that rows do not fill: of 256 and of 128 inputs."""
each_language = pytest.mark.parametrize("language", KERNELS)

CASES = list(product(SIZES, [*product(["gated"], ENCODINGS), *product(KINDS, [WORDS])]))
CASES += list(product(PARTIAL, product(["added", "gated"], [PLAIN, WORDS, *ENCODINGS[-2:]])))
COMPILED = [(SIZES[0], ("gated", WORDS))]
INTERPRETED = [(SIZES[i], ("gated", encoding)) for i, encoding in enumerate(ENCODINGS[:2])]
INTERPRETED += [(SIZES[1], ("biased, times, added", WORDS))]
INTERPRETED += [(PARTIAL[0], ("added", PLAIN)), (PARTIAL[1], ("gated", ENCODINGS[-1]))]


def cases() -> list:
    """All cases on a GPU; interpreted, few by default."""
    default = {"pallas": COMPILED, "triton": INTERPRETED}
    return [
        pytest.param(
            language,
            case,
            marks=() if case in default[language] or not INTERPRET else pytest.mark.matrix,
        )
        for language in KERNELS
        for case in CASES
    ]


def wide(encoding: Int4Encoding, outputs: int, inputs: int) -> Weights:
    format = Int4W4A16.of(encoding, inputs)
    assert format is not None
    return dequantized(format, as_w4a16(encoding, outputs, inputs))


@pytest.mark.parametrize(("language", "case"), cases(), ids=str)
def test_linear_int4_weight_dequantised_bitwise_equal(
    case: tuple[dict[str, int], tuple[str, Int4Encoding]], language: str
) -> None:
    """Interpreted, a sum is rounded once a step, so that the steps must be as long."""
    sizes, (kind, encoding) = case
    first = 0 if "gated" in kind else 48
    given = sizes | {"kind": kind, "out_type": "float32", "first": first}
    depth = 64 if ON_GPU else four_bit.block_of(sizes["K"]) // four_bit.PARTS
    want = in_bfloat16(
        language, cut=tiles(depth=depth), **given, weights_of=partial(wide, encoding)
    )
    for cut in (
        tiles(depth=depth),
        tiles(widens=False),
        tiles(widens=False, swapped=False, columns=64),
        copied(language, kind),
    ):
        got = in_bfloat16(language, cut=cut, **given, weights_of=partial(as_w4a16, encoding))
        check_close(got, want)


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="of the tiles of a GPU"
)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("kind", ["biased, normed", "gated", "added"])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_linear_int4_tuned_tiles_bitwise_equal(
    sizes: dict[str, int], kind: str, encoding: Int4Encoding
) -> None:
    given = sizes | {"kind": kind, "out_type": "bfloat16", "first": 0}
    want = in_bfloat16("triton", cut=tiles(), **given, weights_of=partial(wide, encoding))
    for language in KERNELS:
        table = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name()).linear
        of_call = {"outputs": sizes["N"], "gated": int(kind == "gated"), "one_segment": 1}
        for cut in {table.of(item_bytes=0.5, rows=x, **of_call) for x in (1, 20, 50, 200, 600)}:
            got = in_bfloat16(language, cut=cut, **given, weights_of=partial(as_w4a16, encoding))
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{language}, {cut}")


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 20, 32, 50])
@each_language
def test_linear_int4_copied_bitwise_equal(
    language: str, rows: int, kind: str, has_zeros: bool
) -> None:
    """Calls that the kernel does not support fall back."""
    encoding = Int4Encoding(128, "BF16", has_zeros=has_zeros)
    given = {"R": rows, "K": 3072, "N": 832, "kind": kind, "out_type": "bfloat16", "first": 0}
    want = in_bfloat16(language, cut=tiles(), **given, weights_of=partial(wide, encoding))
    given |= {"weights_of": partial(as_w4a16, encoding)}
    for change in ({}, {"stages": 2}, {"depth": 512, "stages": 2}):
        got = in_bfloat16(language, cut=copied(language, kind, **change), **given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(change))


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.matrix
@pytest.mark.parametrize("encoding", [PLAIN, WORDS], ids=str)
def test_linear_int4_kernels_bitwise_equal(encoding: Int4Encoding) -> None:
    given = SIZES[0] | {"kind": "gated", "out_type": "float32", "first": 0}
    given |= {"weights_of": partial(as_w4a16, encoding)}
    check_close(*(in_bfloat16(each, cut=tiles(widens=False), **given) for each in KERNELS))


@each_language
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("inputs", [384, 192])
def test_int4_dequantise_every_code_bitwise_equal(
    inputs: int, encoding: Int4Encoding, language: str
) -> None:
    if inputs % (encoding.group or 1):
        encoding = replace(encoding, group=64)
    weights = as_w4a16(encoding, 80, inputs)
    (got,) = dequantized_in_memory(language, weights, inputs)
    np.testing.assert_array_equal(got, wide(encoding, 80, inputs).values[1])
