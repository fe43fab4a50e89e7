"""Draws an image, and asks a running server what is on it.

`make serve ARGS="--model-path models/demo/vlm"` in one terminal, and in another
`python -m examples.chat_with_image`. Another `--seed` draws another image, `--save FILE.png` keeps it
to look at. `--seed 0 --num-prompts 24` counts how often color, product and quantity are right: 24,
24 and 19 times.
"""

import argparse
import base64
import io
import json
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from bench.ground.server import (
    HIDDEN,
    headers_of,
    no_answer,
    plain_url,
    prompt_count,
    server_options,
    url_of,
)
from models.demo.synthetic_images import Drawn, drawn

QUESTION = "Extract the fields product, color, quantity as JSON.\n\n"


def png_of(picture: Drawn) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, "PNG")
    return file.getvalue()


def answer(options: argparse.Namespace, png: bytes) -> str:
    """The text of the model about an image."""
    address = "data:image/png;base64," + base64.b64encode(png).decode()
    parts = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": address}},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    body |= {"model": options.model} if options.model else {}
    how = {"headers": headers_of(options.api_key), "timeout": options.timeout}
    url = f"{url_of(options)}/v1/chat/completions"
    said = httpx.post(url, json=body, **how).raise_for_status()
    return said.json()["choices"][0]["message"]["content"]


def is_right(text: str, picture: Drawn) -> dict[str, bool]:
    """Compares each field of an answer with what was drawn; no field of a text that is no JSON."""
    wanted = {
        "product": f"{picture.color} {picture.thing}",
        "color": picture.color,
        "quantity": picture.count,
    }
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    return {name: str(found.get(name)) == str(value) for name, value in wanted.items()}


def main(options: argparse.Namespace) -> None:
    """Prints what was drawn and what the model answers; of several images how often it is right."""
    right = Counter[str]()
    for seed in range(options.seed, options.seed + options.num_prompts):
        picture = drawn(np.random.default_rng(seed))
        if options.save and seed == options.seed:
            options.save.write_bytes(png_of(picture))
        text = answer(options, png_of(picture))
        print(f"drawn: {picture.count} x {picture.color} {picture.thing}\n{text}", flush=True)
        right.update(name for name, holds in is_right(text, picture).items() if holds)
    if options.num_prompts > 1:
        counts = ", ".join(f"{name} {right[name]}" for name in ("color", "product", "quantity"))
        print(f"right, of {options.num_prompts} images: {counts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    server_options(parser)
    parser.add_argument("old_url", nargs="?", type=plain_url, help=HIDDEN)
    prompt_count(parser, 1, "images that are drawn, with one seed after the other")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", type=Path, help="a file for the first image")
    given = parser.parse_args()
    given.base_url = given.base_url or given.old_url
    try:
        main(given)
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise SystemExit(no_answer(url_of(given), error)) from None
