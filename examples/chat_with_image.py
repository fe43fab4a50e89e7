"""Generates an image and sends it to a running server in a chat request.

`make serve ARGS="--model-path models/demo/vlm"` in one terminal, and
`python -m examples.chat_with_image` in another. `--seed` selects another image, and
`--save FILE.png` writes it to a file. `--seed 0 --num-prompts 24` counts the correct answers:
color 24, product 24 and quantity 19 of 24 images.
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

from bench.common.server import (
    HIDDEN,
    headers_of,
    no_answer,
    plain_url,
    prompt_count,
    server_options,
    url_of,
)
from models.demo.synthetic_images import SyntheticImage, generate_image

QUESTION = "Extract the fields product, color, quantity as JSON.\n\n"


def png_of(image: SyntheticImage) -> bytes:
    """Encodes an image as PNG."""
    file = io.BytesIO()
    Image.fromarray(image.pixels).save(file, "PNG")
    return file.getvalue()


def answer(options: argparse.Namespace, png: bytes) -> str:
    """Returns the model's reply to `QUESTION` about an image."""
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


def is_right(text: str, image: SyntheticImage) -> dict[str, bool]:
    """Compares each field of a reply with the image; all fields are wrong if it is not JSON."""
    wanted = {
        "product": f"{image.color} {image.thing}",
        "color": image.color,
        "quantity": image.count,
    }
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    return {name: str(found.get(name)) == str(value) for name, value in wanted.items()}


def main(options: argparse.Namespace) -> None:
    """Prints each image's description and the model's reply, and the counts for several images."""
    right = Counter[str]()
    for seed in range(options.seed, options.seed + options.num_prompts):
        image = generate_image(np.random.default_rng(seed))
        if options.save and seed == options.seed:
            options.save.write_bytes(png_of(image))
        text = answer(options, png_of(image))
        print(f"image: {image.count} x {image.color} {image.thing}\n{text}", flush=True)
        right.update(name for name, holds in is_right(text, image).items() if holds)
    if options.num_prompts > 1:
        counts = ", ".join(f"{name} {right[name]}" for name in ("color", "product", "quantity"))
        print(f"correct, of {options.num_prompts} images: {counts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    server_options(parser)
    parser.add_argument("old_url", nargs="?", type=plain_url, help=HIDDEN)
    prompt_count(parser, 1, "images to generate, with consecutive seeds")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", type=Path, help="file to write the first image to")
    given = parser.parse_args()
    given.base_url = given.base_url or given.old_url
    try:
        main(given)
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise SystemExit(no_answer(url_of(given), error)) from None
