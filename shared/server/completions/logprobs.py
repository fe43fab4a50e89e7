"""Logprobs in OpenAI's format, and the text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.spec.logprobs import PromptLogprobs
from shared.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class ScoredToken:
    """Token of the output or the prompt, with its logprobs.

    Attributes:
      token: Token id.
      logprob: Log softmax of the raw logits at the token, before penalties, bias and filters; None
        for the first prompt token.
      best: Most likely tokens with their logprobs, in descending order; may lack the token itself.
      offset: Characters of the choice's text before the token; the tokens of one character have
        the same offset.
      rank: Rank of a prompt token in the vocabulary, from 1; 0 for output tokens.
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
      tokens: Tokens of the prompt.
      offsets: Characters of the choice's text before each token.
    """

    tokens: Sequence[int]
    offsets: Sequence[int]

    def entries(self, scores: PromptLogprobs | None) -> list[ScoredToken]:
        """Returns an entry per token; a prompt of one token has no scores."""
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
      tokenizer: None if the checkpoint has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None without a tokenizer."""
        return self._tokenizer.bytes_of(token) if self._tokenizer else None

    def name(self, token: int) -> str:
        r"""Returns a token's text; `bytes:\xf0\x9f` within a character, `token_id:7` if unknown."""
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
    """Returns the number of characters of a text before each of its tokens.

    A special token counts if the text contains its name.
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
    """Returns the entries with at most `most` top tokens each."""
    return [replace(entry, best=entry.best[:most]) for entry in entries]


def for_completion(entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """Returns `choices[].logprobs` of /v1/completions: four lists with an entry per token."""
    return {
        "tokens": [names.name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _by_name(entry, names) for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_name(entry: ScoredToken, names: TokenNames) -> dict[str, float | None]:
    """Returns the top tokens and the chosen token by their text, same as OpenAI."""
    by_name: dict[str, float | None] = {}
    for token, logprob in _with_own(entry).items():
        name = names.name(token)
        # Two tokens may have the same text; both are reported.
        by_name[unknown_name(token) if name in by_name else name] = logprob
    return by_name


def _with_own(entry: ScoredToken) -> dict[int, float | None]:
    return dict(entry.best) | {entry.token: entry.logprob}


def for_prompt(entries: list[ScoredToken], names: TokenNames) -> list[dict[str, Any] | None]:
    """Returns `prompt_logprobs` in vLLM's format: by id, the top tokens and the token itself."""
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
    """Returns `choices[].logprobs` of /v1/chat/completions: an object per token."""
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
