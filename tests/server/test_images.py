"""Image decoding in worker processes, and image data sent to the engine."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.engine.checks import RequestLimits
from shared.engine.image_inputs import PromptImage
from shared.engine.request import SamplingParams
from shared.process.ipc_messages import FrameReader, pack, requests_of
from shared.server.completions import image_decoder_pool as images
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.engine_link import chunked_write as pieces
from shared.server.engine_link import engine_client
from shared.server.engine_link.engine_client import EngineClient
from shared.server.engine_link.engine_errors import QueueFull
from shared.server.engine_link.server_metrics import ServerMetrics, TokenTimes
from shared.server.engine_link.submission import SubmittedPrompt
from shared.server.protocol.content import ImagePart
from shared.server.protocol.errors import ApiError
from tests.support.engine_info import facts_of
from tests.support.golden_images import image_config
from tests.support.http_fixtures import IMAGE
from tests.support.images import PATTERN, REFUSED, rgb, stored, url_of

FACTS = facts_of(
    RequestLimits(
        context_length=64,
        max_request_tokens=64,
        vocab_size=IMAGE + 1,
        max_stop_token_ids=1,
        max_logit_bias_entries=1,
        max_logprobs=None,
    ),
    images=image_config(),
)
GOOD = url_of(stored(rgb()))
MAX_GAP_S = 0.05
TRIES = 5  # retries, because a busy machine delays single runs


def sent(*urls: str) -> list[ImagePart]:
    return [ImagePart(f"place {number}", url) for number, url in enumerate(urls)]


def with_opener(work: Callable[[ImageDecoderPool], Awaitable[None]]) -> None:
    async def run() -> None:
        opener = ImageDecoderPool(image_config())
        try:
            await work(opener)
        finally:
            await opener.close()

    asyncio.run(asyncio.wait_for(run(), 120))


async def longest_gap(work: Awaitable[None]) -> float:
    """Returns the longest time for which the event loop was blocked."""
    working, longest, last = asyncio.ensure_future(work), 0.0, time.monotonic()
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await working
    return longest


def test_image_decoder_pool_preserves_request_order():
    async def work(opener: ImageDecoderPool) -> None:
        turned = url_of(stored(rgb().rotate(90, expand=True)))
        first, second = await opener.open(sent(GOOD, turned), "messages")
        assert (first.height, first.width, first.rgb) == (40, 48, PATTERN.tobytes())
        assert (second.height, second.width) == (48, 40)

    with_opener(work)


def test_image_decoder_pool_limits_low_detail_size():
    large = stored(Image.new("RGB", (1024, 1024)))
    config = replace(image_config(), max_pixels=1024 * 1024)

    async def work() -> None:
        opener = ImageDecoderPool(config)
        url = url_of(large)
        both = [ImagePart("a", url), ImagePart("b", url, is_low=True)]
        assert [each.height for each in await opener.open(both, "messages")] == [1024, 512]
        await opener.close()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_image_decoder_pool_rejects_invalid_without_blocking():
    async def refused(opener: ImageDecoderPool, name: str) -> None:
        url, words = REFUSED[name]
        with pytest.raises(ApiError) as error:
            await opener.open(sent(GOOD, url), "messages")
        assert words in str(error.value)
        assert (error.value.status, error.value.param) == (400, "place 1")

    async def all_of_them(opener: ImageDecoderPool) -> None:
        refusals = (refused(opener, name) for name in REFUSED)
        *_, (good,) = await asyncio.gather(*refusals, opener.open(sent(GOOD), "messages"))
        assert good.rgb == PATTERN.tobytes()

    async def work(opener: ImageDecoderPool) -> None:
        gaps = [await longest_gap(all_of_them(opener)) for _ in range(TRIES)]
        assert min(gaps) < MAX_GAP_S

    with_opener(work)


async def receive(reader: asyncio.StreamReader, count: int) -> list[list[Any]]:
    """Returns the first `count` messages as the engine reads them."""
    frames, received = FrameReader(), []
    while len(received) < count:
        received += frames.feed(await reader.read(1 << 20))
    return received


def test_open_image_bytes_limit_raises_queue_full(monkeypatch):
    pixels = np.zeros((8, 8, 3), np.uint8)
    shown = (PromptImage.of(0, pixels, 8),)
    prompt = SubmittedPrompt([IMAGE], SamplingParams(), [1, 2], "", 0, shown)

    async def work() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack(FACTS.to_message()))
        client, times = await EngineClient.connect(theirs), TokenTimes(ServerMetrics("it"))
        monkeypatch.setattr(engine_client, "MAX_OPEN_IMAGE_BYTES", 2 * pixels.nbytes)
        first, _ = (client.submit([prompt], times) for _ in range(2))
        with pytest.raises(
            QueueFull, match="at most 384 bytes of image data may be queued or running"
        ):
            client.submit([prompt], times)
        client.submit([replace(prompt, images=())], times)
        await receive(reader, 3)
        first.close()
        client.submit([prompt], times)
        writer.close()
        await client.ended

    asyncio.run(asyncio.wait_for(work(), 30))


def test_submit_writes_pixels_in_chunks_in_order(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    large, small = (
        PromptImage.of(first, np.full((side, side, 3), side, np.uint8), 8)
        for first, side in ((0, 64), (1, 16))
    )
    prompt = SubmittedPrompt([IMAGE, IMAGE], SamplingParams(), [1], "", 0, (large, small))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def work() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack(FACTS.to_message()))
        client, times = await EngineClient.connect(theirs), TokenTimes(ServerMetrics("it"))
        counting = asyncio.create_task(count_turns())
        for each in (prompt, replace(prompt, images=())):
            client.submit([each], times)
        client.drained()
        received = await receive(reader, 3)
        assert turns >= large.pixels.nbytes // 1000
        assert [kind for kind, *_ in received] == ["add", "add", "drained"]
        (request,) = requests_of(*received[0][1:])
        for got, want in zip(request.images, prompt.images, strict=True):
            np.testing.assert_array_equal(got.pixels, want.pixels)
            assert (got.first, got.grid, got.digest) == (want.first, want.grid, want.digest)
        counting.cancel()
        writer.close()
        await client.ended

    asyncio.run(asyncio.wait_for(work(), 30))


def test_unsent_pixels_of_disconnected_client_are_dropped(monkeypatch):
    """Unsent images count toward the limit until their turn; the engine never receives them."""
    pixels = np.zeros((1024, 1024, 3), np.uint8)  # exceeds the socket buffer
    prompt = SubmittedPrompt([IMAGE], SamplingParams(), [1], "", 0, (PromptImage.of(0, pixels, 8),))
    monkeypatch.setattr(engine_client, "MAX_OPEN_IMAGE_BYTES", 3 * pixels.nbytes)

    async def work() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack(FACTS.to_message()))
        client, times = await EngineClient.connect(theirs), TokenTimes(ServerMetrics("it"))
        client.submit([prompt], times)
        await asyncio.sleep(0.01)
        for _ in range(2):
            client.submit([prompt], times).close()
        with pytest.raises(QueueFull):
            client.submit([prompt], times)
        client.submit([replace(prompt, images=())], times)
        received = await receive(reader, 4)
        adds = [(message[3][0][0], len(message[6])) for message in received if message[0] == "add"]
        assert adds == [(1, 1), (4, 0)]
        client.submit([prompt], times)
        writer.close()
        await client.ended

    asyncio.run(asyncio.wait_for(work(), 30))


def test_image_decoder_pool_limits_bytes_and_time(monkeypatch):
    async def work(opener: ImageDecoderPool) -> None:
        await opener.open(sent(GOOD, GOOD), "messages")
        monkeypatch.setattr(images, "MAX_BYTES", 2 * PATTERN.nbytes - 1)
        with pytest.raises(ApiError, match="more than 11519 bytes of pixels"):
            await opener.open(sent(GOOD, GOOD), "messages")
        monkeypatch.setattr(images, "MAX_S", 0.0)
        with pytest.raises(ApiError, match="takes longer than 0 s"):
            await opener.open(sent(GOOD), "messages")
        await asyncio.sleep(0.1)  # until the timed-out worker ends

    with_opener(work)
