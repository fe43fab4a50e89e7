"""Servers of a vision-language model with a byte tokenizer, and their conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.byte_tokenizer import byte_letters
from tests.support.golden_images import IMAGES, MODEL
from tests.support.images import rgb, stored, url_of
from tests.support.vlm import IMAGE, Prompt, pixels

SPECIAL_TOKENS = (
    "<|image|>",
    "<|user|>",
    "<|assistant|>",
    "<tool_call>",
    "</tool_call>",
    "<|end|>",
)
SPECIAL = {mark: IMAGE + number for number, mark in enumerate(SPECIAL_TOKENS)}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<|assistant|>"
)
ONE, OTHER, LONG = pixels(3, 4, 1), pixels(3, 4, 2), pixels(2, 16, 3)


def folder_with_a_tokenizer(folder: Path) -> Path:
    """Writes the golden model with a byte tokenizer; its last ids are special tokens."""
    shutil.copy(MODEL / "model.safetensors", folder)
    shutil.copy(MODEL / "config.json", folder)
    settings = json.loads((IMAGES / "config.json").read_text())["preprocessor_config"]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    letters = {letter: byte for byte, letter in enumerate(byte_letters()) if byte < IMAGE}
    tokenizer = Tokenizer(models.BPE(vocab=letters | SPECIAL, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_of_text = {"chat_template": TEMPLATE, "eos_token": SPECIAL_TOKENS[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of_text))
    return folder


def conversation(*parts: str | np.ndarray) -> tuple[list[dict[str, Any]], Prompt]:
    """Returns a message as a client sends it, and its expected prompt."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(stored(rgb(part)))}}
        for part in parts
    ]
    tokens = [list(part.encode()) if isinstance(part, str) else part for part in parts]
    begun, ended = [SPECIAL["<|user|>"]], [SPECIAL["<|assistant|>"]]
    return [{"role": "user", "content": content}], Prompt(begun, *tokens, ended)
