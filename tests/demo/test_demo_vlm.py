"""Tests of the demo VLM: synthetic images, their captions and the replies of the model."""

import argparse
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.chat_with_image import answer, png_of
from models.demo.synthetic_images import OUTLINES, SHADES, generate_image
from models.demo.train_vlm import FOLDER, HELD_OUT, TEXT, batch_of, words
from shared.models.families import vision_from_folder
from shared.models.image_processor import images_from_folder
from shared.models.model_folder import ModelFolder
from tests.support.http_fixtures import serving

ASKED, LEAST = 12, 9


@pytest.mark.parametrize("seed", range(4))
def test_synthetic_image_matches_its_caption(seed):
    image = generate_image(np.random.default_rng(seed))
    ground = image.pixels[0, 0]  # no object touches the border
    is_thing = (image.pixels != ground).any(axis=2)
    (shade,) = np.unique(image.pixels[is_thing], axis=0)
    assert np.abs(shade.astype(int) - SHADES[image.color]).max() <= 12
    one = {
        (p.thing, p.count): p.pixels
        for p in map(generate_image, map(np.random.default_rng, range(99)))
    }
    two = one[image.thing, 2]
    size = (two != two[0, 0]).any(axis=2).sum() / 2
    assert is_thing.sum() == image.count * size
    assert f"a {image.color} {image.thing}." in image.sentence
    assert f"is {image.count}." in image.sentence


def test_caption_has_one_token_per_image_token():
    vision = vision_from_folder(FOLDER)
    rows = images_from_folder(ModelFolder(FOLDER), vision).num_tokens(
        *generate_image(np.random.default_rng(0)).pixels.shape[:2]
    )
    batch = batch_of(0, 50)
    assert batch.tokens.shape == (50, rows)
    assert {*batch.tokens.flat} <= {*words()}
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    assert {tokenizer.id_to_token(x) for x in batch.tokens[:, 5]} == {f"Ġ{x}" for x in OUTLINES}


def test_shipped_vlm_describes_held_out_images():
    """Uses speculation with the MTP layer; the images are not part of the training data."""
    command = ["-m", "torch_impl.serve", "--model-path", str(FOLDER), "--port", "0"]
    drafts = ["--speculative-algorithm", "NEXTN", "--context-length", "256"]
    images = [generate_image(np.random.default_rng(HELD_OUT + 10**6 + i)) for i in range(ASKED)]
    with serving([*command, *drafts]) as server:
        options = argparse.Namespace(
            base_url=server.url, model=None, api_key=None, timeout=60.0, host="", port=0
        )
        replies = [answer(options, png_of(each)) for each in images]
    right = [
        json.loads(said)
        == {"product": f"{each.color} {each.thing}", "color": each.color, "quantity": each.count}
        for said, each in zip(replies, images, strict=True)
    ]
    assert sum(right) >= LEAST, list(zip(replies, images, strict=True))
