"""Grammars of forced tool calls: every accepted text parses as a call valid for its schema."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema
import pytest

from shared.server.completions.parsers import new_parser
from shared.text.call_formats.call_format import CallableFunction
from shared.text.call_formats.registry import FORMATS
from shared.text.grammar import CompiledGrammar, Compiler, InvalidGrammarError
from shared.text.json_schema_refs import standalone
from shared.text.lark_pattern import pattern_of
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.tokenizer import Tokenizer
from shared.text.tool_call_grammar import grammar_of, without_calls
from tests.support.call_schemas import SCHEMAS
from tests.support.grammar_walks import walk
from tests.support.http_fixtures import END, byte_tokenizer
from tests.support.patches import OTHER_TEXTS, PATCH_GRAMMAR, PATCHES

VOCAB = 300


@lru_cache
def compiler() -> Compiler:
    return Compiler(byte_tokenizer().to_str(), VOCAB)


def forced(style: str, schema: dict[str, Any] | None) -> CompiledGrammar:
    tools = [CallableFunction(name="f", schema=schema)]
    return compiler().compile(grammar_of(style, tools, many=False, free=None, answer=None))


def read(style: str, text: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    parser = new_parser(style, OutputBuilder({"f": schema}, None, are_calls_constrained=True), None)
    found = parser.push(text) + parser.flush(was_cut=False)
    assert not found.text.strip(), found.text
    return [(call.name, json.loads(call.arguments)) for call in found.tool_calls]


UNSUPPORTED = {
    "pythonic": "not an identifier",
    **dict.fromkeys(("gemma4", "functiongemma"), "maxItems is not supported"),
}
"""Reasons against a schema, by format."""


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("style", FORMATS)
def test_call_grammar_outputs_parse_as_valid_calls(style, name):
    schema = SCHEMAS[name]
    if name == "chain" and style in UNSUPPORTED:
        with pytest.raises(InvalidGrammarError, match=UNSUPPORTED[style]):
            forced(style, schema)
        return
    shown, compiled = Tokenizer(byte_tokenizer(), None, {}), forced(style, schema)
    named = {bytes([byte]): [byte] for byte in range(256)}
    for seed in range(6):
        text = shown.decode(walk(compiled, VOCAB, END, named, seed, most=3000, style=style))
        ((called, arguments),) = read(style, text, schema)
        assert called == "f"
        jsonschema.validate(arguments, schema)


def follows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.take, text.encode())) and matcher.is_satisfied


INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
WITHOUT_PATTERNS = {"pythonic", "gemma4", "functiongemma"}


@pytest.mark.parametrize("style", FORMATS)
def test_custom_tool_grammar_constrains_input(style):
    tools = [CallableFunction(name="f", schema=INPUT, pattern=pattern_of(PATCH_GRAMMAR))]
    if style in WITHOUT_PATTERNS:
        with pytest.raises(InvalidGrammarError, match="grammar of the tool f is not supported"):
            grammar_of(style, tools, many=False, free=None, answer=None)
        return
    compiled = compiler().compile(grammar_of(style, tools, many=False, free=None, answer=None))

    def write(text: str) -> str:
        return FORMATS[style].write([("f", {"input": text})])

    for text in PATCHES:
        assert follows(compiled, write(text))
        assert read(style, write(text), INPUT) == [("f", {"input": text})]
    assert not any(follows(compiled, write(text)) for text in OTHER_TEXTS)


@pytest.mark.parametrize("style", FORMATS)
def test_grammar_without_calls_excludes_calls(style):
    compiled = compiler().compile(without_calls(style))
    call = FORMATS[style].write([("f", {})])
    texts = ["", "Well.", "a < b\n"]
    if style == "harmony":
        texts = ["", "<|channel|>final<|message|>Well."]
    assert all(follows(compiled, text) for text in texts)
    assert not follows(compiled, call)
    for opening in FORMATS[style].openings + FORMATS[style].loose_openings:
        assert not follows(compiled, f"Well.\n{opening}")
        assert not follows(compiled, f"{opening} so")
        assert follows(compiled, f"Well {opening[:-1]}")


def test_unquoted_input_excludes_closing_tag():
    tools = [CallableFunction(name="f", schema=INPUT, pattern=r"[a-z<>/]+")]
    grammar = grammar_of("qwen3_coder", tools, many=False, free=None, answer=None)
    compiled = compiler().compile(grammar)
    assert follows(compiled, elements(input="a</b>/c"))
    assert not follows(compiled, elements(input="a</parameter>b"))


def elements(**parameters: str) -> str:
    written = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in parameters.items()]
    return f"<tool_call>\n<function=f>\n{''.join(written)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("null", "007", "a b"), ()),
        ({"type": ["string", "integer"]}, ("null", "12", "x"), ()),
        ({"$ref": "#/$defs/text", "description": "of it"}, ("12", '"'), ()),
        ({"$ref": "#/$defs/choice"}, ("a", "1"), ('"a"', "b", "c")),
        ({"anyOf": [{"$ref": "#/$defs/choice"}, {"type": "integer"}]}, ("a", "7"), ('"a"', "b")),
        ({"enum": ["1", 2, None]}, ("1", "2", "null"), ('"1"', "3")),
        ({"type": "string", "enum": ["1", 2]}, ("1",), ("2", '"1"')),
        ({"type": "boolean", "title": "t"}, ("true",), ("True", "x")),
        ({"type": ["integer", "null"]}, ("1", "null"), ("x", "true")),
        ({}, ("x", "1"), ()),
    ],
)
def test_qwen3_coder_grammar_writes_strings_without_quotes(schema, right, wrong):
    document = {
        "properties": {"a": schema},
        "$defs": {
            "text": {"type": "string"},
            "choice": {"anyOf": [{"const": "a"}, {"enum": ["1", "2"]}]},
        },
    }
    compiled = forced("qwen3_coder", document)
    for text in right:
        assert follows(compiled, elements(a=text)), text
    for text in wrong:
        assert not follows(compiled, elements(a=text)), text


def test_call_grammar_without_schema_accepts_any_parameters():
    """For example next to a strict function."""
    for text in (elements(), elements(x="1", y="a\nb")):
        assert follows(forced("qwen3_coder", None), text)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/short"}, "maxLength of a of the function f is not supported"),
        ({"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]}, "maxLength of a of the func"),
        ({"type": ["string", "null"], "pattern": "a"}, "pattern of a of the function f"),
        ({"$ref": "#/$defs/short", "maxLength": 2}, "maxLength of a of the function f"),
        ({"type": "string", "format": "date"}, "format of a of the function f"),
        ({"$ref": "#/$defs/nobody"}, "#/\\$defs/nobody does not exist"),
        ({"$ref": "#/$defs/round"}, "nests references more than"),
        ({"anyOf": [{"$ref": "#/properties/a"}]}, "nests references more than"),
    ],
)
def test_qwen3_coder_grammar_rejects_unsupported_string_keywords(schema, reason):
    defs = {"short": {"type": "string", "maxLength": 3}, "round": {"$ref": "#/$defs/round"}}
    with pytest.raises(InvalidGrammarError, match=reason):
        forced("qwen3_coder", {"properties": {"a": schema}, "$defs": defs})


def test_standalone_schema_keeps_references_and_values():
    value = {"$ref": "#/$defs/A"}
    document = {"$defs": {"A": {"const": value}, "B": {"properties": {"const": value}}}}
    assert standalone({"$ref": "#/$defs/B"}, document) == {
        "$ref": "#/$defs/0",
        "$defs": {
            "0": {"properties": {"const": {"$ref": "#/$defs/1"}}},
            "1": {"const": value},
        },
    }


SPACED = {"properties": {"a": {"type": "array"}, "b": {"type": "object"}}, "required": ["a", "b"]}
BETWEEN_TAGS = "<tool_call>\n{}\n</tool_call>"
CALL_OF = {
    "hermes": BETWEEN_TAGS.replace("{}", '{"name": "f", "arguments": {}}'),
    "llama3": '{"name": "f", "parameters": {}}',
}


@pytest.mark.parametrize("style", CALL_OF)
def test_json_call_grammar_allows_only_template_white_space(style: str):
    value = {"a": [1, {"x": []}], "b": {"y": "p, q: r\n", "z": {}}}
    compiled = forced(style, SPACED)
    head, tail = CALL_OF[style].rsplit("{}", 1)
    assert follows(compiled, head + json.dumps(value) + tail)
    for text in (
        json.dumps(value, indent=1),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value).replace("{", "{ ", 1),
        json.dumps(value).replace(", ", ",  ", 1),
        json.dumps(value) + " ",
    ):
        assert not follows(compiled, head + text + tail), text


def test_qwen3_coder_json_allows_only_template_white_space():
    compiled = forced("qwen3_coder", {"properties": {"a": {"type": "array"}}})
    assert follows(compiled, elements(a="[1, 2]"))
    assert not follows(compiled, elements(a="[1,2]"))
    assert not follows(compiled, elements(a="[1,\n2]"))


@pytest.mark.parametrize("style", ["gemma4", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 3, "maximum": 12}, ("3", "12"), ("2", "13", "-3", "3.0", " 3", "03")),
        ({"minimum": 3}, ("3", "9" * 18), ("2", "9" * 19)),
        ({"exclusiveMaximum": 3}, ("2", "-" + "9" * 18), ("3", "-" + "9" * 19)),
        ({"multipleOf": 5}, ("0", "15"), ("3", "14")),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ("0.5", "1.5"), ("0", "1.51")),
    ],
)
def test_literal_grammar_bounds_numbers(
    style: str, schema: dict[str, Any], right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    compiled = forced(style, {"properties": {"a": {"type": "integer"} | schema}, "required": ["a"]})
    whole = {"gemma4": "<|tool_call>call:f{a:NUMBER}<tool_call|>", "pythonic": "[f(a=NUMBER)]"}
    for text in right:
        assert follows(compiled, whole[style].replace("NUMBER", text)), text
    for text in wrong:
        assert not follows(compiled, whole[style].replace("NUMBER", text)), text


def test_tool_call_parser_preserves_numbers_beyond_float64():
    schema = {"properties": {"a": {"type": "object"}, "b": {"type": "number"}}}
    parser = new_parser(
        "qwen3_coder", OutputBuilder({"f": schema}, None, are_calls_constrained=True), None
    )
    (call,) = parser.push(elements(a='{"x": 1e999}', b="-2E400")).tool_calls
    assert call.arguments == '{"a": {"x": 1e999}, "b": -2E400}'
