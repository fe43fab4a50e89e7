"""Vision encoder: golden numbers of the reference implementation, independent for each image."""

from dataclasses import replace

import numpy as np
import pytest

from shared.models.image_processor import InvalidImageError
from shared.spec import vision_encoder as spec
from tests.support.golden_images import (
    WANT,
    image_config,
    patches_of,
    pixels_of,
    resized,
    vision,
)
from tests.support.vision_encoders import CUTTERS, SIZE, TOWERS, padded

NUMBERS = (0, 1, 2)
IMAGES = [WANT[f"image_{number}"] for number in NUMBERS]
NOTHING = replace(pixels_of(resized(IMAGES[0])), sides=np.zeros(2, np.int32))


def patches(number: int) -> spec.Patches:
    return patches_of(resized(WANT[f"image_{number}"]))


@pytest.fixture(params=TOWERS)
def tower(request):
    return TOWERS[request.param]()


@pytest.mark.parametrize("number", NUMBERS)
def test_image_patches_match_golden(number):
    got = patches(number)
    np.testing.assert_array_equal(got.pixels, WANT[f"pixels_pil_{number}"])
    assert got.count == WANT[f"grid_{number}"].prod()
    # The other processor resizes with another library: one level of 255, and mean and deviation.
    np.testing.assert_allclose(got.pixels, WANT[f"pixels_{number}"], rtol=0, atol=2.01 / 255)


@pytest.mark.parametrize("cutter", CUTTERS)
def test_patches_on_every_device_match_spec(cutter):
    """To the bit, padding too; a plan of padding alone, as a start brings, is cut like others."""
    for image in (*map(pixels_of, map(resized, IMAGES)), NOTHING):
        given = image.padded(SIZE, vision())
        want, got = spec.patches(vision(), given), CUTTERS[cutter](given)
        for name, values in vars(want).items():
            np.testing.assert_array_equal(getattr(got, name), values, err_msg=name)


@pytest.mark.parametrize(
    ("height", "width", "fitted_height", "fitted_width"), WANT["resize_cases"].tolist()
)
def test_smart_resize_matches_released_sizes(height, width, fitted_height, fitted_width):
    released = replace(image_config(), multiple=32, min_pixels=1 << 16, max_pixels=1 << 24)
    if not fitted_height:
        with pytest.raises(InvalidImageError, match="one side must be at most 200 times the other"):
            released.smart_resize(height, width)
        return
    assert released.smart_resize(height, width) == (fitted_height, fitted_width)


def test_vision_encoder_embeddings_match_golden(tower):
    images = [replace(patches(i), pixels=WANT[f"pixels_{i}"]) for i in (0, 1)]
    rows = [tower(padded(each, SIZE))[: len(each.pixels) // 4] for each in images]
    # Float32, numbers up to 3: the orders of the sums differ.
    np.testing.assert_allclose(np.concatenate(rows), WANT["mm_embeds"], rtol=0, atol=1e-5)


def test_vision_encoder_image_bits_independent_of_padding(tower):
    first, second = padded(patches(0), SIZE), padded(patches(2), SIZE)
    count, alone = int(first.count[0]), tower(first)
    others = {
        name: np.concatenate([getattr(first, name)[:count], getattr(second, name)[: SIZE - count]])
        for name in ("pixels", "corners", "shares", "cos", "sin")
    }
    assert np.abs(tower(second)[: count // 4] - alone[: count // 4]).max() > 0.1
    np.testing.assert_array_equal(
        tower(replace(first, **others))[: count // 4], alone[: count // 4]
    )
    np.testing.assert_array_equal(tower(first), alone)


def test_patch_positions_interpolate_learned_table():
    side, config = vision().table_side, vision()
    got = patches(1)  # of 4 by 10 patches
    np.testing.assert_allclose(got.shares.sum(axis=1), 1, rtol=1e-6)  # float32
    row = (got.corners // side * got.shares).sum(axis=1)
    column = (got.corners % side * got.shares).sum(axis=1)
    order = [
        (2 * i + a, 2 * j + b) for i in range(2) for j in range(5) for a in (0, 1) for b in (0, 1)
    ]
    want = np.array(order) * (side - 1) / np.array([3, 9])
    np.testing.assert_allclose(np.stack([row, column], axis=1), want, rtol=0, atol=1e-6)
    # Half of the angles turn with the row: the same for patches of one row, and so with columns.
    half = config.head_size // 4
    first = got.cos[[order.index((0, j)) for j in range(10)]]
    assert (first[:, :half] == 1).all()
    assert len(np.unique(first[:, half])) == 10
