"""Gaps of a stream while other clients send images of unusual sizes and faults.

    python -m bench.serving.image_interference --rounds 5 --out gaps.json

Requests a stream from a running server with a vision-language model, alone and while 12 images are
sent repeatedly, all at once. Reported are the longest gap between two events of the stream, the
longest below the highest hundredth, and the median; the same for the time to the first event; and
the response to each image. Another process sends the images, because their bodies have megabytes.
Valid images have the size that the server reports under `/capabilities`, so that they are decoded
and encoded. The exit code is 1 if an image gets an unexpected status, and 2 if nothing was
measured.
"""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.common.environment import write_results
from bench.common.server import server_options, url_of
from bench.common.waiting import progress
from bench.serving.client import Client, NoServer
from bench.serving.prompt_sets import CHAT, Ask
from shared.process import gc_freeze
from tests.support.images import REFUSED, deep_colours, rgb, stored
from tests.support.images import url_of as data_url

TEXT = {"type": "text", "text": "Count slowly to one thousand, one number a line."}
OK, BAD = "", "400"
"""Beginnings of the outcome of a served request, and of one with an error."""

TINY = data_url(stored(Image.new("RGB", (1, 1))))
NAMES = ("bomb", "truncated", "svg", "wrong base64", "animated", "remote")

Odd = dict[str, tuple[list[str], str]]
"""The images of each request, and what its answer's error begins with."""


@dataclass(frozen=True)
class Sender:
    """Process that sends images.

    Attributes:
      url, key, timeout_s: As of `Client`.
      model: What the requests name.
      odd: Each round sends all, at once.
      rounds: How often.
    """

    url: str
    key: str | None
    timeout_s: float
    model: str
    odd: Odd
    rounds: int

    def send(self) -> dict[str, str]:
        """The images that were answered otherwise than they should, and how."""
        return asyncio.run(self._send())

    async def _send(self) -> dict[str, str]:
        wrong: dict[str, str] = {}

        async def one(name: str) -> None:
            urls, want = self.odd[name]
            reply = await client.ask(asking(self.model, urls, 1), streams=False, zero_s=0.0)
            result = reply.error or OK
            if (not result) != (not want) or not result.startswith(want):
                wrong[name] = f"{result or 'a text'}: {reply.reason}"

        async with Client(self.url, self.key, self.timeout_s) as client:
            with progress("rounds", self.rounds) as done:
                for _ in range(self.rounds):
                    await asyncio.gather(*map(one, self.odd))
                    done()
        return wrong


def odd_images(bounds: dict[str, int]) -> Odd:
    """Returns invalid images, and valid ones with the fewest tokens that the model supports.

    Args:
      bounds: See `shared.server.protocol.response_types.ImageBounds`.
    """
    tokens, factor = bounds["min_tokens"], math.isqrt(bounds["pixels_per_token"])
    rows = next(count for count in range(math.isqrt(tokens), 0, -1) if tokens % count == 0)
    sides = (rows * factor, tokens // rows * factor, 3)
    pattern = np.random.default_rng(0).integers(0, 256, sides, np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    good = {
        # Enlarged until it has enough pixels, it is a single row of tokens.
        "1-pixel side": stored(Image.new("RGB", (tokens, 1))),
        "CMYK": stored(rgb(pattern).convert("CMYK"), "JPEG"),
        "16 bit": deep_colours(pattern.astype(np.uint16) * 257),
        "turned": stored(rgb(pattern), exif=exif),
        "palette": stored(rgb(pattern).quantize(200)),
    }
    return {
        **{name: ([REFUSED[name][0]], BAD) for name in NAMES},
        "10,000 tiny": ([TINY] * 10_000, BAD),
        **{name: ([data_url(data)], OK) for name, data in good.items()},
    }


def asking(model: str, urls: list[str], max_tokens: int) -> Ask:
    """A question with images."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    body = {"model": model, "messages": [{"role": "user", "content": [*parts, TEXT]}]}
    return Ask(CHAT, {**body, "max_tokens": max_tokens, "temperature": 0})


async def waits_beside(
    client: Client, ask: Ask, others: Awaitable[object]
) -> tuple[list[float], list[float]]:
    """Returns the waits of a stream in milliseconds, once or until other work has ended.

    Returns:
      Between two events, and for the first.
    """
    gaps: list[float] = []
    firsts: list[float] = []
    beside = asyncio.ensure_future(others)
    while True:
        reply = await client.ask(ask, streams=True, zero_s=time.perf_counter())
        if reply.error is not None:
            raise NoServer(f"the stream failed: {reply.reason}")
        gaps += (np.diff(reply.times_s) * 1e3).tolist()
        firsts.append(reply.times_s[0] * 1e3)
        if beside.done():
            await beside
            return gaps, firsts


async def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The waits alone and beside the images, and the images that were answered otherwise.

    Raises:
      NoServer: No server responds, or not with a stream, or the model does not support images.
    """
    where = (url_of(options), options.api_key, options.timeout)
    async with Client(*where) as client:
        model = options.model or await client.model()
        sender = Sender(*where, model, odd_images(await client.images()), options.rounds)
        ask = asking(model, [], options.max_tokens).with_fields(ignore_eos=True)
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            first = await loop.run_in_executor(process, sender.send)  # starts server's processes
            gc_freeze.freeze_gc()  # a collection of all that was imported would be a gap as well
            alone, begun_alone = await waits_beside(client, ask, asyncio.sleep(0))
            sent = loop.run_in_executor(process, sender.send)
            beside, begun_beside = await waits_beside(client, ask, sent)
    waits = {"alone": alone, "beside": beside}
    waits |= {"first alone": begun_alone, "first beside": begun_beside}
    return waits, first | await sent


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.image_interference",
        description=(__doc__ or "").splitlines()[0],
    )
    server_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="how often the images are sent")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of the stream")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def summary_of(waits: list[float]) -> dict[str, float]:
    """Returns longest, almost longest and median wait in milliseconds."""
    return {
        "events": float(len(waits)),
        "median_ms": float(np.median(waits)),
        "p99_ms": float(np.percentile(waits, 99)),
        "longest_ms": max(waits),
    }


def main(arguments: list[str]) -> int:
    """Measures and prints the results."""
    options = parse(arguments)
    try:
        waits, wrong = asyncio.run(measure(options))
    except NoServer as error:
        print(error, file=sys.stderr)
        return 2
    rows = {name: summary_of(found) for name, found in waits.items()}
    table = Table("", *next(iter(rows.values())))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    for name, result in wrong.items():
        print(f"{name} was answered with {result}", file=sys.stderr)
    if options.out:
        write_results(options.out, {**rows, "answered_otherwise": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
