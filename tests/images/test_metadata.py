"""Image metadata: any size and kind is ignored, except the orientation."""

import io
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from shared.images.decode import opened
from shared.images.metadata import MAX_TEXT_BYTES, without_metadata
from shared.models.image_processor import InvalidImageError
from tests.support.golden_images import image_config
from tests.support.images import PATTERN, rgb, stored

LARGE = bytes(4 << 20)
NOISE = random.Random(0).randbytes(3 << 20)
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
HEX = "\nexif\n  26\n" + (b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0").hex()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes) -> bytes:
    """The pattern as a PNG with chunks before and after its pixels."""
    data = stored(rgb())
    return data[:33] + b"".join(chunks) + data[33:-12] + b"".join(chunks) + data[-12:]


def jpeg_with(marker: int, body: bytes, count: int = 1) -> bytes:
    data = stored(rgb(), "JPEG")
    return data[:2] + (struct.pack(">BBH", 255, marker, len(body) + 2) + body) * count + data[2:]


def webp_with(**metadata: bytes) -> bytes:
    return stored(rgb(), "WEBP", lossless=True, **metadata)


PACKED = zlib.compress(LARGE)
FILES = {
    "zTXt": png_with(chunk(b"zTXt", b"workflow\0\0" + PACKED)),
    "many zTXt": png_with(*[chunk(b"zTXt", b"a\0\0" + PACKED)] * 40),
    "tEXt": png_with(chunk(b"tEXt", b"prompt\0" + LARGE)),
    "iTXt": png_with(chunk(b"iTXt", b"drawing\0\1\0\0\0" + PACKED)),
    "XMP": png_with(chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + PACKED)),
    "XMP that is no zlib": png_with(chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + b"no")),
    "iCCP": png_with(chunk(b"iCCP", b"icc\0\0" + PACKED)),
    "eXIf": png_with(chunk(b"eXIf", NOISE)),
    "short pHYs": png_with(chunk(b"pHYs", b"\0"), chunk(b"gAMA", b""), chunk(b"cHRM", b"1")),
    "wrong checksum": png_with(chunk(b"tEXt", b"a\0b")[:-1] + b"?"),
    "private": png_with(chunk(b"prVt", LARGE)),
    "jpeg comments": jpeg_with(0xFE, bytes(65_000), 60),
    "jpeg profiles": jpeg_with(0xE2, b"ICC_PROFILE\0\1\1" + bytes(65_000), 60),
    "jpeg short profile": jpeg_with(0xE2, b"ICC_PROFILE\0"),
    "jpeg exif": jpeg_with(0xE1, b"Exif\0\0" + NOISE[:65_000], 60),
    "jpeg XMP": jpeg_with(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + NOISE[:65_000], 60),
    "jpeg Photoshop": jpeg_with(0xED, b"Photoshop 3.0\x008BIM\x03\xed"),
    "jpeg short Adobe": jpeg_with(0xEE, b"Adobe"),
    "jpeg short JFIF": jpeg_with(0xE0, b"JFIF"),
    "jpeg MPF": jpeg_with(0xE2, b"MPF\0II*\0" + b"\xff" * 99),
    "webp profile": webp_with(icc_profile=NOISE),
    "webp exif": webp_with(exif=b"Exif\0\0" + NOISE),
    "webp XMP": webp_with(xmp=NOISE),
}


def opened_array(data: bytes) -> np.ndarray:
    return opened(data, image_config()).pixels


@pytest.mark.parametrize("name", FILES)
def test_image_with_large_metadata_is_opened(name: str):
    want = PATTERN
    if name.startswith("jpeg"):
        want = np.asarray(Image.open(io.BytesIO(stored(rgb(), "JPEG"))))
    np.testing.assert_array_equal(opened_array(FILES[name]), want)


ORIENTED = {
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode()),
    "large packed XMP": chunk(
        b"iTXt", b"XML:com.adobe.xmp\0\1\0en\0xmp\0" + zlib.compress(XMP.encode() + LARGE)
    ),
    "raw EXIF": chunk(b"tEXt", b"Raw profile type exif\0" + HEX.encode()),
    "packed raw EXIF": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(HEX.encode())),
}


@pytest.mark.parametrize("name", ORIENTED)
def test_orientation_in_text_chunk_is_applied(name: str):
    np.testing.assert_array_equal(opened_array(png_with(ORIENTED[name])), np.rot90(PATTERN, -1))


def test_without_metadata_bounds_decompressed_text():
    bomb = chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(1 << 28)))
    data = png_with(*[bomb] * 4)
    tracemalloc.start()
    assert len(without_metadata(data, "PNG")) < len(stored(rgb())) + MAX_TEXT_BYTES
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MAX_TEXT_BYTES


@pytest.mark.parametrize("name", ["zTXt", "jpeg exif", "jpeg MPF"])
def test_file_truncated_within_metadata_raises(name: str):
    with pytest.raises(InvalidImageError):
        opened(FILES[name][:400], image_config())


def gif_of(*frames: Image.Image, **options: object) -> bytes:
    return stored(frames[0], "GIF", save_all=True, append_images=frames[1:], **options)


def test_still_gif_opens_and_animated_gif_raises():
    drawn = rgb().quantize(200)
    still = gif_of(drawn, loop=0, comment=b"of one frame")
    np.testing.assert_array_equal(opened_array(still), np.asarray(drawn.convert("RGB")))
    np.testing.assert_array_equal(opened_array(still + b"behind"), opened_array(still))
    with pytest.raises(
        InvalidImageError, match="an animated GIF, and video is not supported; send one"
    ):
        opened_array(gif_of(drawn, rgb(PATTERN[::-1].copy()).quantize(200)))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_single_frame_animation_is_opened(kind: str):
    """Some writers mark every file as animated."""
    control = chunk(b"acTL", struct.pack(">II", 1, 0))
    frame = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 48, 40, 0, 0, 1, 1, 0, 0))
    data = png_with(control, frame)
    if kind == "WEBP":
        still = webp_with()
        body = still[12:]  # VP8L data, which a frame contains unchanged
        head = bytes(6) + (47).to_bytes(3, "little") + (39).to_bytes(3, "little") + bytes(4)
        extended = b"\x02" + bytes(3) + head[6:12]
        parts = ((b"VP8X", extended), (b"ANIM", bytes(6)), (b"ANMF", head + body))
        packed = b"".join(name + struct.pack("<I", len(each)) + each for name, each in parts)
        data = b"RIFF" + struct.pack("<I", 4 + len(packed)) + b"WEBP" + packed
    np.testing.assert_array_equal(opened_array(data), PATTERN)


def test_gif_with_oversized_frame_raises():
    still = gif_of(rgb().quantize(4))
    at = still.index(b",\0\0\0\0" + struct.pack("<HH", 48, 40))
    huge = still[: at + 5] + struct.pack("<HH", 65_535, 65_535) + still[at + 9 :]
    with pytest.raises(InvalidImageError, match="65535 x 65535 pixels, and the limit is"):
        opened_array(huge)


def test_truncated_gif_raises_or_opens():
    data = gif_of(rgb().quantize(200), comment=b"cut")
    results = set()
    for end in [*range(64), *range(64, len(data), 53), len(data)]:
        try:
            results.add(bool(opened_array(data[:end]).size))
        except InvalidImageError:
            results.add(False)
    assert results == {True, False}
