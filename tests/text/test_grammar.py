"""Grammars of structured outputs and tool calls: texts that they accept, token by token.

Each text is tokenized in several ways: as bytes, and with delimiters as single tokens, special or
not, as real tokenizers have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from tokenizers import Tokenizer

from shared.text.call_formats.call_format import CallableFunction
from shared.text.delimiters import CALL, CALL_END, PYTHON_TAG, THINK_END
from shared.text.grammar import (
    MAX_GRAMMAR_BYTES,
    Compiler,
    InvalidGrammarError,
    of_choices,
    of_lark,
    of_regex,
    of_schema,
)
from shared.text.grammar_errors import NO_TOKEN, TOO_MUCH
from shared.text.grammar_worker import GrammarRequest, OutputFormat, ToolCallSpec
from shared.text.tool_call_grammar import grammar_of
from tests.support.http_fixtures import END, SPECIAL, byte_tokenizer
from tests.support.special_token_tokenizer import MARKS as ALL_MARKS
from tests.support.special_token_tokenizer import marked_tokenizer

VOCAB = 352
MARKS = ALL_MARKS - {*SPECIAL}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, ANY = (
    CallableFunction(name="weather", schema=CITY),
    CallableFunction(name="any", schema=None),
)
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'
ELEMENTS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRo\nme\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


KINDS = {
    "bytes": byte_tokenizer,
    "delimiter tokens": lambda: marked_tokenizer(special=False, marks=MARKS),
    "special delimiter tokens": lambda: marked_tokenizer(special=True, marks=MARKS),
}


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@lru_cache
def compiler(kind: str = "bytes") -> Compiler:
    return compiler_of(tokenizer(kind))


def compiler_of(tokenizer: Tokenizer) -> Compiler:
    with TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return Compiler.of_folder(folder, VOCAB, MARKS)


def follows(grammar: str, text: str) -> bool | None:
    """Returns True if the grammar accepts the text in every tokenization, None for a prefix."""
    (found,) = {found for kind in KINDS for found in _ways(grammar, text, kind)}
    return found


def _ways(grammar: str, text: str, kind: str) -> Iterator[bool | None]:
    compiled = compiler(kind).compile(grammar)
    written = tokenizer(kind).encode(text, add_special_tokens=False).ids
    for tokens in (list(text.encode()), written):
        matcher = compiled.matcher()
        if not all(matcher.take(token) for token in tokens):
            yield False
        else:
            yield True if matcher.is_satisfied else None


def allowed(grammar: str, text: str, kind: str) -> set[int]:
    """Returns the token ids that may follow a text in the tokenizer's own tokenization."""
    matcher, bits = compiler(kind).compile(grammar).matcher(), np.zeros(-(-VOCAB // 32), np.int32)
    assert all(map(matcher.take, tokenizer(kind).encode(text, add_special_tokens=False).ids))
    assert matcher.fill(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize(
    ("style", "call", "between"),
    [("hermes", TAGGED, "\n"), ("qwen3_coder", ELEMENTS, "\n"), ("llama3", BARE, ";")],
)
def test_forced_call_grammar_accepts_only_calls(style, call, between, many):
    grammar = grammar_of(style, [WEATHER], many=many, free=None, answer=None)
    assert follows(grammar, call)
    assert bool(follows(grammar, call + between + call)) is many
    for wrong in (
        "hi",
        call.replace("city", "town"),
        call.replace("weather", "wether"),
        "hi" + call,
    ):
        assert follows(grammar, wrong) is False
    assert follows(grammar, call[:-3]) is None


@pytest.mark.parametrize(
    ("style", "call"), [("hermes", TAGGED), ("qwen3_coder", ELEMENTS), ("llama3", BARE)]
)
def test_optional_call_grammar_accepts_text_or_valid_calls(style, call):
    grammar = grammar_of(style, [WEATHER], many=True, free="text", answer=None)
    for right in ("", "hi <b> you", call):
        assert follows(grammar, right)
    assert follows(grammar, call.replace("city", "town")) is False
    if style != "llama3":  # a llama3 call is the whole text
        assert follows(grammar, f"Well: {call}\n{call} So.")
        assert follows(grammar, f"{call}<tool_call>garbage") is False


def test_call_grammar_accepts_call_instead_of_schema():
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    answer = of_schema({**schema, "additionalProperties": False})
    grammar = grammar_of("hermes", [ANY], many=False, free="answer", answer=answer)
    assert follows(grammar, '{"x": true}')
    assert follows(grammar, TAGGED.replace("weather", "any").replace("city", "whatever"))
    assert follows(grammar, "hi") is False


@pytest.mark.parametrize("lead", ["open", "maybe", None])
def test_output_format_applies_after_reasoning(lead):
    form, calls = OutputFormat(kind="regex", value="[ab]{2}"), None
    grammar = GrammarRequest(form=form, calls=calls, lead=lead).grammar()
    thought = "so </b> {} hm\n</think>\n\n"
    assert bool(follows(grammar, thought + "ab")) is (lead == "open")
    assert bool(follows(grammar, f"<think>{thought}ab")) is (lead is not None)
    assert bool(follows(grammar, "ab")) is (lead != "open")
    if lead == "open":
        assert follows(grammar, thought + "abc") is False
        assert follows(grammar, "so") is None


@pytest.mark.parametrize(("style", "call"), [("hermes", TAGGED), ("llama3", BARE)])
def test_call_grammar_constrains_calls_after_optional_reasoning(style, call):
    """The parser reads a call after the reasoning, so the grammar constrains it as well."""
    calls = ToolCallSpec(style=style, tools=[("weather", CITY)], many=True, free="text")
    grammar = GrammarRequest(form=None, calls=calls, lead="maybe").grammar()
    for thought in ("", "<think>hm</think>\n\n", "\n<think></think>"):
        assert follows(grammar, thought + call)
        assert follows(grammar, thought + "Hi.")
        assert follows(grammar, thought + call.replace("city", "town")) is False
    assert follows(grammar, "<think>hm") is None


def test_call_grammar_applies_after_open_reasoning():
    calls = ToolCallSpec(style="hermes", tools=[("weather", CITY)], many=True, free="text")
    grammar = GrammarRequest(form=None, calls=calls, lead="open").grammar()
    assert follows(grammar, f"hm</think>\n\nHi. {TAGGED}")
    assert follows(grammar, f"hm</think>\n\nHi. {TAGGED.replace('city', 'town')}") is False


@pytest.mark.parametrize("kind", ["delimiter tokens", "special delimiter tokens"])
@pytest.mark.parametrize(
    ("style", "free", "lead", "text", "mark"),
    [
        *((style, None, None, "", CALL) for style in ("hermes", "qwen3_coder")),
        *((style, "text", None, "Hm. ", CALL) for style in ("hermes", "qwen3_coder")),
        ("hermes", None, None, TAGGED.removesuffix(CALL_END), CALL_END),
        ("qwen3_coder", "text", None, ELEMENTS.removesuffix(CALL_END), CALL_END),
        ("hermes", None, "open", "hm", THINK_END),
        ("hermes", None, "maybe", "", "<think>"),
        ("hermes", None, "open", "hm</think>\n\n", CALL),
        ("llama3", None, None, "", PYTHON_TAG),
        ("llama3", "text", None, "", PYTHON_TAG),
    ],
)
def test_grammar_allows_delimiters_as_tokens(kind, style, free, lead, text, mark):
    calls = ToolCallSpec(style=style, tools=[("weather", CITY)], many=True, free=free)
    grammar = GrammarRequest(form=None, calls=calls, lead=lead).grammar()
    assert tokenizer(kind).token_to_id(mark) in allowed(grammar, text, kind)


def test_free_text_grammar_excludes_hidden_special_tokens():
    for kind in KINDS:
        shown = {tokenizer(kind).token_to_id(mark) for mark in MARKS} - {None}
        free = allowed(of_regex("(.|\n)*"), "", kind)
        assert shown <= free
        assert not free & {tokenizer(kind).token_to_id(name) for name in SPECIAL}


@pytest.mark.parametrize("text", ["<think>", "a</tool_call>b", "<|end|>"])
def test_forced_text_excludes_special_tokens_of_same_name(text):
    """Forced tokens decode to the text; hidden special tokens never replace it."""
    for kind in KINDS:
        for grammar in (of_choices([text]), of_schema({"const": text})):
            matcher, tokens = compiler(kind).compile(grammar).matcher(), []
            bits = np.zeros(-(-VOCAB // 32), np.int32)
            while not matcher.is_terminated:
                assert matcher.fill(bits)
                token = int(
                    np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0]
                )
                assert matcher.take(token)
                tokens.append(token)
            assert END not in tokens
            assert tokenizer(kind).decode(tokens, skip_special_tokens=False).strip('"') == text


def test_lark_names_tokens_by_id_or_text():
    number = tokenizer("delimiter tokens").token_to_id(CALL)
    for grammar in (f'start: <[{number}]> "a"', f'start: "{CALL}" "a"', 'start: <|user|> "a"'):
        assert allowed(of_lark(grammar), "", "delimiter tokens")
    with pytest.raises(
        InvalidGrammarError, match='unknown special token: "<tool_call>".* as a quoted string'
    ):
        compiler("delimiter tokens").compile(of_lark(f'start: {CALL} "a"'))


def test_llama3_call_may_follow_python_tag():
    for free in (None, "text"):
        grammar = grammar_of("llama3", [WEATHER], many=True, free=free, answer=None)
        assert follows(grammar, f"{PYTHON_TAG}{BARE};{BARE}")
        assert follows(grammar, PYTHON_TAG + BARE.replace("city", "town")) is False
        assert follows(grammar, f"{PYTHON_TAG}print(1)") is (free == "text")


def test_matcher_fault_names_cause():
    without = json.loads(byte_tokenizer().to_str())
    del without["model"]["vocab"]["x"]
    few = compiler_of(Tokenizer.from_str(json.dumps(without)))
    bits = np.zeros(-(-VOCAB // 32), np.int32)
    matcher = few.compile(of_regex("ax")).matcher()
    assert matcher.take(ord("a"))
    assert not matcher.fill(bits)
    assert matcher.fault == NO_TOKEN
    many = " | ".join(f'"{i}"' for i in range(9000))
    matcher = compiler().compile(of_lark(f"root ::= {many}")).matcher()
    assert not matcher.take(ord("1"))
    assert matcher.fault == TOO_MUCH
    matcher = compiler().compile(of_regex("ab")).matcher()
    assert not matcher.take(ord("b"))
    assert "doesn't satisfy the grammar" in matcher.fault


def test_schema_grammar_limits_white_space():
    """Otherwise a model that writes white space forever would never end its output."""
    grammar = of_schema({"type": "object", "properties": {"a": {"type": "null"}}})
    assert follows(grammar, '{\n  "a": null\n}')
    assert follows(grammar, json.dumps({"a": None}, indent=8))
    assert follows(grammar, '{\n\n\n"a": null}') is False
    assert follows(grammar, "{" + " " * 40) is False


def test_schema_cannot_set_guidance_options():
    loose = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidGrammarError, match="not"):
        compiler().compile(of_schema(loose))


def test_of_lark_accepts_gbnf_and_lark():
    for grammar in ('root ::= "a" b\nb ::= [0-9]', 'start: "a" b\nb: /[0-9]/'):
        assert follows(of_lark(grammar), "a7")
        assert follows(of_lark(grammar), "ab") is False


def test_of_choices_escapes_syntax():
    grammar = of_choices(['a"b', "x | y", "ü\n"])
    for right in ('a"b', "x | y", "ü\n"):
        assert follows(grammar, right)
    assert follows(grammar, "x") is None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: of_regex("(a"), "unclosed group"),
        (lambda: of_regex("a" * MAX_GRAMMAR_BYTES), "more than"),
        (lambda: of_lark("start: nobody"), "nobody"),
        (lambda: of_lark("???"), "neither Lark nor GBNF"),
        (lambda: of_lark("root ::= " + "(" * 9999), "neither Lark nor GBNF"),
        (lambda: of_schema({"type": "frog"}), "frog"),
        (lambda: of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
        (lambda: of_schema({"$ref": "http://host.invalid/schema"}), "does not fetch"),
        (
            lambda: grammar_of(
                "qwen3_coder",
                [
                    CallableFunction(
                        name="f", schema={"properties": {"a": {"type": "string", "minLength": 2}}}
                    )
                ],
                many=True,
                free=None,
                answer=None,
            ),
            "minLength of a of the function f",
        ),
    ],
)
def test_compiler_rejects_invalid_grammar(made, reason):
    with pytest.raises(InvalidGrammarError, match=reason) as refused:
        compiler().compile(made())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_compiler_rejects_invalid_tokenizer():
    with pytest.raises(ValueError, match="grammars are not supported with"):
        Compiler("{}", VOCAB)
