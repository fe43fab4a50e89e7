"""GEMMs with FP8 weights (W8A16): bitwise equal to those with dequantised weights."""

from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.tiles import Tiles
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, FP8W8A16
from shared.models.formats.weight_format import SCALES, VALUES
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages
from tests.support.linear_kernels import (
    KINDS,
    LARGE,
    Weights,
    as_w8a16,
    check_close,
    copied,
    dequantized,
    dequantized_in_memory,
    in_bfloat16,
    tiles,
)
from tests.support.weight_formats import w8a16_matrix

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK, CHANNEL = Granularity.BLOCK, Granularity.CHANNEL
each_granularity = pytest.mark.parametrize("granularity", [BLOCK, CHANNEL], ids=str)
SCALED = [*((kind, BLOCK) for kind in KINDS), *((kind, CHANNEL) for kind in ("plain", "gated"))]
each_kind = pytest.mark.parametrize(("kind", "granularity"), SCALED)
each_language = pytest.mark.parametrize("language", KERNELS)

SIZES = [{"R": 3, "K": 256, "N": 128}, {"R": 20, "K": 128, "N": 384}]
SIZES += [{"R": 3, "K": 128, "N": 160}]  # no whole blocks: scales per output


# Of Pallas the sizes with two blocks of inputs, each with its scale; all kinds have Triton's bits.
CASES = list(product(SIZES, SCALED))
COMPILED = [
    (SIZES[0], (kind, BLOCK)) for kind in ("normed", "biased, gated", "biased, times, added")
]
COMPILED += [(SIZES[0], ("gated", CHANNEL)), (SIZES[2], ("normed", BLOCK))]


@pytest.mark.parametrize(("language", "case"), in_languages(CASES, COMPILED), ids=str)
def test_linear_fp8_weight_dequantised_bitwise_equal(
    case: tuple[dict[str, int], tuple[str, Granularity]], language: str
) -> None:
    """Interpreted, a sum is rounded once a step, so that the steps must be as long."""
    sizes, (kind, granularity) = case
    first = 0 if "gated" in kind else FP8_BLOCK
    given = sizes | {"kind": kind, "out_type": "float32", "first": first}
    wide = tiles(depth=64 if ON_GPU else 32)
    want = in_bfloat16(language, cut=wide, **given, weights_of=partial(widened, granularity))
    inside = (tiles(widens=False), tiles(widens=False, swapped=False), copied(language, kind))
    for cut in (wide, *inside):
        got = in_bfloat16(language, cut=cut, **given, weights_of=partial(as_w8a16, granularity))
        check_close(got, want)


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 20, 32, 50])
@each_language
def test_linear_fp8_copied_bitwise_equal(language: str, rows: int, kind: str) -> None:
    """Calls that the kernel does not support fall back."""
    given = {"R": rows, "K": 3072, "N": 896, "kind": kind, "out_type": "bfloat16", "first": 0}
    want = in_bfloat16(language, cut=tiles(), **given, weights_of=partial(widened, BLOCK))
    given |= {"weights_of": partial(as_w8a16, BLOCK)}
    for change in ({}, {"stages": 2}, {"depth": 512, "stages": 2}):
        got = in_bfloat16(language, cut=copied(language, kind, **change), **given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(change))


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="of the tiles of a GPU"
)
@each_granularity
@pytest.mark.parametrize("kind", ["biased, normed", "gated", "added"])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_linear_fp8_tuned_tiles_bitwise_equal(
    sizes: dict[str, int], kind: str, granularity: Granularity
) -> None:
    given = sizes | {"kind": kind, "out_type": "bfloat16", "first": 0}
    want = in_bfloat16("triton", cut=tiles(), **given, weights_of=partial(widened, granularity))
    given |= {"weights_of": partial(as_w8a16, granularity)}
    for language in KERNELS:
        table = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name()).linear
        sizes_of_call = {"outputs": sizes["N"], "gated": int(kind == "gated"), "one_segment": 1}
        cuts = {
            table.of(item_bytes=1, rows=rows, **sizes_of_call) for rows in (1, 20, 50, 200, 600)
        }
        assert len({cut.widens for cut in cuts}) == 2
        for cut in cuts:
            got = in_bfloat16(language, cut=cut, **given)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{language}, {cut}")


def widened(granularity: Granularity, outputs: int, inputs: int) -> Weights:
    return dequantized(FP8W8A16(granularity), as_w8a16(granularity, outputs, inputs))


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_kind
def test_linear_fp8_kernels_bitwise_equal(kind: str, granularity: Granularity) -> None:
    given = SIZES[1] | {"kind": kind, "out_type": "float32", "first": 0}
    given |= {"weights_of": partial(as_w8a16, granularity)}
    cut = tiles(widens=False)
    check_close(*(in_bfloat16(each, cut=cut, **given) for each in KERNELS))


@each_language
@each_granularity
def test_fp8_dequantise_every_value_bitwise_equal(granularity: Granularity, language: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes = np.resize(codes[~np.isnan(fp8.VALUES)], (2, 200, 384))
    shape = fp8.scale_shape(codes.shape, granularity)
    scales = np.random.default_rng(0).uniform(0.1, 0.2, shape).astype(ml_dtypes.bfloat16)
    matrix = w8a16_matrix(codes, scales, granularity)
    words, kept = matrix.planes[VALUES], matrix.planes[SCALES]
    (got,) = dequantized_in_memory(language, Weights("fp8_w8a16", words, kept), 384)
    np.testing.assert_array_equal(got, matrix.format.dequantize(matrix.planes)[1])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"persistent": True}, "never persistent"),
        ({"described": True, "swapped": False, "depth": 256}, "must be swapped if described"),
        ({"described": True, "depth": 64}, "depth must be a power of two from 128, got 64"),
        ({"described": True, "depth": 256, "stages": 1}, "stages must be at least 2, got 1"),
    ],
    ids=str,
)
def test_tiles_reject_invalid_widening(change: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        tiles(widens=False, **change)
