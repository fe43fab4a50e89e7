"""Messages between the server and the process that decodes images; needs no decoder."""

import struct
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from shared.models.image_processor import ImageProcessorConfig
from shared.text import worker

DEADLINE_S = 10.0
"""Limit of one image. The largest one takes 2 s of an idle core."""

PART = "image_url"
"""Part of the request that an error of an image names."""

SIDES = struct.Struct("<II")
"""Height and width, in front of the pixels of a result."""


@dataclass(frozen=True)
class OpenedImage:
    """Decoded image at the size of the model: red, green and blue of each pixel, row by row."""

    height: int
    width: int
    rgb: bytes | memoryview

    @property
    def pixels(self) -> UInt8[np.ndarray, "height width 3"]:
        """Read-only array of the pixels."""
        return np.frombuffer(self.rgb, np.uint8).reshape(self.height, self.width, 3)


def pack_config(config: ImageProcessorConfig) -> bytes:
    """Packs the first message: the settings of the image processor."""
    return worker.pack(vars(config))


def pack_address(url: str, is_low: bool) -> tuple[bytes, bytes]:
    """Packs an image to decode, in two parts, so that its megabytes are not copied."""
    body = url.encode()
    return worker.LENGTH.pack(1 + len(body)) + (b"1" if is_low else b"0"), body


def unpack_address(message: bytes) -> tuple[str, bool]:
    """Reverses `pack_address`."""
    return message[1:].decode(), message[:1] == b"1"


def pack_image(image: OpenedImage) -> bytes:
    """Packs a decoded image."""
    return SIDES.pack(image.height, image.width) + image.rgb


def unpack_image(answer: bytes | memoryview) -> OpenedImage:
    """Reverses `pack_image`."""
    height, width = SIDES.unpack_from(answer)
    return OpenedImage(height, width, answer[SIDES.size :])
