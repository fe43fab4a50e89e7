"""Pictures are opened in processes of their own: a bad one is refused, and holds up nobody."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from PIL import Image

from shared.server.pictures import MAX_PICTURES, PictureOpener
from shared.text.worker import WorkRefused
from tests.support.golden_pictures import picture_config
from tests.support.pictures import PATTERN, REFUSED, rgb, stored, url_of

GOOD = url_of(stored(rgb()))
MAX_GAP_S = 0.05
TRIES = 5  # a machine that is busy otherwise makes everybody wait, but not each time


def with_opener(work: Callable[[PictureOpener], Awaitable[None]]) -> None:
    async def run() -> None:
        opener = PictureOpener(picture_config())
        try:
            await work(opener)
        finally:
            await opener.close()

    asyncio.run(asyncio.wait_for(run(), 120))


async def longest_gap(work: Awaitable[None]) -> float:
    """The longest time for which the event loop did nothing else."""
    working, longest, last = asyncio.ensure_future(work), 0.0, time.monotonic()
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await working
    return longest


def test_pictures_come_in_the_order_of_their_addresses():
    async def work(opener: PictureOpener) -> None:
        turned = url_of(stored(rgb().rotate(90, expand=True)))
        first, second = await opener.open([GOOD, turned])
        assert (first.height, first.width, first.rgb) == (40, 48, PATTERN.tobytes())
        assert (second.height, second.width) == (48, 40)

    with_opener(work)


def test_bad_pictures_are_refused_and_hold_up_neither_the_loop_nor_other_requests():
    async def refused(opener: PictureOpener, name: str) -> None:
        url, words = REFUSED[name]
        with pytest.raises(WorkRefused) as error:
            await opener.open([GOOD, url])
        assert words in str(error.value)
        assert error.value.part == "image_url"

    async def all_of_them(opener: PictureOpener) -> None:
        refusals = (refused(opener, name) for name in REFUSED)
        *_, (good,) = await asyncio.gather(*refusals, opener.open([GOOD]))
        assert good.rgb == PATTERN.tobytes()

    async def work(opener: PictureOpener) -> None:
        gaps = [await longest_gap(all_of_them(opener)) for _ in range(TRIES)]
        assert min(gaps) < MAX_GAP_S

    with_opener(work)


def test_ten_thousand_pictures_are_refused_before_one_is_opened():
    async def work(opener: PictureOpener) -> None:
        tiny = url_of(stored(Image.new("RGB", (1, 1))))
        began = time.monotonic()
        with pytest.raises(WorkRefused, match=f"10000 pictures, at most {MAX_PICTURES} are taken"):
            await opener.open([tiny] * 10_000)
        assert time.monotonic() - began < 0.1  # a process takes longer to start

    with_opener(work)
