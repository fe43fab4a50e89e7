"""Image decoding: orientation, resizing, and errors before decoding."""

import io
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from shared.images import decode
from shared.images.data_url import data_of
from shared.images.decode import opened
from shared.images.header import Header, read_header
from shared.images.placeholders import expanded
from shared.models.image_processor import InvalidImageError
from tests.support.golden_images import WANT, image_config, patches_of
from tests.support.images import (
    PATTERN,
    REFUSED,
    animated,
    bomb,
    deep_colours,
    deep_grey,
    rgb,
    several_in_a_jpeg,
    stored,
)

ROOT = Path(__file__).resolve().parents[2]
GREY = PATTERN[..., :1].repeat(3, axis=2)
TRANSPARENT = np.concatenate([PATTERN, PATTERN[..., :1]], axis=2)
PALETTE = rgb().quantize(200)
CMYK = rgb().convert("CMYK")


def opened_array(data: bytes) -> np.ndarray:
    image = opened(data, image_config())
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_image_resize_bitwise_equal(number):
    got = opened_array(stored(rgb(WANT[f"image_{number}"])))
    pixels = patches_of(got).pixels
    np.testing.assert_array_equal(pixels, WANT[f"pixels_pil_{number}"])


PLAIN = {
    "png": (stored(rgb()), PATTERN),
    "webp": (stored(rgb(), "WEBP", lossless=True), PATTERN),
    "jpeg": (stored(rgb(), "JPEG"), None),
    "progressive": (stored(rgb(), "JPEG", progressive=True), None),
    "grey": (stored(rgb(GREY).convert("L")), GREY),
    "one bit": (stored(rgb().convert("1")), np.asarray(rgb().convert("1").convert("RGB"))),
    "alpha": (stored(rgb(TRANSPARENT)), PATTERN),
    "webp alpha": (stored(rgb(TRANSPARENT), "WEBP", lossless=True, exact=True), PATTERN),
    "palette": (stored(PALETTE), np.asarray(PALETTE.convert("RGB"))),
    "palette alpha": (stored(PALETTE, transparency=3), np.asarray(PALETTE.convert("RGB"))),
    "cmyk": (stored(CMYK, "JPEG"), None),
    "16 bit": (deep_colours(PATTERN.astype(np.uint16) * 257), PATTERN),
    "16 bit grey": (deep_grey(GREY[..., 0].astype(np.uint16) * 257), GREY),
    "camera": (several_in_a_jpeg(), None),
}
"""Files and their expected pixels; None: the pixels that Pillow reads, for lossy files."""


@pytest.mark.parametrize("name", PLAIN)
def test_opened_converts_every_image_kind_to_rgb(name):
    data, want = PLAIN[name]
    if want is None:
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(opened_array(data), want)


def test_exif_orientation_applied_before_resize():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    got = opened_array(stored(rgb(), exif=exif))
    np.testing.assert_array_equal(got, np.rot90(PATTERN, -1))


@pytest.mark.parametrize("turn", range(10))  # 1 is upright, 0 and 9 are invalid
def test_exif_orientations_match_pillow(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = stored(rgb(), exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(opened_array(data), np.asarray(upright))


ODD = struct.pack("<4sIHHHIHHHHIfI", b"II*", 8, 2, 0x0112, 3, 1, 6, 0, 0x010E, 11, 1, 1.5, 0)
"""EXIF with a rotation, and a description of type number instead of text."""


@pytest.mark.parametrize(
    ("exif", "turns"), [(ODD, -1), (b"no list of tags", 0)], ids=["odd", "broken"]
)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_opened_ignores_broken_exif(kind, exif, turns):
    how = {"lossless": True} if kind == "WEBP" else {}
    got = opened_array(stored(rgb(), kind, exif=b"Exif\0\0" + exif, **how))
    np.testing.assert_array_equal(got, np.rot90(PATTERN, turns))


def test_one_pixel_side_is_upscaled_to_minimum():
    assert opened_array(stored(Image.new("RGB", (100, 1)))).shape == (8, 232, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_image_raises_in_one_sentence(name):
    url, words = REFUSED[name]
    with pytest.raises(InvalidImageError) as refused:
        opened(data_of(url), image_config())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_too_many_pixels_rejected_before_decoding(kind, monkeypatch):
    monkeypatch.setattr(decode.Image, "open", lambda *given, **named: pytest.fail("it is opened"))
    with pytest.raises(InvalidImageError, match="16000 x 16000 pixels"):
        opened(bomb(kind, 16_000), image_config())


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animated_image_raises(kind):
    with pytest.raises(InvalidImageError, match=f"an animated {kind}, and video is not supported"):
        opened(animated(kind), image_config())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("lossless", [False, True])
def test_read_header_matches_pillow(kind, lossless):
    for height, width in ((7, 300), (256, 1)):
        options = {"lossless": lossless} if kind == "WEBP" else {}
        data = stored(Image.new("RGB", (width, height)), kind, **options)
        assert read_header(data) == Header(kind, height, width, False)
        with_alpha = Image.new("RGBA", (width, height), (1, 2, 3, 4))
        if kind != "JPEG":
            assert read_header(stored(with_alpha, kind, **options)) == Header(
                kind, height, width, False
            )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_image_raises_or_opens(kind):
    """Truncation never causes another kind of error."""
    data, config = stored(rgb(), kind), replace(image_config(), max_pixels=1024)
    for end in [*range(0, 64), *range(64, len(data), 97)]:
        with suppress(InvalidImageError):
            assert opened(data[:end], config).height


def test_text_server_needs_no_pillow():
    """Pillow is an optional dependency, and images are decoded in a separate process."""
    code = "import sys; sys.modules['PIL'] = None; import shared.server.api.service"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_expanded_repeats_image_tokens_by_count():
    assert expanded([5, 9, 6, 9], 9, [2, 3]) == [5, 9, 9, 6, 9, 9, 9]
    with pytest.raises(InvalidImageError, match="2 image tokens, and the request has 1 images"):
        expanded([5, 9, 6, 9], 9, [2])
