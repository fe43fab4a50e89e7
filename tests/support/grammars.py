"""Grammars over the tokens of tiny models: bytes, a few pairs of them, and marks of their own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.engine.grammar import GrammarState
from shared.engine.request import Request, SamplingParams
from shared.text.delimiters import CALL, CALL_END, THINK, THINK_END
from shared.text.grammar import Compiler, of_lark, of_regex, of_schema
from shared.text.grammar_worker import GrammarRequest, OutputFormat, ToolCallSpec
from tests.support.byte_tokenizer import byte_letters
from tests.support.tiny_models import EOS_ID

PAIRS = [(a, b) for a in "ab:{" for b in 'ab"']
"""Texts of the tokens after the bytes."""

MARKS = (THINK, THINK_END, CALL, CALL_END)
"""Texts of the tokens after the pairs, which fill the smallest vocabulary."""

THINK_END_ID = 256 + len(PAIRS) + MARKS.index(THINK_END)


@lru_cache
def tokenizer() -> Tokenizer:
    """Token i is byte i, except for the stop token; pairs and special tags follow."""
    letters = byte_letters()
    letters[EOS_ID] = "<eos>"
    named = [*letters, *(a + b for a, b in PAIRS)]
    vocab = {name: token for token, name in enumerate(named)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=PAIRS))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return made


@lru_cache
def compiler(vocab: int) -> Compiler:
    with TemporaryDirectory() as folder:
        tokenizer().save(str(Path(folder) / "tokenizer.json"))
        return Compiler.of_folder(folder, vocab, MARKS)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
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
    "call": GrammarRequest(
        form=None,
        calls=ToolCallSpec(style="hermes", tools=[("weather", CITY)], many=False, free=None),
        lead=None,
    ).grammar(),
    "thought": GrammarRequest(
        form=OutputFormat(kind="regex", value="[a-c]{9}"), calls=None, lead="open"
    ).grammar(),
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
        constraint = GrammarState(compiled, vocab, params.stop_token_ids, params.min_tokens)
    return Request(request_id=request_id, prompt=prompt, sampling=params, constraint=constraint)


def text_of(tokens: list[int]) -> str:
    """Returns the text of tokens, without the stop token."""
    return tokenizer().decode([token for token in tokens if token != EOS_ID])


def mixed_requests(vocab: int, max_tokens: int, **last: Any) -> list[Request]:
    """Two requests without a grammar of `max_tokens`, and three with one that end earlier.

    `last` are more sampling parameters of the last request.
    """
    rng = np.random.default_rng(22)
    asked: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"temperature": 0.0}),
        (None, {"temperature": 0.8, "top_k": 40}),
        ("schema", {"temperature": 0.0}),
        ("regex", {"temperature": 0.9}),
        ("schema", {"temperature": 1.0, **last}),
    ]
    return [
        constrained(
            number,
            tuple(rng.integers(2, 250, 12 + number).tolist()),
            vocab,
            grammar,
            max_tokens=25 if grammar else max_tokens,
            seed32=300 + number,
            **how,
        )
        for number, (grammar, how) in enumerate(asked)
    ]
