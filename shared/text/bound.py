"""How long a text can be that a number of tokens holds, known without encoding it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

MOST_JOINED = 4  # characters that Unicode's composition makes one of, at most
_JOINING = {"NFC", "NFKC"}
_KEEPING = {"NFD", "NFKD", "Lowercase", "Prepend"}  # of a text no shorter than it was
_STANDING_FOR_BYTES = {"ByteLevel", "ByteFallback"}


def most_characters(tokenizer: FastTokenizer) -> int | None:
    """Most characters of a text that become one token; None where there is no such number.

    There is none where a tokenizer drops characters: it replaces what it does not know, strips
    space beside an added token, or shortens the text before it cuts it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    kinds = {part["type"] for part in _parts(tokenizer.decoder, "decoders")}
    joined = _most_joined(tokenizer)
    if joined is None or not kinds & _STANDING_FOR_BYTES:
        return None
    return joined * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _most_joined(tokenizer: FastTokenizer) -> int | None:
    most = 1
    for part in _parts(tokenizer.normalizer, "normalizers"):
        if part["type"] in _JOINING:
            most *= MOST_JOINED
        elif part["type"] not in _KEEPING and not _replaces_a_letter(part):
            return None
    return most


def _replaces_a_letter(part: dict[str, Any]) -> bool:
    """Whether a normalizer puts something into the place of single characters, as of spaces."""
    pattern = part.get("pattern", {}).get("String", "")
    return part["type"] == "Replace" and len(pattern) == 1 and part["content"] != ""


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """A step of the tokenizer as its file writes it, one entry for each of its parts."""
    if step is None:
        return []
    stored = json.loads(step.__getstate__())
    return stored[name] if stored["type"] == "Sequence" else [stored]
