"""The address of a picture in a request, which carries the picture itself."""

import binascii
import re
from urllib.parse import unquote_to_bytes

from shared.models.pictures import PictureRefused

SCHEME = b"data:"
_BASE64 = re.compile(rb"; *base64\Z", re.IGNORECASE)
_AROUND = bytes(range(33))  # what URLs lose at both ends
_WITHIN = b"\t\n\r"
_SPACES = b"\t\n\f\r "
_OTHER_LETTERS = bytes.maketrans(b"-_", b"+/")  # of base64 for URLs


def data_of(url: str) -> bytes:
    """Reads the bytes that a data URL holds; the type that it names counts for nothing.

    Base64 is read as browsers read it, with white space, escapes such as `%3D` and without
    padding, and with the letters that are for URLs.

    Raises:
      PictureRefused: It is another address, which nothing fetches, or is broken.

    Source: RFC 2397; the data: URL processor of WHATWG Fetch, forgiving-base64 of WHATWG Infra;
    RFC 4648, section 5.
    """
    # A letter beyond ASCII is no base64, and becomes a sign that is none either.
    address = url.encode("ascii", "replace").strip(_AROUND).translate(None, _WITHIN)
    if address[: len(SCHEME)].lower() != SCHEME:
        raise PictureRefused(
            "the picture's url must be a data URL; remote addresses are not fetched, so send the "
            "picture itself as data:image/png;base64,..."
        )
    kind, comma, encoded = address.partition(b"#")[0].partition(b",")
    if not comma or not _BASE64.search(kind.strip(_SPACES)):
        raise PictureRefused("the picture's data URL must have ;base64, before the data")
    try:
        return _decoded(unquote_to_bytes(encoded))
    except binascii.Error as error:
        raise PictureRefused("the picture's data URL holds no valid base64") from error


def _decoded(encoded: bytes) -> bytes:
    letters = encoded.translate(_OTHER_LETTERS, _SPACES)
    if len(letters) % 4:
        letters += b"=" * (-len(letters) % 4)
    return binascii.a2b_base64(letters, strict_mode=True)
