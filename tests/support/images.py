"""Images as clients might send them, good and bad."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PATTERN = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
"""An RGB image with sides that the golden settings do not resize."""


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def rgb(image: np.ndarray = PATTERN) -> Image.Image:
    return Image.fromarray(image)


def deep_grey(values: np.ndarray) -> bytes:
    return stored(Image.fromarray(values.astype(np.uint16)))


def deep_colours(values: np.ndarray) -> bytes:
    """A PNG of 16 bits in a channel, which Pillow reads and cannot write."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    return stored(frames[0], kind, save_all=True, append_images=frames[1:])


def several_in_a_jpeg() -> bytes:
    """Returns a JPEG file as cameras write it: an image, followed by a smaller one."""
    return stored(rgb(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], quality=95)


def bomb(kind: str, side: int) -> bytes:
    """A small file that claims an image of this side."""
    small = stored(Image.new("RGB", (64, 64)), kind, **{"lossless": True} if kind == "WEBP" else {})
    if kind == "PNG":
        return small[:16] + struct.pack(">II", side, side) + small[24:]
    if kind == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        return small[:at] + struct.pack(">HH", side, side) + small[at + 4 :]
    bits = (side - 1) | (side - 1) << 14
    return small[:21] + struct.pack("<I", bits) + small[25:]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hostname"/></svg>'

REFUSED = {
    "bomb": (url_of(bomb("PNG", 12_000)), "12000 x 12000 pixels, and the limit is 33554432"),
    "bomb in WebP": (
        url_of(bomb("WEBP", 16_000)),
        "16000 x 16000 pixels, and the limit is 33554432",
    ),
    "truncated": (url_of(stored(rgb())[:-2000]), "an invalid PNG: image file is truncated"),
    "svg": (url_of(SVG, "svg+xml"), "must be a PNG, a JPEG, a WebP or a still GIF"),
    "wrong base64": ("data:image/png;base64,iVBOR*", "contains invalid base64"),
    "stretched": (url_of(stored(Image.new("RGB", (300, 1)))), "at most 200 times the other"),
    "animated": (url_of(animated("PNG")), "an animated PNG, and video is not supported"),
    "remote": ("https://example.com/a.png", "remote URLs are not fetched"),
    "file": ("file:///etc/hostname", "remote URLs are not fetched"),
    "no base64": ("data:image/png,abc", "must have ;base64,"),
    "video": (url_of(b"\0\0\0\x18ftypmp42", "mp4"), "must be a PNG, a JPEG, a WebP or a still GIF"),
    "empty": ("data:image/png;base64,", "must be a PNG, a JPEG, a WebP or a still GIF"),
}
"""Invalid images, and the words of their errors."""
