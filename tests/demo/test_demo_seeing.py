"""The demo model's eyes: what is drawn is what is told, and fits where the picture stands."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from models.demo.drawn import OUTLINES, SHADES, drawn
from models.demo.seeing import FOLDER, TEXT, batch_of, words
from shared.models.families import vision_from_folder
from shared.models.pictures import pictures_from_folder


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
