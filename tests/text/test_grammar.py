"""Grammars of forms and of calls: which texts they are of, token by token."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from shared.text.forced_calls import Tool, grammar_of
from shared.text.grammar import (
    MAX_GRAMMAR_BYTES,
    Compiler,
    GrammarRefused,
    of_choices,
    of_lark,
    of_regex,
    of_schema,
)
from shared.text.grammar_worker import Calls, Form, Wanted
from tests.support.http_fixtures import byte_tokenizer

VOCAB = 300
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, ANY = Tool(name="weather", schema=CITY), Tool(name="any", schema=None)
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'
ELEMENTS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRo\nme\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@lru_cache
def compiler() -> Compiler:
    return Compiler(byte_tokenizer().to_str(), VOCAB)


def follows(grammar: str, text: str) -> bool | None:
    """Whether a text is of a grammar; None: it is the beginning of one."""
    matcher = compiler().compile(grammar).matcher()
    if not all(map(matcher.take, text.encode())):
        return False
    return True if matcher.is_satisfied else None


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize(
    ("style", "call", "between"),
    [("hermes", TAGGED, "\n"), ("qwen3_coder", ELEMENTS, "\n"), ("llama3", BARE, ";")],
)
def test_an_answer_that_must_call_is_calls_and_nothing_else(style, call, between, many):
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
def test_an_answer_that_may_call_is_text_or_a_call_that_is_right(style, call):
    grammar = grammar_of(style, [WEATHER], many=True, free="text", answer=None)
    for right in ("", "hi <b> you", call):
        assert follows(grammar, right)
    assert follows(grammar, call.replace("city", "town")) is False
    if style != "llama3":  # whose calls are the whole text
        assert follows(grammar, f"Well: {call}\n{call} So.")
        assert follows(grammar, f"{call}<tool_call>garbage") is False


def test_an_answer_of_a_form_may_be_a_call_instead():
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    answer = of_schema({**schema, "additionalProperties": False})
    grammar = grammar_of("hermes", [ANY], many=False, free="answer", answer=answer)
    assert follows(grammar, '{"x": true}')
    assert follows(grammar, TAGGED.replace("weather", "any").replace("city", "whatever"))
    assert follows(grammar, "hi") is False


@pytest.mark.parametrize("lead", ["open", "maybe", None])
def test_what_is_held_to_a_form_begins_behind_the_reasoning(lead):
    form, calls = Form(kind="regex", value="[ab]{2}"), None
    grammar = Wanted(form=form, calls=calls, lead=lead).grammar()
    thought = "so </b> {} hm\n</think>\n\n"
    assert bool(follows(grammar, thought + "ab")) is (lead == "open")
    assert bool(follows(grammar, f"<think>{thought}ab")) is (lead is not None)
    assert bool(follows(grammar, "ab")) is (lead != "open")
    if lead == "open":
        assert follows(grammar, thought + "abc") is False
        assert follows(grammar, "so") is None


def test_calls_come_behind_the_reasoning_too():
    calls = Calls(style="hermes", tools=[("weather", CITY)], many=True, free="text")
    grammar = Wanted(form=None, calls=calls, lead="open").grammar()
    assert follows(grammar, f"hm</think>\n\nHi. {TAGGED}")
    assert follows(grammar, f"hm</think>\n\nHi. {TAGGED.replace('city', 'town')}") is False


def test_white_space_of_json_has_an_end():
    """A model that writes it for ever would never come to the end of its answer."""
    grammar = of_schema({"type": "object", "properties": {"a": {"type": "null"}}})
    assert follows(grammar, '{\n  "a": null\n}')
    assert follows(grammar, json.dumps({"a": None}, indent=8))
    assert follows(grammar, '{\n\n\n"a": null}') is False
    assert follows(grammar, "{" + " " * 40) is False


def test_settings_of_the_library_are_not_the_requests_to_make():
    loose = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarRefused, match="not"):
        compiler().compile(of_schema(loose))


def test_gbnf_and_lark_say_the_same():
    for grammar in ('root ::= "a" b\nb ::= [0-9]', 'start: "a" b\nb: /[0-9]/'):
        assert follows(of_lark(grammar), "a7")
        assert follows(of_lark(grammar), "ab") is False


def test_choices_are_texts_and_no_syntax():
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
        (lambda: of_schema({"$ref": "http://host.invalid/schema"}), "does not fetch"),
        (
            lambda: grammar_of(
                "qwen3_coder",
                [Tool(name="f", schema={"properties": {"a": {"type": "string", "minLength": 2}}})],
                many=True,
                free=None,
                answer=None,
            ),
            "minLength of a of the function f",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(made, reason):
    with pytest.raises(GrammarRefused, match=reason) as refused:
        compiler().compile(made())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_tokenizer_that_is_none_is_refused():
    with pytest.raises(ValueError, match="grammars cannot be had"):
        Compiler("{}", VOCAB)
