"""The demo model's eyes: what is drawn is what is told, and fits where the picture stands."""

import argparse
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.chat_with_image import answer, png_of
<<<<<<< HEAD
from models.demo.drawn import OUTLINES, SHADES, drawn
from models.demo.train_vlm import FOLDER, HELD_OUT, TEXT, batch_of, words
=======
from models.demo.synthetic_images import OUTLINES, SHADES, drawn
from models.demo.train_vlm import FOLDER, HELD_OUT, TEXT, batch_of, words
>>>>>>> c2e60bcb (models: Rename demo.drawn to demo.synthetic_images)
from shared.models.families import vision_from_folder
from shared.models.pictures import pictures_from_folder
from tests.support.http_fixtures import serving

ASKED, LEAST = 12, 9


@pytest.mark.parametrize("seed", range(4))
def test_a_picture_shows_as_many_things_of_its_color_as_its_sentence_says(seed):
    picture = drawn(np.random.default_rng(seed))
    ground = picture.pixels[0, 0]  # at the edge there is nothing
    is_thing = (picture.pixels != ground).any(axis=2)
    (shade,) = np.unique(picture.pixels[is_thing], axis=0)
    assert np.abs(shade.astype(int) - SHADES[picture.color]).max() <= 12
    one = {(p.thing, p.count): p.pixels for p in map(drawn, map(np.random.default_rng, range(99)))}
    two = one[picture.thing, 2]
    size = (two != two[0, 0]).any(axis=2).sum() / 2
    assert is_thing.sum() == picture.count * size
    assert f"a {picture.color} {picture.thing}." in picture.sentence
    assert f"is {picture.count}." in picture.sentence


def test_a_sentence_has_a_token_for_each_row_of_its_picture():
    vision = vision_from_folder(FOLDER)
    rows = pictures_from_folder(FOLDER, vision).num_tokens(
        *drawn(np.random.default_rng(0)).pixels.shape[:2]
    )
    batch = batch_of(0, 50)
    assert batch.tokens.shape == (50, rows)
    assert {*batch.tokens.flat} <= {*words()}
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    assert {tokenizer.id_to_token(x) for x in batch.tokens[:, 5]} == {f"Ġ{x}" for x in OUTLINES}


def test_the_model_that_ships_says_what_is_drawn():
    """With drafts of its own mtp layer; of pictures that it has not seen."""
    command = ["-m", "torch_impl.serve", "--model-path", str(FOLDER), "--port", "0"]
    drafts = ["--speculative-algorithm", "NEXTN", "--context-length", "256"]
    pictures = [drawn(np.random.default_rng(HELD_OUT + 10**6 + i)) for i in range(ASKED)]
    with serving([*command, *drafts]) as server:
        options = argparse.Namespace(
            base_url=server.url, model=None, api_key=None, timeout=60.0, host="", port=0
        )
        told = [answer(options, png_of(each)) for each in pictures]
    right = [
        json.loads(said)
        == {"product": f"{each.color} {each.thing}", "color": each.color, "quantity": each.count}
        for said, each in zip(told, pictures, strict=True)
    ]
    assert sum(right) >= LEAST, list(zip(told, pictures, strict=True))
