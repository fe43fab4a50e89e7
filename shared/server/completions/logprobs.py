"""Logprobs in OpenAI's format, and the text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.spec.logprobs import PromptLogprobs
from shared.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class ScoredToken:
    """A token of the output, or of the prompt, and what the model gave it.

    Attributes:
      token: Its id.
      logprob: Log softmax of the raw logits at the token, before penalties, bias and filters; None:
        it is the first of the prompt, which follows nothing.
      best: The most likely tokens with theirs, the best first; the token itself may be missing.
      offset: Characters of the choice's text before it; a token within a character has that of the
        character.
      rank: Of a token of the prompt, its place among all tokens, from 1 on; 0 of all others.
    """

    token: int
    logprob: float | None
    best: list[tuple[int, float]]
    offset: int
    rank: int = 0


@dataclass(frozen=True)
class PromptText:
    """Tokens and text of a prompt, for prompt logprobs.

    Attributes:
      tokens: Its tokens.
      offsets: Characters of the choice's text before each.
    """

    tokens: Sequence[int]
    offsets: Sequence[int]

    def entries(self, scores: PromptLogprobs | None) -> list[ScoredToken]:
        """An entry per token; there are no scores of a prompt of one token."""
        first = ScoredToken(self.tokens[0], None, [], self.offsets[0])
        if scores is None:
            return [first]
        lists = [part.tolist() for part in scores]
        others = zip(self.tokens[1:], self.offsets[1:], *lists, strict=True)
        return [
            first,
            *(
                ScoredToken(token, chosen, list(zip(ids, values, strict=True)), offset, rank)
                for token, offset, chosen, rank, ids, values in others
            ),
        ]


class TokenNames:
    """Names of single tokens in responses.

    Args:
      tokenizer: None where the checkpoint has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None without a tokenizer."""
        return self._tokenizer.bytes_of(token) if self._tokenizer else None

    def name(self, token: int) -> str:
        r"""Its text; `bytes:\xf0\x9f` for a part of a character, `token_id:7` for an unknown id."""
        shown = self.bytes_of(token)
        if shown is None:
            return unknown_name(token)
        try:
            return shown.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown)


def unknown_name(token: int) -> str:
    """Returns the name of a token without a tokenizer."""
    return f"token_id:{token}"


def offsets_in(text: str, tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Characters of a text before each of the tokens that it was read as.

    A special token has some where the text writes it by its name.
    """
    pieces, offsets, at = Detokenizer(tokenizer, []), [], 0
    for token in tokens:
        offsets.append(min(at, len(text)))
        if tokenizer.shows(token):
            at += len(pieces.push(token))
        elif text.startswith(name := TokenNames(tokenizer).name(token), at):
            at += len(name)
    return offsets


def cut(entries: list[ScoredToken], most: int) -> list[ScoredToken]:
    """With at most so many of the best tokens."""
    return [replace(entry, best=entry.best[:most]) for entry in entries]


def for_completion(entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: four lists, an entry per token."""
    return {
        "tokens": [names.name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _by_name(entry, names) for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_name(entry: ScoredToken, names: TokenNames) -> dict[str, float | None]:
    """The best tokens, and the chosen one where it is not among them, as OpenAI does."""
    by_name: dict[str, float | None] = {}
    for token, logprob in _with_own(entry).items():
        name = names.name(token)
        # Two tokens may have one text; none of them may be lost.
        by_name[unknown_name(token) if name in by_name else name] = logprob
    return by_name


def _with_own(entry: ScoredToken) -> dict[int, float | None]:
    return dict(entry.best) | {entry.token: entry.logprob}


def for_prompt(entries: list[ScoredToken], names: TokenNames) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM writes them: by id, the best ones and the token itself."""
    return [None if entry.logprob is None else _by_id(entry, names) for entry in entries]


def _by_id(entry: ScoredToken, names: TokenNames) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.best, start=1)}
    return {
        str(token): {
            "logprob": logprob,
            "rank": ranks.get(token, entry.rank),
            "decoded_token": names.name(token),
        }
        for token, logprob in _with_own(entry).items()
    }


def for_chat(entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions: an object per token."""
    content = [
        {
            **_token_fields(entry.token, entry.logprob, names),
            "top_logprobs": [_token_fields(token, value, names) for token, value in entry.best],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token_fields(token: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    token_bytes = names.bytes_of(token)
    shown = None if token_bytes is None else list(token_bytes)
    return {"token": names.name(token), "logprob": logprob, "bytes": shown}
