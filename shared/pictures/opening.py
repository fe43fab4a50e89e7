"""Opens a picture and brings it to the size that a model wants.

What a picture is brought to is decided by name:

- A palette, grey values, CMYK and other colours become RGB as Pillow converts them.
- Of transparency the colours beneath are taken, as the processors do with which models are trained.
- Of 16 bits in a channel the upper 8 are taken.
- A picture that EXIF says is turned is turned, before its sides are looked at. Nothing else of EXIF
  is read, and nothing of a broken one. Other metadata is dropped unread, whatever its size.
- A picture of several frames is refused, and a GIF of one is taken; of a JPEG that carries others
  behind it, as cameras write them, the first is taken.
"""

import io
import warnings

from PIL import ExifTags, Image

from shared.models.pictures import PictureConfig, PictureRefused
from shared.pictures.exchange import OpenedPicture
from shared.pictures.header import MAX_PIXELS, Header, read_header
from shared.pictures.metadata import without_metadata

DEEP = "I;16"
"""Begins what Pillow calls 16 bits of grey; those of colours it reads as 8."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture upright, by what EXIF says; nothing of one that is."""


def opened(data: bytes, config: PictureConfig) -> OpenedPicture:
    """The picture in a file's bytes.

    Raises:
      PictureRefused: It is not taken; see above, and `PictureConfig.fitted`.
    """
    header = read_header(data)
    _check(header)
    config.fitted(header.height, header.width)  # one that is too long is not decoded either
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broken EXIF, which is then not looked at
            image = _decoded(data, header.kind)
    except (OSError, SyntaxError, ValueError) as error:
        raise PictureRefused(f"the picture is a broken {header.kind}: {error}") from error
    height, width = config.fitted(image.height, image.width)
    fitted = image.resize((width, height), Image.Resampling.BICUBIC)
    return OpenedPicture(height, width, fitted.tobytes())


def _check(header: Header) -> None:
    if header.is_animated:
        raise PictureRefused(
            f"the picture is an animated {header.kind}, and video is not served; send one frame"
        )
    if header.height * header.width > MAX_PIXELS:
        raise PictureRefused(
            f"the picture has {header.width} x {header.height} pixels, more than the "
            f"{MAX_PIXELS} that are decoded; send a smaller one"
        )


def _decoded(data: bytes, kind: str) -> Image.Image:
    """All of a picture, upright and in RGB."""
    file = io.BytesIO(without_metadata(data, kind))
    with Image.open(file, formats=(kind,)) as image:
        image.load()
        upright = _upright(image)
        if upright.mode.startswith(DEEP):
            upright = upright.point(lambda value: value * (1 / 256), "L")
        return upright.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    # Pillow's own function writes the EXIF anew, which it cannot do of every one that it reads.
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # whatever the library says of a broken one
        return image
    return image if turn is None else image.transpose(turn)
