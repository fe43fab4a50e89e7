"""Image sizes: within the limits, and equal to transformers where it respects them."""

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shared.models.image_processor import LOW_DETAIL_PIXELS, MOST_STRETCHED, ImageProcessorConfig


def config_of(factor: int, least: int, most: int) -> ImageProcessorConfig:
    return ImageProcessorConfig(
        multiple=factor, min_pixels=least, max_pixels=most, mean=(0.5,) * 3, deviation=(0.5,) * 3
    )


def wanted(height: int, width: int, config: ImageProcessorConfig) -> list[int]:
    """Sides of `Qwen2VLImageProcessor` in transformers, which may exceed the limits."""
    factor, pixels = config.multiple, height * width
    sides = [round(side / factor) * factor for side in (height, width)]
    if math.prod(sides) > config.max_pixels:
        scale = math.sqrt(pixels / config.max_pixels)
        return [max(factor, math.floor(x / scale / factor) * factor) for x in (height, width)]
    if math.prod(sides) < config.min_pixels:
        scale = math.sqrt(config.min_pixels / pixels)
        return [math.ceil(x * scale / factor) * factor for x in (height, width)]
    return sides


DEMO = (32, 18_432, 18_432)


@settings(max_examples=400)
@given(
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
    factor=st.sampled_from([8, 28, 32]),
    least=st.integers(1, 1 << 18),
    most=st.integers(1, 1 << 20),
)
@example(47, 61, *DEMO)
@example(64, 64, *DEMO)
@example(40, 3000, *DEMO)
@example(3000, 40, *DEMO)
@example(480, 640, *DEMO)
@example(100, 100, 32, 65_536, 64 * 1024)  # a released model with --max-image-tokens 64
def test_smart_resize_matches_transformers_within_limits(height, width, factor, least, most):
    assume(max(height, width) <= MOST_STRETCHED * min(height, width))
    config = config_of(factor, least, most)
    sides = config.smart_resize(height, width)
    max_tokens = max(1, most // factor**2)
    assert all(side >= factor and side % factor == 0 for side in sides)
    assert 1 <= config.num_tokens(*sides) <= max_tokens
    want = wanted(height, width, config)
    if math.prod(want) // factor**2 <= max_tokens:
        assert list(sides) == want


@pytest.mark.parametrize("side", range(1, 200, 7))
def test_smart_resize_without_fitting_size_keeps_shape(side: int):
    assert config_of(*DEMO).smart_resize(side, side) == (128, 128)


def test_low_detail_limits_size():
    config = config_of(32, 65_536, 1 << 24)
    assert config.smart_resize(2048, 2048) == (2048, 2048)
    assert config.low_detail().smart_resize(2048, 2048) == (512, 512)
    assert config.low_detail().smart_resize(300, 200) == config.smart_resize(300, 200)
    small = config_of(*DEMO)
    assert small.max_pixels < LOW_DETAIL_PIXELS
    assert small.low_detail() == small
