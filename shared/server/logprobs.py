"""Logprobs as OpenAI's clients read them, and how a token is written as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the output and what the model gave it.

    Attributes:
      token: Its id.
      logprob: Log softmax of the raw logits at the token, before penalties, bias and filters.
      best: The most likely tokens with theirs, the best first; the token itself may be missing.
      offset: Characters of the choice's text before it; a token within a character has that of the
        character.
    """

    token: int
    logprob: float
    best: list[tuple[int, float]]
    offset: int


class TokenNames:
    """How a response writes single tokens.

    Args:
      tokenizer: None where the checkpoint has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes | None:
        """What the token adds to a text, or None where no tokenizer knows it."""
        return self._tokenizer.bytes_of(token) if self._tokenizer else None

    def name(self, token: int) -> str:
        r"""Its text; `bytes:\xf0\x9f` for a part of a character, `token_id:7` for an unknown id."""
        found = self.bytes_of(token)
        if found is None:
            return unknown_name(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def unknown_name(token: int) -> str:
    """How a token is written by its id alone."""
    return f"token_id:{token}"


def for_completion(entries: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: four lists, an entry per token."""
    return {
        "tokens": [names.name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_name(entry, names) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_name(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The best tokens, and the chosen one where it is not among them, as OpenAI does."""
    pairs = dict(entry.best) | {entry.token: entry.logprob}
    found: dict[str, float] = {}
    for token, logprob in pairs.items():
        name = names.name(token)
        # Two tokens may have one text; none of them may be lost.
        found[unknown_name(token) if name in found else name] = logprob
    return found


def for_chat(entries: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions: an object per token."""
    content = [
        {
            **_token_fields(entry.token, entry.logprob, names),
            "top_logprobs": [_token_fields(token, value, names) for token, value in entry.best],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token_fields(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    found = names.bytes_of(token)
    shown = None if found is None else list(found)
    return {"token": names.name(token), "logprob": logprob, "bytes": shown}
