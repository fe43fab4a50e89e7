"""Upper bound of the characters in a number of tokens, without encoding a text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

MOST_JOINED = 4  # most characters that Unicode composition joins into one
_JOINING = {"NFC", "NFKC"}
_KEEPING = {"NFD", "NFKD", "Lowercase", "Prepend"}  # results are at least as long as the text
_STANDING_FOR_BYTES = {"ByteLevel", "ByteFallback"}


def max_characters(tokenizer: FastTokenizer) -> int | None:
    """Returns the most characters of a text that become one token, or None without a bound.

    A tokenizer that drops characters has no bound: it replaces unknown characters, strips space
    next to an added token, or shortens the text before it splits it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    kinds = {part["type"] for part in _parts(tokenizer.decoder, "decoders")}
    joined = _max_joined(tokenizer)
    if joined is None or not kinds & _STANDING_FOR_BYTES:
        return None
    return joined * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _max_joined(tokenizer: FastTokenizer) -> int | None:
    most = 1
    for part in _parts(tokenizer.normalizer, "normalizers"):
        if part["type"] in _JOINING:
            most *= MOST_JOINED
        elif part["type"] not in _KEEPING and not _replaces_a_letter(part):
            return None
    return most


def _replaces_a_letter(part: dict[str, Any]) -> bool:
    """Returns whether a normalizer replaces single characters, such as spaces."""
    pattern = part.get("pattern", {}).get("String", "")
    return part["type"] == "Replace" and len(pattern) == 1 and part["content"] != ""


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """Returns the parts of a tokenizer step, as stored in its file."""
    if step is None:
        return []
    stored = json.loads(step.__getstate__())
    return stored[name] if stored["type"] == "Sequence" else [stored]
