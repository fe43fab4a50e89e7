"""Every tool-call format: parser, grammar and writer agree, whatever the split of the text."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest

from shared.text.call_formats.call_format import CallableFunction
from shared.text.call_formats.names import ALIASES, OTHER_NAMES
from shared.text.call_formats.registry import FORMATS
from shared.text.grammar import CompiledGrammar, Compiler
from shared.text.parsing.delta import Delta
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.text_parsers import new_parser
from shared.text.tokenizer import Tokenizer
from shared.text.tool_call_grammar import grammar_of
from tests.support.call_texts import (
    FUNCTIONS,
    NAMES,
    cut,
    drawn_call,
    drawn_output,
    parsed,
    read_back,
    tags_of,
)
from tests.support.grammar_walks import walk
from tests.support.http_fixtures import END, byte_tokenizer

VOCAB = 300
TOOLS = [CallableFunction(name=name, schema=schema) for name, schema in FUNCTIONS.items()]
STREAMED = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    'get_weather\n```json\n{"city": "Ro',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
    '<｜tool▁sep｜>{"city": "Ro',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Ro',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Ro',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
    '<|tool_call_argument_begin|>{"city": "Ro',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Ro',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Ro',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "Ro',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Ro',
    "phi4": '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Ro',
}
"""Beginnings of calls with JSON arguments, which are streamed."""


@lru_cache
def compiler() -> Compiler:
    return Compiler(byte_tokenizer().to_str(), VOCAB)


@lru_cache
def grammar(name: str, many: bool, free: str | None) -> CompiledGrammar:
    return compiler().compile(grammar_of(name, TOOLS, many=many, free=free, answer=None))


def follows(compiled: CompiledGrammar, text: str) -> bool:
    matcher = compiled.matcher()
    return all(map(matcher.take, text.encode())) and matcher.is_satisfied


def check_splits(name: str, seeds: range) -> None:
    for seed in seeds:
        chosen = random.Random(seed)
        text = drawn_output(FORMATS[name], chosen)
        how: dict[str, Any] = {
            "is_constrained": chosen.random() < 0.3,
            "is_open": chosen.choice([None, None, False, True]),
            "was_cut": chosen.random() < 0.3,
        }
        assert parsed(name, cut(text, chosen), **how) == parsed(name, [text], **how), text


@pytest.mark.parametrize("name", NAMES)
def test_split_output_parses_like_whole_output(name: str) -> None:
    check_splits(name, range(250))


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_splits_parse_like_whole_output(name: str) -> None:
    check_splits(name, range(10_000))


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_written_calls_are_read_back(name: str, is_constrained: bool) -> None:
    for seed in range(60):
        chosen = random.Random(seed)
        calls = [drawn_call(chosen) for _ in range(chosen.randrange(1, 4))]
        text = FORMATS[name].write(calls)
        assert read_back(name, text, is_constrained=is_constrained) == calls, text


@pytest.mark.parametrize("name", NAMES)
def test_grammar_accepts_written_calls(name: str) -> None:
    for seed in range(25):
        chosen = random.Random(seed)
        calls = [drawn_call(chosen) for _ in range(chosen.randrange(1, 4))]
        text = FORMATS[name].write(calls)
        assert follows(grammar(name, True, None), text), text
        assert follows(grammar(name, True, "text"), text), text
        assert follows(grammar(name, False, None), text) == (len(calls) == 1), text


@pytest.mark.parametrize("name", NAMES)
def test_generated_calls_are_read_back(name: str) -> None:
    """Texts of the grammar of several calls; `test_tool_call_grammar` checks their schemas."""
    shown = Tokenizer(byte_tokenizer(), None, {})
    named = {bytes([byte]): [byte] for byte in range(256)}
    for seed in range(4):
        tokens = walk(grammar(name, True, None), VOCAB, END, named, seed, most=3000, style=name)
        assert read_back(name, shown.decode(tokens), is_constrained=True)


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].openings])
def test_grammar_beside_text_allows_no_damaged_call(name: str) -> None:
    opening = FORMATS[name].openings[0]
    compiled = grammar(name, True, "text")
    written = FORMATS[name].write([("stop", {})])
    assert follows(compiled, f"Well {written} so")
    assert follows(compiled, f"{opening[0]} is no call")
    for text in (f"{opening}frog", written.replace("stop", "frog"), f"{written} {opening} x"):
        assert not follows(compiled, text), text


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].openings])
def test_malformed_call_is_text_and_counted(name: str) -> None:
    opening = FORMATS[name].openings[0]
    unknown = FORMATS[name].write([("frog", {"a": 1})])
    for text in (f"{opening} frog", unknown, f"Hm {opening}", f"{unknown} so"):
        left, _, calls, malformed = parsed(name, [text])
        assert (left, calls, malformed) == (text, [], 1)
    assert parsed(name, [f"Hm {opening}"], was_cut=True)[3] == 0
    whole = FORMATS[name].write([("stop", {})])
    left, _, calls, malformed = parsed(name, [f"{unknown} then {whole}"])
    assert (left, calls, malformed) == (f"{unknown} then", [("stop", "{}")], 1)


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].openings])
def test_call_within_reasoning_is_neither_lost_nor_invented(name: str) -> None:
    call_format = FORMATS[name]
    written, opening = call_format.write([("stop", {})]), call_format.openings[0]
    end = tags_of(name).end
    for is_constrained in (False, True):
        _, thought, calls, _ = parsed(
            name, [f"hm {written}\n{end}\n"], is_open=True, is_constrained=is_constrained
        )
        assert (thought, len(calls)) == ((f"hm {written}", 0) if is_constrained else ("hm", 1))
    text = f"Is {opening} right?\n{end}\n{written}"
    assert parsed(name, [text], is_open=True) == (
        *("", f"Is {opening} right?", [("stop", "{}")]),
        0,
    )


@pytest.mark.parametrize("name", NAMES)
def test_calls_beyond_limit_are_text(name: str) -> None:
    text = FORMATS[name].write([("stop", {}), ("stop", {})])
    parser = new_parser(name, OutputBuilder(FUNCTIONS, 1, False), None)
    found = parser.push(text) + parser.flush(was_cut=False)
    assert len(found.tool_calls) == 1
    assert "stop" in found.text
    assert parser.num_malformed_calls == 0


@pytest.mark.parametrize("name", STREAMED)
def test_json_arguments_are_streamed(name: str) -> None:
    parser = new_parser(name, OutputBuilder(FUNCTIONS, None, False), None)
    found = sum(map(parser.push, STREAMED[name]), Delta())
    assert found.tool_calls[0].arguments == '{"city": "Ro'
    assert not found.text


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "stop", "arguments": {}, "id": "abc123def"}]', 1),
        ("mistral", "[TOOL_CALLS]stop[CALL_ID]abc123def[ARGS]{}", 1),
        ("mistral", "[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]stop[ARGS] {}", 2),
        ("granite", '<tool_call>[{"name": "stop", "arguments": {}}]', 1),
        ("granite", '<|tool_call|> [{"name":"stop","arguments":{}},{"name":"stop"}]', 2),
        ("phi4", '<|tool_call|>{"name": "stop", "arguments": {}}<|/tool_call|>', 1),
        ("phi4", 'functools[{"name": "stop", "arguments": {}}]', 1),
        ("glm45", "<tool_call>stop</tool_call>", 1),
        ("glm45", "<tool_call>stop\n</tool_call>\n<tool_call>stop</tool_call>", 2),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>stop"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", 1),
        ("harmony", " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>", 1),
        ("harmony", "<|channel|>commentary to=stop<|message|> {}<|end|>", 1),
        ("harmony", "<|start|>assistant<|channel|>analysis to=functions.stop code<|message|>{}", 1),
        ("gemma4", "<|tool_call>call:stop{ }<tool_call|>\n<|tool_call>call:stop{}<tool_call|>", 2),
        ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="stop">\n\n'
         "</｜DSML｜invoke>", 1),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="stop" index="12"<|sep|>'
         "<|close|>call<|sep|>", 1),
        ("nemotron", '<TOOLCALL>[{"name": "stop", "arguments": {}}]', 1),
        ("cohere", '<|START_ACTION|>[{"tool_name":"stop","parameters":{}}]<|END_ACTION|>', 1),
        ("cohere", '<|START_ACTION|>[{"parameters": {}, "tool_name": "stop"}, '
         '{"tool_call_id": "7", "tool_name": "stop"}]<|END_ACTION|>', 2),
        ("minimax_m2", '<minimax:tool_call><invoke name="stop"></invoke></minimax:tool_call>', 1),
    ],
)  # fmt: skip
def test_other_spellings_of_calls_are_read(name: str, text: str, calls: int) -> None:
    assert read_back(name, text, is_constrained=False) == [("stop", {})] * calls


def test_glm45_arguments_have_types_of_schema() -> None:
    values = {"city": "12", "days": "12", "is_open": "True", "near": '["a"]', "note": "null"}
    parts = (f"<arg_key>{key}</arg_key><arg_value>{x}</arg_value>" for key, x in values.items())
    ((_, arguments),) = read_back(
        "glm45", f"<tool_call>get_weather{''.join(parts)}</tool_call>", is_constrained=False
    )
    want = {"city": "12", "days": 12, "is_open": True, "near": ["a"], "note": None}
    assert arguments == want


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("deepseek_v32", '<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>"),
        (
            "kimi_k3",
            '<|open|>argument key="KEY" type="KIND"<|sep|>',
            "<|close|>argument<|sep|>",
        ),
    ],
)
def test_kind_of_value_follows_attribute(name: str, begin: str, end: str) -> None:
    """The attribute decides, whatever the schema of the parameter is."""
    kinds = ("true", "false", "maybe") if name == "deepseek_v32" else ("string", "number", "x")
    values = [("city", 0, " 7 "), ("near", 1, '["a"]'), ("days", 0, "7"), ("note", 1, "so")]
    values += [("price", 2, "7"), ("is_open", 1, "false")]
    parts = [
        begin.replace("KEY", k).replace("KIND", kinds[n]) + text + end for k, n, text in values
    ]
    written = FORMATS[name].write([("get_weather", {})])
    place = written.rindex("</｜DSML｜invoke>" if name == "deepseek_v32" else "<|close|>call")
    text = written[:place] + "".join(parts) + written[place:]
    ((_, arguments),) = read_back(name, text, is_constrained=False)
    want = {"city": " 7 ", "near": ["a"], "days": "7", "note": "so", "price": 7, "is_open": False}
    assert arguments == want


def ids_of(name: str, text: str) -> list[str]:
    parser = new_parser(name, OutputBuilder(FUNCTIONS, None, False), None)
    return [call.call_id for call in parser.push(text).tool_calls]


def test_call_ids_have_form_of_chat_template() -> None:
    (made,) = ids_of("mistral", "[TOOL_CALLS]stop[ARGS]{}")
    assert len(made) == 9
    assert made.isalnum()
    assert ids_of("mistral", "[TOOL_CALLS]stop[CALL_ID]abc123def[ARGS]{}") == ["abc123def"]
    written = FORMATS["kimi_k2"].write([("stop", {}), ("stop", {})])
    assert ids_of("kimi_k2", written) == ["functions.stop:0", "functions.stop:1"]


def test_names_list_each_format_once() -> None:
    assert tuple(OTHER_NAMES) == tuple(FORMATS)
    assert not ALIASES.keys() & FORMATS.keys()
    assert len(ALIASES) == sum(map(len, OTHER_NAMES.values()))
