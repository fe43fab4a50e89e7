"""Pool of worker processes that decode images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.engine.image_inputs import PromptImage
from shared.images.header import MAX_PIXELS
from shared.images.worker_protocol import (
    DEADLINE_S,
    PART,
    OpenedImage,
    pack_address,
    pack_config,
    unpack_image,
)
from shared.models.image_processor import ImageProcessorConfig
from shared.server.engine_link.workers import NUM_WORKERS, WorkerPool
from shared.server.protocol.content import MAX_IMAGES, ImagePart
from shared.server.protocol.errors import ApiError
from shared.text.worker import WorkerError

MAX_BYTES = 1 << 28
"""Maximum bytes of the resized pixels of one request."""

MAX_S = 30.0
"""Seconds to decode all images of a request, without waiting."""


class ImageDecoderPool(WorkerPool):
    """Decodes images in worker processes, each image within a deadline.

    Args:
      config: Image sizes and normalisation of the model.
    """

    def __init__(self, config: ImageProcessorConfig) -> None:
        super().__init__(
            "shared.images.worker",
            pack_config(config),
            name="image",
            deadline_s=DEADLINE_S,
            part=PART,
        )
        self._config = config
        # At most one request per worker decodes images: encoded images are small while they wait,
        # decoded ones are not.
        self._turns = asyncio.Semaphore(NUM_WORKERS)

    @property
    def bounds(self) -> dict[str, int]:
        """Returns the limits of images; see `shared.server.protocol.response_types.ImageLimits`."""
        per_row = self._config.multiple**2
        return {
            "max_images": MAX_IMAGES,
            "max_pixels": MAX_PIXELS,
            "max_bytes": MAX_BYTES,
            "pixels_per_token": per_row,
            "min_tokens": self._config.min_pixels // per_row,
        }

    def num_tokens(self, image: OpenedImage) -> int:
        """Returns the number of prompt tokens of an image."""
        return self._config.num_tokens(image.height, image.width)

    def placed(
        self, opened: Sequence[OpenedImage], firsts: Sequence[int]
    ) -> tuple[PromptImage, ...]:
        """Returns images with the positions of their first tokens; computes their digests."""
        return tuple(
            PromptImage.of(first, each.pixels, self._config.multiple)
            for each, first in zip(opened, firsts, strict=True)
        )

    async def open(self, sent: Sequence[ImagePart], field: str) -> list[OpenedImage]:
        """Decodes the images of a request one after the other, so that a request uses one worker.

        Args:
          sent: Images.
          field: Field of the request with the conversation, for errors.

        Raises:
          ApiError: Together the images take too long or too much memory, or one is invalid (see
            `shared.images.decode`); names the invalid image.
        """
        try:
            async with self._turns, asyncio.timeout(MAX_S):
                return await self._open_all(sent, field)
        except TimeoutError:
            reason = f"decoding the images of the request takes longer than {MAX_S:g} s"
            raise ApiError(400, reason, field) from None

    async def _open_all(self, sent: Sequence[ImagePart], field: str) -> list[OpenedImage]:
        opened: list[OpenedImage] = []
        for each in sent:
            try:
                answer = await self.call_bytes(*pack_address(each.url, each.is_low))
            except WorkerError as error:
                raise ApiError(400, str(error), each.place) from error
            opened.append(unpack_image(answer))
            if sum(len(image.rgb) for image in opened) > MAX_BYTES:
                reason = f"the images of the request have more than {MAX_BYTES} bytes of pixels"
                raise ApiError(400, f"{reason}; send fewer or smaller ones", field)
        return opened
