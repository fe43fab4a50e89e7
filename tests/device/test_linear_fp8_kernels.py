"""GEMMs with FP8 weights (W8A16): bitwise equal to those with dequantised weights."""

from itertools import product

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.tiles import Tiles
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8_BLOCK
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages
from tests.support.linear_kernels import KINDS, Arrays, in_bfloat16, in_pallas, in_triton, tiles

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK, CHANNEL = Granularity.BLOCK, Granularity.CHANNEL
each_granularity = pytest.mark.parametrize("granularity", [BLOCK, CHANNEL], ids=str)
SCALED = [*((kind, BLOCK) for kind in KINDS), *((kind, CHANNEL) for kind in ("plain", "gated"))]
each_kind = pytest.mark.parametrize(("kind", "granularity"), SCALED)
each_language = pytest.mark.parametrize("language", KERNELS)

SIZES = [{"R": 3, "K": 256, "N": 128}, {"R": 20, "K": 128, "N": 384}]
LARGE = [
    {"R": 1, "K": 4096, "N": 1280},
    {"R": 70, "K": 2048, "N": 4096},
    {"R": 200, "K": 5120, "N": 640},
    {"R": 600, "K": 1024, "N": 12288},
]


# Of Pallas the sizes with two blocks of inputs, each with its scale; all kinds have Triton's bits.
CASES = list(product(SIZES, SCALED))
COMPILED = [
    (SIZES[0], (kind, BLOCK)) for kind in ("normed", "biased, gated", "biased, times, added")
]
COMPILED += [(SIZES[0], ("gated", CHANNEL))]


@pytest.mark.parametrize(("language", "case"), in_languages(CASES, COMPILED), ids=str)
def test_linear_fp8_weight_dequantised_bitwise_equal(
    case: tuple[dict[str, int], tuple[str, Granularity]], language: str
) -> None:
    """Interpreted, a sum is rounded once a step, so that the steps must be as long."""
    sizes, (kind, granularity) = case
    first = 0 if "gated" in kind else FP8_BLOCK
    given = sizes | {"kind": kind, "out_type": "float32", "first": first}
    given |= {"granularity": granularity}
    wide = tiles(depth=64 if ON_GPU else 32)
    want = in_bfloat16(language, cut=wide, **given, words=False)
    for cut in (wide, tiles(depth=FP8_BLOCK, widens=False)):
        check_close(in_bfloat16(language, cut=cut, **given, words=True), want)


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="of the tiles of a GPU"
)
@each_granularity
@pytest.mark.parametrize("kind", ["biased, normed", "gated", "added"])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_linear_fp8_tuned_tiles_bitwise_equal(
    sizes: dict[str, int], kind: str, granularity: Granularity
) -> None:
    given = sizes | {"kind": kind, "out_type": "bfloat16", "first": 0, "granularity": granularity}
    want = in_bfloat16("triton", cut=tiles(), **given, words=False)
    for language in KERNELS:
        table = Tiles.load(f"{language}_gpu", torch.cuda.get_device_name()).linear
        sizes_of_call = {"inputs": sizes["K"], "outputs": sizes["N"], "gated": int(kind == "gated")}
        cuts = {
            table.of(item_bytes=1, rows=rows, **sizes_of_call) for rows in (1, 20, 50, 200, 600)
        }
        assert len({cut.widens for cut in cuts}) == 2
        for cut in cuts:
            got = in_bfloat16(language, cut=cut, **given, words=True)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{language}, {cut}")


def check_close(got: Arrays, want: Arrays) -> None:
    """The same bits; interpreted, XLA may add in an order of its own and round once or twice."""
    for one, other in zip(got, want, strict=True):
        if ON_GPU:
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_kind
def test_linear_fp8_kernels_bitwise_equal(kind: str, granularity: Granularity) -> None:
    given = SIZES[1] | {"kind": kind, "out_type": "float32", "first": 0, "words": True}
    given |= {"granularity": granularity}
    cut = tiles(depth=FP8_BLOCK, widens=False)
    check_close(*(in_bfloat16(each, cut=cut, **given) for each in KERNELS))


@each_language
@each_granularity
def test_fp8_dequantise_every_value_bitwise_equal(granularity: Granularity, language: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes = np.resize(codes[~np.isnan(fp8.VALUES)], (2, 256, 384))
    shape = fp8.scale_shape(codes.shape, granularity)
    scales = np.random.default_rng(0).uniform(0.1, 0.2, shape).astype(ml_dtypes.bfloat16)
    words, kept = fp8_w8a16.pack(codes), fp8_w8a16.packed_scales(scales)
    module = KERNELS[language]["fp8_w8a16"]
    if language == "triton":
        (got,) = in_triton(
            lambda words, scales: module.widened(
                words[1],
                scales[1].bfloat16(),
                **KERNELS["triton"]["linear"].launching(words),
            ).float(),
            *(words, kept),
        )
    else:
        (got,) = in_pallas(
            lambda words, scales, **how: module.widened(
                words, scales.astype(jnp.bfloat16), jnp.int32(1), **how
            ).astype(jnp.float32),
            *(words, kept),
        )
    np.testing.assert_array_equal(got, fp8_w8a16.widened(words, kept)[1])


@pytest.mark.parametrize(
    "change",
    [{"depth": 64}, {"swapped": False}, {"described": True}, {"persistent": True}],
    ids=str,
)
def test_fp8_tiles_reject_invalid_widening(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="tiles without widens must be swapped, 128 deep"):
        tiles(**{"depth": FP8_BLOCK, "widens": False} | change)
