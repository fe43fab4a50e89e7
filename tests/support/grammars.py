"""Grammars over the tokens of tiny models: what they write is bytes, and a few pairs of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llguidance import TokenizerWrapper

from shared.engine.grammar import Constraint
from shared.engine.request import Request, SamplingParams
from shared.text.grammar import Compiler, of_lark, of_regex, of_schema
from tests.support.tiny_models import EOS_ID

PAIRS = [a + b for a in "abc:{" for b in 'ab"']
"""Of the tokens behind the bytes."""


class Bytes:
    """A tokenizer as llguidance takes one: token i is byte i, and behind them are pairs."""

    eos_token_id, bos_token_id = EOS_ID, None
    special_token_ids = (EOS_ID,)

    def __init__(self, vocab: int) -> None:
        pairs = [pair.encode() for pair in PAIRS]
        named = [*(bytes([byte]) for byte in range(256)), *pairs]
        self.tokens = (named + [b"<unused>"] * vocab)[:vocab]

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@lru_cache
def compiler(vocab: int) -> Compiler:
    return Compiler(TokenizerWrapper(Bytes(vocab)), vocab)


GRAMMARS = {
    "schema": of_schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "maxLength": 12},
                "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
    "regex": of_regex("[a-f]{2,9}( [a-cx-z]{3,7}){2,5}"),
    "lark": of_lark('start: word (" " word)*\nword: /[ab]+/ | "c" word'),
}


def constrained(
    request_id: int, prompt: tuple[int, ...], vocab: int, grammar: str | None, **sampling: Any
) -> Request:
    """A request that is held to one of `GRAMMARS`, or to none."""
    params = SamplingParams(
        stop_token_ids=(EOS_ID,), grammar=grammar and GRAMMARS[grammar], **sampling
    )
    constraint = None
    if params.grammar is not None:
        compiled = compiler(vocab).compile(params.grammar)
        constraint = Constraint(compiled, vocab, params.stop_token_ids, params.min_tokens)
    return Request(request_id=request_id, prompt=prompt, sampling=params, constraint=constraint)


def text_of(tokens: list[int], vocab: int) -> str:
    """What tokens say, but for the one that ends a text."""
    named = Bytes(vocab).tokens
    return b"".join(named[token] for token in tokens if token != EOS_ID).decode("utf-8", "replace")
