"""Process that decodes images; see `shared.text.worker`."""

from collections.abc import Callable
from typing import Any

from shared.images.data_url import data_of
from shared.images.decode import opened
from shared.images.worker_protocol import DEADLINE_S, PART, pack_image, unpack_address
from shared.models.image_processor import ImageProcessorConfig, InvalidImageError
from shared.text import worker
from shared.text.worker import WorkerError

MAX_MEMORY = 1 << 30
"""Limit in bytes, libraries not included; the largest image takes half of it."""


def begin(given: Any) -> Callable[[Any], bytes]:
    """Returns the decoder for the model of the first message."""
    config = ImageProcessorConfig(**given)
    low = config.low_detail()

    def open_image(asked: Any) -> bytes:
        url, is_low = asked
        try:
            return pack_image(opened(data_of(url), low if is_low else config))
        except InvalidImageError as error:
            raise WorkerError(str(error), PART) from error
        except MemoryError:
            raise WorkerError(
                "the image takes too much memory to decode; send a smaller one", PART
            ) from None

    return open_image


if __name__ == "__main__":
    worker.run(begin, read=unpack_address, deadline_s=DEADLINE_S, max_memory=MAX_MEMORY)
