"""Grammars by llguidance: token bitmasks of the tokens that may follow an output.

A grammar is JSON in llguidance's serialization: a list of grammars in Lark syntax or JSON schemas.
The first is that of the output; the others have names by which it refers to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask

from shared.models.file_kind import TOKENIZER_FILE
from shared.models.model_folder import ModelFolder
from shared.text.grammar_errors import NO_TOKEN, TOO_MUCH, UNFOLLOWED
from shared.text.grammar_source import (
    MAX_GRAMMAR_BYTES,
    OF_TEXTS,
    TOO_LARGE,
    InvalidGrammarError,
    checked,
    literal,
    serialized,
    with_settings,
)
from shared.text.tokenizer_files import TokenizerFiles

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Limits of compiling a grammar and of a bitmask: 0.1 s and 10 ms on a slow core."""

_OF_LIMITS = re.compile("too many|current row has", re.IGNORECASE)
"""Matches the library's message when an output exceeds a limit."""


def of_schema(schema: dict[str, Any]) -> str:
    """Returns the grammar of JSON that matches a schema.

    Raises:
      GrammarRefused: The grammar is too large.
    """
    return serialized([{"json_schema": with_settings(schema, OF_TEXTS)}])


def of_regex(regex: str) -> str:
    """Returns the grammar of the full matches of a regular expression; raises as `of_schema`."""
    return checked(LLMatcher.grammar_from_regex(regex))


def of_choices(choices: Sequence[str]) -> str:
    """Returns the grammar of a list of strings; raises as `of_schema`."""
    return serialized([{"lark_grammar": f"start: {' | '.join(map(literal, choices))}"}])


def of_lark(grammar: str) -> str:
    """Returns a grammar in Lark syntax, or in GBNF (EBNF in vLLM).

    Raises:
      GrammarRefused: The grammar is invalid, or too large.
    """
    if len(grammar) > MAX_GRAMMAR_BYTES:  # before it is read at all
        raise InvalidGrammarError(TOO_LARGE)
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # the library raises plain Exception
        raise InvalidGrammarError(
            f"the grammar is neither Lark nor GBNF: {error!s:.200}"
        ) from error
    return serialized([{"lark_grammar": lark}])


def with_prefix(lead: str, grammar: str) -> str:
    """Returns a grammar with a prefix.

    Args:
      lead: Rules of the prefix in Lark syntax, among them `lead`, and no `start`.
      grammar: Grammar after the prefix.
    """
    first, *others = json.loads(grammar)["grammars"]
    name = f"behind_{len(others)}"  # unique, since a prefix adds a grammar
    start = {"lark_grammar": f"start: lead @{name}\n{lead}\n"}
    return serialized([start, {**first, "name": name}, *others])


class _ShownTexts:
    """Tokenizer for llguidance whose tokens have the texts that responses show.

    llguidance treats every added token in angle brackets as special, and a grammar never matches
    special tokens: neither `<tool_call>` nor HTML in a string.

    Args:
      known: Tokenizer as the library reads it.
      special: Tokens that responses do not show.
    """

    bos_token_id = None

    def __init__(self, known: LLTokenizer, special: Sequence[int]) -> None:
        self._known, self._special = known, frozenset(special)
        self.special_token_ids = special
        self.tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]
        is_end = not special or known.eos_token in self._special
        self.eos_token_id = known.eos_token if is_end else special[0]

    def __call__(self, text: str) -> list[int]:
        """Tokenizes a text; the name of a special token is split into pieces."""
        tokens = self._known.tokenize_str(text)
        return tokens if self._special.isdisjoint(tokens) else self._known.greedy_tokenize(text)


class Compiler:
    """Compiles grammars for the tokens of one tokenizer.

    Args:
      tokenizer: Tokenizer in a format of the library.
      vocab: Vocabulary size of the model, at least that of the tokenizer.

    Raises:
      ValueError: llguidance does not support this kind of tokenizer; one sentence.
    """

    def __init__(self, tokenizer: str | TokenizerWrapper, vocab: int) -> None:
        self._tokenizer = _known(tokenizer, vocab, None)
        if self._tokenizer.vocab_size != vocab:
            known = self._tokenizer.vocab_size
            raise ValueError(f"the grammar library has {known} tokens, and the model has {vocab}")

    @classmethod
    def of_folder(cls, folder: str | Path, vocab: int, marks: Collection[str]) -> Compiler:
        """Makes a compiler for a checkpoint's tokenizer by the path of its folder; see
        `of_files`.
        """
        return cls.of_files(TokenizerFiles(ModelFolder(folder)), vocab, marks)

    @classmethod
    def of_files(cls, files: TokenizerFiles, vocab: int, marks: Collection[str]) -> Compiler:
        """Makes a compiler for a checkpoint's tokenizer.

        Args:
          files: Files of the tokenizer.
          vocab: Vocabulary size of the model.
          marks: Special tokens that responses show nevertheless; see `shared.text.delimiters`.

        Raises:
          ValueError: The tokenizer is missing, or as in the constructor.
        """
        if (tokenizer := files.tokenizer) is None:
            path = files.folder.path / TOKENIZER_FILE
            raise ValueError(f"grammars require the tokenizer, and {path} does not exist")
        special = [
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content not in marks
        ]
        known = _known(tokenizer.to_str(), vocab, [])
        return cls(TokenizerWrapper(_ShownTexts(known, special)), vocab)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar, without holding the interpreter lock.

        Raises:
          GrammarRefused: The grammar is invalid, or exceeds a limit.
        """
        start = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if start.is_error():
            raise InvalidGrammarError(f"the grammar is invalid: {_why(start)}")
        return CompiledGrammar(start, self._tokenizer)


def _known(tokenizer: str | TokenizerWrapper, vocab: int, slices: list[str] | None) -> LLTokenizer:
    """Opens a tokenizer in the library; `slices` speed up bitmasks and take time to build."""
    try:
        return LLTokenizer(tokenizer, n_vocab=vocab, slices=slices)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"grammars are not supported with this tokenizer: {error}") from error


class CompiledGrammar:
    """Implementation of `shared.engine.grammar.Grammar`."""

    def __init__(self, start: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._start, self._tokenizer = start, tokenizer
        # The request defines its stop tokens; the library's bitmasks contain its own.
        self._ends = [(token // 32, ~np.int32(_bit(token))) for token in tokenizer.eos_tokens]

    def matcher(self) -> TextMatcher:
        """Returns a matcher at the beginning of an output."""
        return TextMatcher(self._start.deep_copy(), self._ends)


class TextMatcher:
    """Implementation of `shared.engine.grammar.Matcher`."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[tuple[int, np.int32]]) -> None:
        self._matcher, self._ends = matcher, ends

    @property
    def is_satisfied(self) -> bool:
        """Reports whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        """Reports whether the output must end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fault(self) -> str:
        """Reason why the matcher failed; one sentence."""
        words = self._matcher.get_error()
        if words.startswith("NoExtension"):
            return NO_TOKEN
        return TOO_MUCH if _OF_LIMITS.search(words) else f"{UNFOLLOWED}: {_why(self._matcher)}"

    def fill(self, bits: Int32[np.ndarray, " words"]) -> bool:
        """Writes the bitmask of the next token; returns False if it cannot be computed."""
        fill_next_token_bitmask(self._matcher, bits[None], 0)
        if self._matcher.is_error():
            return False
        for word, others in self._ends:
            bits[word] &= others
        return True

    def take(self, token: int) -> bool:
        """Advances by a token; returns False if the token is not allowed."""
        return self._matcher.consume_token(token)

    def rollback(self) -> None:
        """Rolls back the last token."""
        self._matcher.rollback(1)


def _bit(token: int) -> int:
    """Returns the bit of a token in its int32, as a signed number."""
    bit = 1 << token % 32
    return bit - (1 << 32) if bit == 1 << 31 else bit


def _why(matcher: LLMatcher) -> str:
    words = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    unknown, _, listed = words.partition("; following special tokens are available")
    if listed:
        return f"{unknown:.200}; write a token that responses show as a quoted string"
    if "coerce_one_of" in words:  # a setting of the library that requests cannot set
        return "oneOf with overlapping alternatives is not supported; use anyOf"
    return words[:300]
