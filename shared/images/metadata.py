"""Metadata of image files, removed before a decoder reads them.

A decoder may fail at metadata that no pixel depends on: Pillow limits the texts and colour profiles
of a PNG, and unpacks the fields of a JPEG's application segments whatever their length. Only data
that affects pixels or their orientation is kept.
"""

import struct
import zlib
from collections.abc import Iterator

from shared.images.header import JPEG, MARKERS_WITHOUT_LENGTH, PNG, PNG_SIGNATURE

MAX_TEXT_BYTES = 1 << 24
"""Limit of the unpacked texts of a PNG that may contain an orientation; more are dropped."""

_ORIENTING = (b"XML:com.adobe.xmp", b"Raw profile type exif")
"""Keywords of the texts that Pillow searches for an orientation."""

_KEPT_CHUNKS = (b"tRNS", b"eXIf")
_SCAN = 0xDA
_SEGMENTS, _COMMENT = range(0xE0, 0xF0), 0xFE
_KEPT_SEGMENTS = {0xE0: (b"JFIF\0", 14), 0xE1: (b"", 0), 0xEE: (b"Adobe", 12)}
"""Prefix and minimum length of the segments that are kept, by marker. The first and the last affect
colours; the second contains EXIF and XMP."""


def without_metadata(data: bytes, kind: str) -> bytes:
    """Returns an image file with its pixels and their orientation alone.

    After a fault the rest of a file is returned unchanged, and the decoder reports the fault.

    Args:
      data: The file.
      kind: The format; formats other than PNG and JPEG are returned unchanged.
    """
    if kind == PNG:
        return b"".join(_chunks(data))
    return b"".join(_parts(data)) if kind == JPEG else data


def _chunks(data: bytes) -> Iterator[bytes]:
    yield PNG_SIGNATURE
    at, left = len(PNG_SIGNATURE), MAX_TEXT_BYTES
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        kind = data[at + 4 : at + 8]
        if end > len(data):
            break
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            if text := _unpacked(kind, data[at + 8 : end - 4], left):
                left -= len(text)
                yield _chunk(*text)
        elif not kind[0] & 32 or kind in _KEPT_CHUNKS:  # a capital: critical
            yield data[at:end]
        at = end
    yield data[at:]


def _unpacked(kind: bytes, body: bytes, most: int) -> tuple[bytes, bytes] | None:
    """Returns kind and body of a text chunk without compression, or None if it is dropped."""
    keyword, _, rest = body.partition(b"\0")
    if keyword not in _ORIENTING or len(body) > most:
        return None
    if kind == b"zTXt":
        text = _inflated(rest[1:], most)
        return None if text is None else (b"tEXt", keyword + b"\0" + text)
    if kind == b"iTXt" and rest[:1] == b"\1":
        language, _, more = rest[2:].partition(b"\0")
        translated, _, packed = more.partition(b"\0")
        text = _inflated(packed, most)
        head = b"\0".join([keyword + b"\0\0", language, translated, b""])
        return None if text is None else (b"iTXt", head + text)
    return kind, body


def _inflated(packed: bytes, most: int) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(packed, most)
    except zlib.error:
        return None
    return text if inflater.eof else None


def _chunk(kind: bytes, body: bytes) -> bytes:
    crc = zlib.crc32(body, zlib.crc32(kind))
    return b"".join([struct.pack(">I", len(body)), kind, body, struct.pack(">I", crc)])


def _parts(data: bytes) -> Iterator[bytes]:
    """Yields the kept segments of a JPEG before its first scan, then the rest."""
    yield data[:2]
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            end = at + 1
        elif marker in MARKERS_WITHOUT_LENGTH:
            end = at + 2
        else:
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker == _SCAN or end > len(data):
            break
        if _is_kept(marker, data[at + 4 : end]):
            yield data[at:end]
        at = end
    yield data[at:]


def _is_kept(marker: int, body: bytes) -> bool:
    if marker not in _SEGMENTS:
        return marker != _COMMENT
    begin, length = _KEPT_SEGMENTS.get(marker, (b"", 1 << 16))
    return len(body) >= length and body.startswith(begin)
