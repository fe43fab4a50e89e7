"""Image headers: format, size and animation, read before a decoder opens the file.

A decoder may allocate the whole image when it opens a file: that of WebP allocates 2.7 GB for 10 kB
that claim 16,000 x 16,000 pixels.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from shared.models.image_processor import InvalidImageError

PNG, JPEG, WEBP, GIF = "PNG", "JPEG", "WEBP", "GIF"

MAX_PIXELS = 1 << 25
"""Limit of a stored image: 33.5 million, as of large cameras. Models use less than half of it."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""JPEG markers that are followed by the size; the others of the range are tables."""

MARKERS_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
"""JPEG markers that have no length field."""

_FRAME, _EXTENSION = 0x2C, 0x21
"""First bytes of the blocks that may precede others in a GIF."""


@dataclass(frozen=True)
class Header:
    """Format of an image, its stored size in pixels, and animation."""

    kind: str
    height: int
    width: int
    is_animated: bool


def read_header(data: bytes) -> Header:
    """Detects the format by the content.

    Raises:
      ImageRefused: The file is not a PNG, JPEG, WebP or GIF, or its header is invalid.

    Source: PNG, third edition (W3C); ITU-T T.81; WebP container specification (RFC 9649); GIF89a
    specification (CompuServe, 1990).
    """
    if data.startswith(PNG_SIGNATURE):
        return _of_png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _of_jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _of_webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _of_gif(data)
    raise InvalidImageError("the image must be a PNG, a JPEG, a WebP or a still GIF")


def _of_png(data: bytes) -> Header:
    if data[12:16] != b"IHDR" or len(data) < 24:
        raise _broken(PNG)
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    return _checked(Header(PNG, height, width, _has_frames(data)))


def _has_frames(data: bytes) -> bool:
    """Returns whether a PNG declares several frames before its pixels."""
    at = len(PNG_SIGNATURE)
    while at + 8 <= len(data):
        kind = data[at + 4 : at + 8]
        if kind in (b"acTL", b"IDAT"):
            return kind == b"acTL" and int.from_bytes(data[at + 8 : at + 12]) > 1
        at += 12 + int.from_bytes(data[at : at + 4])
    return False


def _of_jpeg(data: bytes) -> Header:
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # any number of fill bytes may precede a marker
            at += 1
        elif marker in MARKERS_WITHOUT_LENGTH:
            at += 2
        elif marker in _SIZES and at + 9 <= len(data):
            height, width = (int.from_bytes(data[x : x + 2]) for x in (at + 5, at + 7))
            return _checked(Header(JPEG, height, width, False))
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    raise _broken(JPEG)


def _of_webp(data: bytes) -> Header:
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise _broken(WEBP)
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(body[at : at + 3], "little") for at in (4, 7))
        is_animated = bool(body[0] & 2) and len(list(islice(_webp_frames(data), 2))) > 1
        return Header(WEBP, height, width, is_animated)
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return Header(WEBP, 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF), False)
    if kind == b"VP8 ":
        width, height = (int.from_bytes(body[at : at + 2], "little") for at in (6, 8))
        return _checked(Header(WEBP, height & 0x3FFF, width & 0x3FFF, False))
    raise _broken(WEBP)


def _webp_frames(data: bytes) -> Iterator[int]:
    """Yields the offset of each frame of an animated WebP."""
    at = 12
    while at + 8 <= len(data):
        if data[at : at + 4] == b"ANMF":
            yield at
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length + length % 2


def _of_gif(data: bytes) -> Header:
    """Reads a GIF: a sequence of frames, the first of which may exceed the screen."""
    frames = list(islice(_gif_frames(data), 2))
    if not frames:
        raise _broken(GIF)
    width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    left, top, wide, high = struct.unpack_from("<4H", data, frames[0] + 1)
    header = Header(GIF, max(height, top + high), max(width, left + wide), len(frames) > 1)
    return _checked(header)


def _gif_frames(data: bytes) -> Iterator[int]:
    """Yields the offset of each image descriptor of a GIF."""
    at = 13 + _colours(data, 10)
    while at < len(data):
        if data[at] == _FRAME and at + 11 <= len(data):
            yield at
            at += 11 + _colours(data, at + 9)  # after the code size
        elif data[at] == _EXTENSION:
            at += 2
        else:
            return
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1


def _colours(data: bytes, at: int) -> int:
    """Returns the bytes of the colour table that a flags byte declares."""
    flags = data[at] if at < len(data) else 0
    return 3 << 1 + (flags & 7) if flags & 0x80 else 0


def _checked(header: Header) -> Header:
    if not header.height or not header.width:
        raise _broken(header.kind)
    return header


def _broken(kind: str) -> InvalidImageError:
    return InvalidImageError(f"the image's {kind} header is invalid")
