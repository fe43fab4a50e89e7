"""A tiny tokenizer with the special tokens of real ones."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import AddedToken, Tokenizer

from shared.options.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from shared.text.call_formats.registry import marks_of
from tests.support.http_fixtures import SPECIAL, byte_tokenizer

HARMONY_END = "<|return|>"

MARKS = {
    mark
    for tool_calls in TOOL_CALL_PARSERS
    for reasoning in REASONING_PARSERS
    for mark in marks_of(tool_calls, reasoning)
}


def marked_tokenizer(*, special: bool, marks: Collection[str] = MARKS) -> Tokenizer:
    """Same as `byte_tokenizer`, with tags as tokens, by default those of all formats."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [
            AddedToken(mark, special=special, normalized=False)
            for mark in sorted({*marks} - {*SPECIAL})
        ]
    )
    return tokenizer


def harmony_tokenizer() -> Tokenizer:
    """Ends outputs with a token of its own, as in gpt-oss: `<|end|>` ends a message."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str().replace(SPECIAL[0], HARMONY_END))
    marks = [x for x in marks_of("harmony", "harmony") if x != HARMONY_END]
    tokenizer.add_tokens([AddedToken(x, special=True) for x in marks])
    return tokenizer
