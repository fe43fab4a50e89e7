"""What the server and the process that opens pictures say to each other, without a decoder."""

import struct
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from shared.models.pictures import PictureConfig
from shared.text import worker

DEADLINE_S = 10.0
"""The largest picture that is decoded takes 2 s of a processor that has nothing else to do."""

PART = "image_url"
"""What is at fault where a picture is refused."""

SIDES = struct.Struct("<II")
"""Height and width, before the pixels of an answer."""


@dataclass(frozen=True)
class OpenedPicture:
    """A picture at the size that a model wants: red, green and blue of each pixel, row by row."""

    height: int
    width: int
    rgb: bytes | memoryview

    @property
    def pixels(self) -> UInt8[np.ndarray, "height width 3"]:
        """The same as an array, which cannot be written."""
        return np.frombuffer(self.rgb, np.uint8).reshape(self.height, self.width, 3)


def pack_config(config: PictureConfig) -> bytes:
    """The first message."""
    return worker.pack(vars(config))


def pack_address(url: str, is_low: bool) -> tuple[bytes, bytes]:
    """Every other message, in two parts: megabytes are neither written as JSON nor copied again."""
    body = url.encode()
    return worker.LENGTH.pack(1 + len(body)) + (b"1" if is_low else b"0"), body


def unpack_address(message: bytes) -> tuple[str, bool]:
    """The inverse of `pack_address`."""
    return message[1:].decode(), message[:1] == b"1"


def pack_picture(picture: OpenedPicture) -> bytes:
    """An answer."""
    return SIDES.pack(picture.height, picture.width) + picture.rgb


def unpack_picture(answer: bytes | memoryview) -> OpenedPicture:
    """The inverse of `pack_picture`."""
    height, width = SIDES.unpack_from(answer)
    return OpenedPicture(height, width, answer[SIDES.size :])
