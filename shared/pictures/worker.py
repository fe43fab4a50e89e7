"""Opens pictures in a process of its own; see `shared.text.worker`."""

import struct
from collections.abc import Callable
from typing import Any

from shared.models.pictures import PictureConfig, PictureRefused
from shared.pictures.address import data_of
from shared.pictures.opening import OpenedPicture, opened
from shared.text import worker
from shared.text.worker import WorkRefused

DEADLINE_S = 10.0
"""The largest picture that is decoded takes 2 s of a processor that has nothing else to do."""

MAX_MEMORY = 1 << 30
"""Bytes of the process; the largest picture that is decoded takes half of it."""

SIDES = struct.Struct("<II")
"""Height and width, before the pixels of an answer."""

PART = "image_url"
"""What is at fault where a picture is refused."""


def pack_config(config: PictureConfig) -> bytes:
    """The first message."""
    return worker.pack(vars(config))


def pack_address(url: str) -> bytes:
    """Every other message."""
    return worker.pack(url)


def unpack_picture(answer: bytes) -> OpenedPicture:
    """What a worker has answered."""
    height, width = SIDES.unpack_from(answer)
    return OpenedPicture(height, width, answer[SIDES.size :])


def begin(given: Any) -> Callable[[Any], bytes]:
    """What opens pictures for the model of the first message."""
    config = PictureConfig(**given)

    def open_picture(url: Any) -> bytes:
        try:
            picture = opened(data_of(url), config)
        except PictureRefused as error:
            raise WorkRefused(str(error), PART) from error
        except MemoryError:
            raise WorkRefused("the picture takes too much memory to decode", PART) from None
        return SIDES.pack(picture.height, picture.width) + picture.rgb

    return open_picture


if __name__ == "__main__":
    worker.run(begin, deadline_s=DEADLINE_S, max_memory=MAX_MEMORY)
