"""Vision encoder on a GPU: bitwise equal in JAX and torch, with any padding.

python -m pytest -o addopts= -m gpu tests/bench/test_gpu_images.py
"""

from dataclasses import replace

import numpy as np
import pytest

from bench.steps.vision_encoder import ENCODERS, IMAGES, QWEN3_5
from shared.spec import vision_encoder

pytestmark = pytest.mark.gpu

VISION = replace(QWEN3_5, depth=3)
SIDES = [(256, 256), (96, 672), (640, 416)]
"""Sizes of images with 256, 252 and 1,040 patches."""


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request):
    return request.param, ENCODERS[request.param](VISION)


FOUND: dict[tuple[int, int], np.ndarray] = {}
"""Embeddings of the first backend, by size of the image."""


@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_vision_encoder_backends_bitwise_equal_with_padding(encoder, sides):
    name, encode = encoder
    given = np.random.default_rng(sides[0]).integers(0, 256, (*sides, 3), dtype=np.uint8)
    image = vision_encoder.pixels_of(given, VISION, IMAGES)
    rows = encode(image)()
    assert np.isfinite(rows).all()
    assert len(np.unique(rows)) > 1000
    padded = image.padded(image.num_patches + 300, VISION)
    np.testing.assert_array_equal(encode(padded)()[: len(rows)], rows)
    np.testing.assert_array_equal(rows, FOUND.setdefault(sides, rows), err_msg=name)
