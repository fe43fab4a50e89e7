"""Decoder of the input of custom tools: its output does not depend on the split of the text."""

from __future__ import annotations

import json
import random

import pytest

from shared.text.parsing.input_decoder import InputDecoder


def decoded(arguments: str, chosen: random.Random) -> str:
    decoder, parts = InputDecoder(), []
    while arguments:
        size = chosen.randrange(1, 6)
        parts.append(decoder.push(arguments[:size]))
        arguments = arguments[size:]
    return "".join(parts) + decoder.flush()


def test_decoder_returns_text_of_json():
    letters = 'ab \n\t"\\/{}ü漢😀\x00\u2028'
    for seed in range(2000):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(letters, k=chosen.randrange(30)))
        written = json.dumps({"input": text}, ensure_ascii=chosen.random() < 0.5)
        assert decoded(written, chosen) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' {\n "input" : "a" }', "a"),
        ('{"input": "a\\ud83d\\ude00b"}', "a😀b"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "\ufffd😀"),
        ('{"input": "\\ude00\\ud83d!"}', "\ufffd\ufffd!"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"in put": "a"}', '{"in put": "a"}'),
        ("{}", "{}"),
        ('{"input": "a", "more": 1}', 'a, "more": 1}'),
        ('{"input": "ab', "ab"),
        ('{"input": "ab\\', "ab"),
        ('{"input": "ab"', "ab"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_decoder_keeps_other_arguments(arguments: str, text: str):
    for seed in range(20):
        assert decoded(arguments, random.Random(seed)) == text
