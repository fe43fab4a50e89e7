"""What opens the pictures of a request."""

from __future__ import annotations

from collections.abc import Sequence

from shared.models.pictures import PictureConfig
from shared.pictures.opening import Picture
from shared.pictures.worker import DEADLINE_S, PART, pack_address, pack_config, unpack_picture
from shared.server.workers import Workers
from shared.text.worker import WorkRefused

MAX_PICTURES = 64
"""Of one request."""


class PictureOpener(Workers):
    """Opens pictures in processes of their own, each picture within a deadline."""

    def __init__(self, config: PictureConfig) -> None:
        super().__init__(
            "shared.pictures.worker",
            pack_config(config),
            name="picture",
            deadline_s=DEADLINE_S,
            part=PART,
        )

    async def open(self, urls: Sequence[str]) -> list[Picture]:
        """The pictures at some addresses, one after the other, so that a request has one worker.

        Raises:
          WorkRefused: There are too many; or one is refused, see `shared.pictures.opening`, or
            takes too long.
        """
        if len(urls) > MAX_PICTURES:
            reason = f"the request has {len(urls)} pictures, at most {MAX_PICTURES} are taken"
            raise WorkRefused(reason, PART)
        return [unpack_picture(await self.ask_bytes(pack_address(url))) for url in urls]
