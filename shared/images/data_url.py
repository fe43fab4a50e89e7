"""Data URLs of images in requests."""

import binascii
import re
from urllib.parse import unquote_to_bytes

from shared.models.image_processor import InvalidImageError

SCHEME = b"data:"
_BASE64 = re.compile(rb"; *base64\Z", re.IGNORECASE)
_AROUND = bytes(range(33))  # stripped from both ends of a URL
_WITHIN = b"\t\n\r"
_SPACES = b"\t\n\f\r "
_OTHER_LETTERS = bytes.maketrans(b"-_", b"+/")  # of base64 for URLs


def data_of(url: str) -> bytes:
    """Decodes a data URL; its media type is ignored.

    Base64 is decoded as in browsers, with white space, escapes such as `%3D` and without padding.
    The URL-safe alphabet is valid too.

    Raises:
      ImageRefused: The URL is not a data URL, or its base64 is invalid. Nothing is fetched.

    Source: RFC 2397; the data: URL processor of WHATWG Fetch, forgiving-base64 of WHATWG Infra;
    RFC 4648, section 5.
    """
    # A character beyond ASCII becomes "?", which is invalid base64 too.
    address = url.encode("ascii", "replace").strip(_AROUND).translate(None, _WITHIN)
    if address[: len(SCHEME)].lower() != SCHEME:
        raise InvalidImageError(
            "the image's url must be a data URL, because remote URLs are not fetched; send the "
            "image itself as data:image/png;base64,..."
        )
    kind, comma, encoded = address.partition(b"#")[0].partition(b",")
    if not comma or not _BASE64.search(kind.strip(_SPACES)):
        raise InvalidImageError("the image's data URL must have ;base64, before the data")
    try:
        return _decoded(unquote_to_bytes(encoded))
    except binascii.Error as error:
        raise InvalidImageError("the image's data URL contains invalid base64") from error


def _decoded(encoded: bytes) -> bytes:
    letters = encoded.translate(_OTHER_LETTERS, _SPACES)
    if len(letters) % 4:
        letters += b"=" * (-len(letters) % 4)
    return binascii.a2b_base64(letters, strict_mode=True)
