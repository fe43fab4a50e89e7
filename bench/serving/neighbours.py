"""What odd pictures cost those who have sent none: the gaps of a stream beside them.

    python -m bench.serving.neighbours --rounds 5 --out gaps.json

Asks a running server whose model sees for a stream, alone and while 12 odd pictures are sent again
and again, all at once. Told are the longest gap between two events of the stream, the longest that
is not among the highest hundredth, the median, and how each picture was answered. The exit code is
1 where one was answered with another status than it should.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.serving.client import Client, NoServer
from bench.serving.prompt_sets import CHAT, Ask
from bench.serving.run import address_options, url_of
from tests.support.pictures import PATTERN, REFUSED, deep_colours, rgb, stored
from tests.support.pictures import url_of as data_url

TEXT = {"type": "text", "text": "Count slowly to one thousand, one number a line."}
OK, BAD = "", "400"
"""How an answer begins that is none of an error, and how one that is."""


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    return stored(rgb(), exif=exif)


TINY = data_url(stored(Image.new("RGB", (1, 1))))
GOOD = {
    "1-pixel side": stored(Image.new("RGB", (100, 1))),
    "CMYK": stored(rgb().convert("CMYK"), "JPEG"),
    "16 bit": deep_colours(PATTERN.astype(np.uint16) * 257),
    "turned": _turned(),
    "palette": stored(rgb().quantize(200)),
}
NAMES = ("bomb", "truncated", "svg", "wrong base64", "animated", "remote")
ODD: dict[str, tuple[list[str], str]] = {
    **{name: ([REFUSED[name][0]], BAD) for name in NAMES},
    "10,000 tiny": ([TINY] * 10_000, BAD),
    **{name: ([data_url(data)], OK) for name, data in GOOD.items()},
}
"""The pictures of each request, and what its answer's error begins with."""


def asking(model: str, urls: list[str], max_tokens: int) -> Ask:
    """A question with pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    body = {"model": model, "messages": [{"role": "user", "content": [*parts, TEXT]}]}
    return Ask(CHAT, {**body, "max_tokens": max_tokens, "temperature": 0})


async def gaps_beside(client: Client, ask: Ask, others: Any) -> list[float]:
    """Milliseconds between the events of a stream that runs until others have ended, or once."""
    gaps: list[float] = []
    beside = asyncio.ensure_future(others)
    while True:
        reply = await client.ask(ask, streams=True, zero_s=time.perf_counter())
        if reply.error is not None:
            raise NoServer(f"the stream failed: {reply.reason}")
        gaps += (np.diff(reply.times_s) * 1e3).tolist()
        if beside.done():
            await beside
            return gaps


async def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The gaps alone and beside the pictures, and the pictures that were answered otherwise.

    Raises:
      NoServer: Nobody answers, or not with a stream.
    """
    wrong: dict[str, str] = {}

    async def send(client: Client, model: str) -> None:
        async def one(name: str) -> None:
            urls, want = ODD[name]
            reply = await client.ask(asking(model, urls, 1), streams=False, zero_s=0.0)
            said = reply.error or OK
            if (not said) != (not want) or not said.startswith(want):
                wrong[name] = f"{said}: {reply.reason}"

        for _ in range(options.rounds):
            await asyncio.gather(*map(one, ODD))

    async with Client(url_of(options), options.api_key, options.timeout) as client:
        model = options.model or await client.model()
        ask = asking(model, [], options.max_tokens).with_fields(ignore_eos=True)
        await send(client, model)  # the first picture starts a process
        alone = await gaps_beside(client, ask, asyncio.sleep(0))
        return {
            "alone": alone,
            "beside": await gaps_beside(client, ask, send(client, model)),
        }, wrong


def parse(arguments: list[str]) -> argparse.Namespace:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.neighbours", description=(__doc__ or "").splitlines()[0]
    )
    address_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="how often the pictures are sent")
    parser.add_argument("--max-tokens", type=int, default=200, help="of the stream, which goes on")
    parser.add_argument("--out", type=Path, help="where the numbers are written as JSON")
    return parser.parse_args(arguments)


def told(gaps: list[float]) -> dict[str, float]:
    """Of the gaps, in milliseconds."""
    return {
        "events": float(len(gaps)),
        "median_ms": float(np.median(gaps)),
        "p99_ms": float(np.percentile(gaps, 99)),
        "longest_ms": max(gaps),
    }


def main(arguments: list[str]) -> int:
    """Measures and tells."""
    options = parse(arguments)
    try:
        gaps, wrong = asyncio.run(measure(options))
    except NoServer as error:
        print(error, file=sys.stderr)
        return 2
    rows = {name: told(found) for name, found in gaps.items()}
    table = Table("", *next(iter(rows.values())))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    for name, said in wrong.items():
        print(f"{name} was answered with {said}", file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps({**rows, "answered_otherwise": wrong}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
