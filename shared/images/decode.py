"""Decoding of an image and resizing to the size of the model.

- Palettes, grey values, CMYK and other colours become RGB as Pillow converts them.
- Transparency is dropped, as by the image processors used in training.
- 16-bit channels keep their upper 8 bits.
- The EXIF orientation is applied before the size is chosen. Nothing else of EXIF is read, and
  broken EXIF is ignored. Other metadata is dropped unread, whatever its size.
- An image of several frames is an error, except a GIF of one frame. A JPEG that contains further
  images, as cameras write them, gives the first one.
"""

import io
import warnings

from PIL import ExifTags, Image

from shared.images.header import MAX_PIXELS, Header, read_header
from shared.images.metadata import without_metadata
from shared.images.worker_protocol import OpenedImage
from shared.models.image_processor import ImageProcessorConfig, InvalidImageError

DEEP = "I;16"
"""Prefix of Pillow's modes of 16-bit grey; Pillow reads 16-bit colours as 8 bits."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Operation that makes an image upright, by EXIF orientation."""


def opened(data: bytes, config: ImageProcessorConfig) -> OpenedImage:
    """Decodes and resizes the image of a file.

    Raises:
      ImageRefused: The image is invalid or unsupported; see above, and
        `ImageProcessorConfig.smart_resize`.
    """
    header = read_header(data)
    _check(header)
    config.smart_resize(
        header.height, header.width
    )  # rejects extreme aspect ratios before decoding
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about broken EXIF, which is ignored
            image = _decoded(data, header.kind)
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidImageError(f"the image is an invalid {header.kind}: {error}") from error
    height, width = config.smart_resize(image.height, image.width)
    fitted = image.resize((width, height), Image.Resampling.BICUBIC)
    return OpenedImage(height, width, fitted.tobytes())


def _check(header: Header) -> None:
    if header.is_animated:
        raise InvalidImageError(
            f"the image is an animated {header.kind}, and video is not supported; send one frame"
        )
    if header.height * header.width > MAX_PIXELS:
        raise InvalidImageError(
            f"the image has {header.width} x {header.height} pixels, and the limit is "
            f"{MAX_PIXELS}; send a smaller one"
        )


def _decoded(data: bytes, kind: str) -> Image.Image:
    """Decodes a whole image, upright and in RGB."""
    file = io.BytesIO(without_metadata(data, kind))
    with Image.open(file, formats=(kind,)) as image:
        image.load()
        upright = _upright(image)
        if upright.mode.startswith(DEEP):
            upright = upright.point(lambda value: value * (1 / 256), "L")
        return upright.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    # Pillow's own function rewrites the EXIF, which fails for some EXIF that it can read.
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # any error of the library means broken EXIF
        return image
    return image if turn is None else image.transpose(turn)
