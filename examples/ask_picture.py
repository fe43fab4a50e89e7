"""Draws a picture, and asks a running server what is on it.

`make serve ARGS="--model-path models/demo/seeing"` in one terminal, `python -m examples.ask_picture
[URL]` in another; another `--seed` draws another picture, `--save FILE.png` keeps it to look at.
"""

import argparse
import base64
import io
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from models.demo.drawn import Drawn, drawn

QUESTION = "Extract the fields product, color, quantity as JSON.\n\n"


def png_of(picture: Drawn) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, "PNG")
    return file.getvalue()


def answer(url: str, png: bytes) -> str:
    """What the model says of a picture."""
    address = "data:image/png;base64," + base64.b64encode(png).decode()
    parts = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": address}},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    said = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    return said.json()["choices"][0]["message"]["content"]


def main(options: argparse.Namespace) -> None:
    """Prints what was drawn, and what the model has seen."""
    picture = drawn(np.random.default_rng(options.seed))
    if options.save:
        options.save.write_bytes(png_of(picture))
    print(f"drawn: {picture.count} x {picture.color} {picture.thing}")
    print(answer(options.url, png_of(picture)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", type=Path, help="a file for the picture")
    given = parser.parse_args()
    try:
        main(given)
    except httpx.ConnectError:
        raise SystemExit(f"nobody answers at {given.url}; start a server first") from None
