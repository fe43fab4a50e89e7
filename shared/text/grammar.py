"""Grammars by llguidance: what may follow a text, told by tokens.

A grammar is a JSON text, as llguidance serializes it: a list of grammars in Lark syntax or JSON
schemas, of which the first is the text's and the others have names by which it refers to them.
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

from shared.text.grammar_faults import NO_TOKEN, TOO_MUCH, UNFOLLOWED
from shared.text.tokenizer_files import open_tokenizer
from shared.text.worker import WorkRefused

MAX_GRAMMAR_BYTES = 1 << 18
JSON_SPACES = r"[ ]?|\n[ ]{0,32}"
"""Between the parts of a JSON text: nothing, a space, or a line break and the next line's margin.

Without a bound a model may write white space for ever.
"""

_OF_TEXTS = {"whitespace_pattern": JSON_SPACES}
_OF_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How the library separates the parts of JSON. Nobody sees the white space of calls, which is
therefore that of chat templates' own `tojson`, with which models are trained."""

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The work of compiling a grammar and of a mask: 0.1 s and 10 ms at most on a slow core."""

_OF_LIMITS = re.compile("too many|current row has", re.IGNORECASE)
"""What the library says where a text meets one of them."""


class GrammarRefused(WorkRefused):
    """A grammar that cannot be followed; one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "grammar")


def of_schema(schema: dict[str, Any]) -> str:
    """A grammar of the JSON texts that a schema describes.

    Raises:
      GrammarRefused: It is too large.
    """
    return serialized([{"json_schema": _with_settings(schema, _OF_TEXTS)}])


def of_regex(regex: str) -> str:
    """A grammar of the texts that a regular expression matches as a whole; raises as others."""
    return _checked(LLMatcher.grammar_from_regex(regex))


def of_choices(choices: Sequence[str]) -> str:
    """A grammar of a few texts; raises as others."""
    return serialized([{"lark_grammar": f"start: {' | '.join(map(literal, choices))}"}])


def of_lark(grammar: str) -> str:
    """A grammar in Lark syntax, or in GBNF, which llama.cpp and vLLM call EBNF.

    Raises:
      GrammarRefused: It is neither, or too large.
    """
    if len(grammar) > MAX_GRAMMAR_BYTES:  # before it is read at all
        raise GrammarRefused(_TOO_LARGE)
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # the library raises plain Exception
        raise GrammarRefused(f"the grammar is neither Lark nor GBNF: {error!s:.200}") from error
    return serialized([{"lark_grammar": lark}])


def behind(lead: str, grammar: str) -> str:
    """A grammar whose texts begin with a lead.

    Args:
      lead: Rules in Lark syntax, among them `lead`, and no `start`.
      grammar: Of what follows.
    """
    first, *others = json.loads(grammar)["grammars"]
    start = {"lark_grammar": f"start: lead @behind\n{lead}\n"}
    return serialized([start, {**first, "name": "behind"}, *others])


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def schema_rule(name: str, schema: dict[str, Any]) -> str:
    """A rule of the JSON texts that a schema describes, as chat templates write them in calls."""
    return f"{name}: %json {json.dumps(_with_settings(schema, _OF_CALLS))}"


def serialized(grammars: Sequence[dict[str, Any]]) -> str:
    """What `Compiler.compile` takes; raises as others."""
    return _checked(json.dumps({"grammars": grammars}))


def _with_settings(schema: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A schema with settings of the library; a keyword that it does not know is an error."""
    return {**schema, "x-guidance": {**settings, "lenient": False}}


def _checked(grammar: str) -> str:
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(_TOO_LARGE)
    return grammar


_TOO_LARGE = f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes"


class _ShownTexts:
    """A tokenizer for llguidance whose tokens have the texts that answers show.

    By itself the library takes each added token in angle brackets for special, and no text of a
    grammar is followed by a special token: neither `<tool_call>` nor what HTML a string may hold.

    Args:
      known: The tokenizer as the library reads it.
      special: Tokens that answers do not show.
    """

    bos_token_id = None

    def __init__(self, known: LLTokenizer, special: Sequence[int]) -> None:
        self._known, self._special = known, frozenset(special)
        self.special_token_ids = special
        self.tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]
        is_end = not special or known.eos_token in self._special
        self.eos_token_id = known.eos_token if is_end else special[0]

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text; what is the name of a special token is pieces."""
        tokens = self._known.tokenize_str(text)
        return tokens if self._special.isdisjoint(tokens) else self._known.greedy_tokenize(text)


class Compiler:
    """Compiles grammars for the tokens of one tokenizer.

    Args:
      tokenizer: As the library takes it.
      vocab: Tokens of the model, at least those of the tokenizer.

    Raises:
      ValueError: llguidance does not know this kind of tokenizer; one sentence.
    """

    def __init__(self, tokenizer: str | TokenizerWrapper, vocab: int) -> None:
        self._tokenizer = _known(tokenizer, vocab, None)
        if self._tokenizer.vocab_size != vocab:
            known = self._tokenizer.vocab_size
            raise ValueError(f"grammars know {known} tokens, and the model has {vocab}")

    @classmethod
    def of_folder(cls, folder: str | Path, vocab: int, marks: Collection[str]) -> Compiler:
        """Of a checkpoint's tokenizer.

        Args:
          folder, vocab: Of the model.
          marks: Special tokens that answers show all the same; see `shared.text.marks`.

        Raises:
          ValueError: There is none, or as the constructor.
        """
        tokenizer = open_tokenizer(folder)
        if tokenizer is None:
            path = Path(folder) / "tokenizer.json"
            raise ValueError(f"a grammar is told by tokens' texts, and there is no {path}")
        special = [
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content not in marks
        ]
        known = _known(tokenizer.to_str(), vocab, [])
        return cls(TokenizerWrapper(_ShownTexts(known, special)), vocab)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar; lets other threads run meanwhile.

        Raises:
          GrammarRefused: It is none, or takes too much.
        """
        start = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if start.is_error():
            raise GrammarRefused(f"the grammar cannot be followed: {_why(start)}")
        return CompiledGrammar(start, self._tokenizer)


def _known(tokenizer: str | TokenizerWrapper, vocab: int, slices: list[str] | None) -> LLTokenizer:
    """A tokenizer as the library reads it; `slices` make its masks fast, and take a while."""
    try:
        return LLTokenizer(tokenizer, n_vocab=vocab, slices=slices)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"grammars cannot be had with this tokenizer: {error}") from error


class CompiledGrammar:
    """A `shared.engine.grammar.Grammar`."""

    def __init__(self, start: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._start, self._tokenizer = start, tokenizer
        # An end of a text is the request's to name; in masks the library has its own.
        self._ends = [(token // 32, ~np.int32(_bit(token))) for token in tokenizer.eos_tokens]

    def matcher(self) -> TextMatcher:
        """At the beginning of a text."""
        return TextMatcher(self._start.deep_copy(), self._ends)


class TextMatcher:
    """A `shared.engine.grammar.Matcher`."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[tuple[int, np.int32]]) -> None:
        self._matcher, self._ends = matcher, ends

    @property
    def is_satisfied(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether it must end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fault(self) -> str:
        """Why it is of no more use; one sentence."""
        words = self._matcher.get_error()
        if words.startswith("NoExtension"):
            return NO_TOKEN
        return TOO_MUCH if _OF_LIMITS.search(words) else f"{UNFOLLOWED}: {_why(self._matcher)}"

    def fill(self, bits: Int32[np.ndarray, " words"]) -> bool:
        """Writes the tokens that may come next; False where they cannot be found out."""
        fill_next_token_bitmask(self._matcher, bits[None], 0)
        if self._matcher.is_error():
            return False
        for word, others in self._ends:
            bits[word] &= others
        return True

    def take(self, token: int) -> bool:
        """Goes on by a token; False where it cannot."""
        return self._matcher.consume_token(token)

    def take_back(self) -> None:
        """Goes back by the last token."""
        self._matcher.rollback(1)


def _bit(token: int) -> int:
    """The bit of a token in its word, as a signed number."""
    bit = 1 << token % 32
    return bit - (1 << 32) if bit == 1 << 31 else bit


def _why(matcher: LLMatcher) -> str:
    words = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    unknown, _, listed = words.partition("; following special tokens are available")
    if listed:
        return f"{unknown:.200}; a token that answers show is written as a text, in quotes"
    if "coerce_one_of" in words:  # a setting of the library, which no request has
        return "parts of oneOf that may hold at once are not supported; write anyOf"
    return words[:300]
