"""The address of a picture in a request, which carries the picture itself."""

import base64
import binascii

from shared.models.pictures import PictureRefused

SCHEME = "data:"
BASE64 = ";base64"


def data_of(url: str) -> bytes:
    """The bytes that a data URL holds; the type that it names counts for nothing.

    Raises:
      PictureRefused: It is another address, which nothing fetches, or is broken.

    Source: RFC 2397.
    """
    if url[: len(SCHEME)].lower() != SCHEME:
        raise PictureRefused(
            "the picture's url must be a data URL; remote addresses are not fetched, so send the "
            "picture itself as data:image/png;base64,..."
        )
    kind, comma, encoded = url.partition(",")
    if not comma or not kind.lower().endswith(BASE64):
        raise PictureRefused("the picture's data URL must have ;base64, before the data")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        raise PictureRefused("the picture's data URL holds no valid base64") from error
