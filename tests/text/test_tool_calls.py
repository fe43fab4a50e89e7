"""Tool call parsers: every format, independent of chunks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.server.completions.parsers import Parsers, new_parser
from shared.server.protocol.openai_types import ChatRequest
from shared.text.call_formats.registry import FORMATS
from shared.text.parsing.delta import Delta
from shared.text.parsing.json_object import JsonObject
from shared.text.parsing.output_parser import OutputBuilder

CITY = {
    "city": {"type": "string"},
    "state": {"type": "string"},
    "days": {"type": "integer"},
    "odd": {"type": ["string"]},
}
TOOLS = {"get": {"type": "object", "properties": CITY}, "f": {}}
GET = '{"name": "get", "arguments": {"city": "Pa\\"}{ris", "days": [1, {"a": 2.5e3}]}}'
ARGUMENTS = '{"city": "Pa\\"}{ris", "days": [1, {"a": 2.5e3}]}'
ELEMENTS = (
    "<tool_call>\n<function=get>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n"
    "</parameter>\n</function>\n</tool_call>"
)

Calls = list[tuple[str, str]]


def read(
    name: str, pieces: list[str], most: int | None = None, was_cut: bool = False
) -> tuple[str, Calls]:
    parser = new_parser(name, OutputBuilder(TOOLS, most, False), None)
    parsed = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut)
    return parsed.text, [(call.name, call.arguments) for call in parsed.tool_calls]


CASES = [
    ("hermes", f"Hi\n<tool_call>\n{GET}\n</tool_call>\n", "Hi", [("get", ARGUMENTS)]),
    ("hermes", f"<tool_call>{GET}</tool_call>, so", ", so", [("get", ARGUMENTS)]),
    ("hermes", f"<tool_call>{GET}", "", [("get", ARGUMENTS)]),
    (
        "hermes",
        '<tool_call>{"arguments":{"x":1},"name":"f"}\n<tool_call>{"name":"f"}</tool_call>',
        "",
        [("f", '{"x": 1}'), ("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{},"id":{"a":2}}</tool_call>',
        ',"id":{"a":2}}',
        [("f", "{}")],
    ),
    ("llama3", '{"name":"f","parameters":{"a":1}}', "", [("f", '{"a":1}')]),
    (
        "llama3",
        '\n<|python_tag|>{"name":"f","parameters":{}}; {"type":"function","name":"f"}',
        "",
        [("f", "{}"), ("f", "{}")],
    ),
    ("llama3", '{"name":"f","parameters":{}} done', "done", [("f", "{}")]),
    ("qwen3_coder", f"ok\n\n{ELEMENTS}\n", "ok", [("get", '{"city": "5", "days": 5}')]),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=get><parameter=odd>\n\n[a\n</parameter></function></tool_call>",
        "",
        [("get", '{"odd": "\\n[a"}')],
    ),
]


@pytest.mark.parametrize(("name", "text", "left", "calls"), CASES)
def test_tool_call_parser_returns_calls_and_remaining_text(name, text, left, calls):
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(name, pieces) == (left, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "no call <tool_cal"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argument": {}}</tool_call>'),
        ("hermes", "<tool_call> {'name': 'f'}</tool_call>"),
        ("hermes", '\n <tool_call>\n{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": "f", "arguments": NaN}'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
        ("llama3", ' {"a": 1} text'),
        ("llama3", 'Sure: {"name": "f", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("qwen3_coder", "<tool_call>\n<function=g>\n<parameter=a>1</parameter></function> \n"),
        ("qwen3_coder", " <tool_call> <function=f"),
        ("qwen3_coder", "<tool_call>\n\n<func </tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>2</par"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter> so </function>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=city>\nRome\n"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a\n1\n</parameter></function>"),
        (
            "qwen3_coder",
            "Write <function=f> or <function=g></function> or <function=f and <function=",
        ),
        ("qwen3_coder", "<function=f><function=f><tool_call><function=f> <tool_call>"),
    ],
)
def test_tool_call_parser_preserves_text_without_calls(name, text):
    for size in (1, 3, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(name, pieces) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "left", "arguments"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":tru} b', "} b", '{"a":tru'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1', "", '{"a":1'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"b\nc"}}', '\nc"}}', '{"a":"b'),
        ("hermes", '<tool_call>{"name":"f","arguments":{}<tool_call>', "<tool_call>", "{}"),
    ],
)
def test_tool_call_parser_returns_text_after_malformed_call(name, text, left, arguments):
    for size in (1, 5, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(name, pieces) == (left, [("f", arguments)])


CITY_OF_TEXAS = '{"city": "Dallas", "state": "TX"}'


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        (  # first value without end tag
            "<tool_call>\n<function=get>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("get", CITY_OF_TEXAS)],
        ),
        (  # last value without end tag
            "<tool_call>\n<function=get>\n<parameter=city>\nDallas\n</function>\n</tool_call>\nso",
            "\nso",
            [("get", '{"city": "Dallas"}')],
        ),
        ("<function=get><parameter=city>Dallas</function>", "", [("get", '{"city": "Dallas"}')]),
        (  # function without end tag
            "<tool_call>\n<function=get>\n<parameter=city>\nDallas\n</parameter>\n</tool_call>",
            "",
            [("get", '{"city": "Dallas"}')],
        ),
        (  # end tag of the call only
            "<tool_call>\n<function=get>\n<parameter=city>\nDallas\n</tool_call>\n" + ELEMENTS,
            "",
            [("get", '{"city": "Dallas"}'), ("get", '{"city": "5", "days": 5}')],
        ),
        ("<tool_call><function=f>\n</tool_call>", "", [("f", "{}")]),
        ("<tool_call>\n<function=f>\n</function>", "", [("f", "{}")]),
        (  # call without begin tag
            "I look.\n\n<function=get>\n<parameter=city>\nDallas\n</parameter>\n</function>\n"
            "</tool_call>",
            "I look.",
            [("get", '{"city": "Dallas"}')],
        ),
        ("<function=f></function><function=f></function>", "", [("f", "{}"), ("f", "{}")]),
        (  # value that contains tags
            "<tool_call><function=get><parameter=city>a</function>b</tool_call>c<parameter=x>d"
            "<parameter=city>\n</parameter></function></tool_call>",
            "",
            [("get", '{"city": "a</function>b</tool_call>c<parameter=x>d<parameter=city>"}')],
        ),
    ],
)
def test_qwen3_coder_parser_tolerates_missing_tags(text, left, calls):
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read("qwen3_coder", pieces) == (left, calls)


def test_qwen3_coder_parser_constrained_requires_exact_format():
    bare = ELEMENTS.removeprefix("<tool_call>\n")
    parser = new_parser("qwen3_coder", OutputBuilder(TOOLS, None, True), None)
    assert parser.push(bare + ELEMENTS).tool_calls[0].arguments == '{"city": "5", "days": 5}'
    assert parser.flush(was_cut=False) == Delta()
    parser = new_parser("qwen3_coder", OutputBuilder(TOOLS, None, True), None)
    assert parser.push(bare) + parser.flush(was_cut=False) == Delta(bare)
    value = "a\n<parameter=days>\n</function>\n</tool_call>\n<tool_call> b"
    parser = new_parser("qwen3_coder", OutputBuilder(TOOLS, None, True), None)
    (call,) = parser.push(ELEMENTS.replace("5", value, 1)).tool_calls
    assert json.loads(call.arguments) == {"city": value, "days": 5}


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}


@pytest.mark.parametrize(
    ("fields", "strict", "is_held"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"tool_choice": "required"}, False, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get"}}}, False, True),
        ({"tool_choice": {"type": "function", "name": "get"}}, False, True),
        ({"tool_choice": ALLOWED}, False, True),
        ({"response_format": {"type": "json_object"}}, False, True),
        ({"response_format": {"type": "text"}}, False, False),
    ],
)
def test_parsers_under_grammar_accept_only_grammar_calls(fields, strict, is_held):
    function = {"name": "get", "parameters": {"properties": CITY}, "strict": strict}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": "hi"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": tools, **fields})
    facts: Any = SimpleNamespace(reasoning_parser="qwen3", tool_call_parser="qwen3_coder")
    facts.limits = SimpleNamespace(structured_outputs=True)
    bare = ELEMENTS.removeprefix("<tool_call>\n")
    for text in (bare, f"<think>hm {ELEMENTS}"):
        parser = Parsers(facts).new(request.to_generation(), "")
        parsed = parser.push(text) + parser.flush(was_cut=False)
        assert bool(parsed.tool_calls) is not is_held


SECOND = {
    "hermes": '\n<tool_call>\n{"name": "f", "arguments": ',
    "qwen3_coder": "\n<tool_call>\n<function=get>\n<parameter=city>\n",
    "llama3": '; {"name": "f", "parameters": ',
}
FIRST = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "qwen3_coder": ELEMENTS,
    "llama3": '{"name": "f", "parameters": {}}',
}


@pytest.mark.parametrize("name", FIRST)
def test_partial_second_call_cut_by_max_tokens_dropped(name):
    whole = FIRST[name] + SECOND[name]
    for end in range(len(FIRST[name].removesuffix("</tool_call>")), len(whole) + 1):
        for pieces in ([whole[:end]], list(whole[:end])):
            text, calls = read(name, pieces, was_cut=True)
            assert (text, len(calls)) == ("", 1), whole[:end]


@pytest.mark.parametrize("name", FIRST)
def test_max_tokens_cut_preserves_model_text(name):
    second, word = SECOND[name], '{"a": 1' if name != "qwen3_coder" else "Rome"
    for first in ("", "Well. ", FIRST[name] + " so"):
        if name == "llama3" and first != "":
            continue
        for end in range(1, len(second) + 1) if first else ():
            text, _ = read(name, [first + second[:end]], was_cut=True)
            assert text.rstrip() == (first.removeprefix(FIRST[name]) + second[:end]).rstrip()
    text, calls = read(name, [FIRST[name] + second + word], was_cut=True)
    given = text + "".join(arguments for _, arguments in calls[1:])
    assert given.endswith(word)
    assert len(calls) == (1 if name == "qwen3_coder" else 2)
    # The model itself ended there, so the partial delimiter is output.
    assert read(name, [FIRST[name] + second], was_cut=False)[0].strip() == second.strip()


def test_calls_beyond_limit_are_text():
    one = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert read("hermes", [one + one], most=1) == (one, [("f", "{}")])


PARTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "<|python_tag|>", ";", " ", "\n", "é"),
    *('{"name": "f", "arguments": ', '{"name":"get","parameters":', '{"a": 1}', "{}", "}", "{"),
    *("<function=get>", "<function=", "<parameter=city>", "x", "</parameter>", "</function>"),
    *("<function=f>", "<parameter=days>", "1", ELEMENTS, "<think>", "</think>"),
]


@pytest.mark.parametrize("name", FORMATS)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    is_open=st.sampled_from([None, False, True]),
    are_held=st.booleans(),
    was_cut=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_tool_call_parser_independent_of_chunks(name, parts, is_open, are_held, was_cut, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def read_all(pieces: list[str]) -> tuple[str, str, Calls]:
        parser = new_parser(name, OutputBuilder(TOOLS, None, are_held), is_open)
        parsed = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut)
        return parsed.text, parsed.reasoning, [(c.name, c.arguments) for c in parsed.tool_calls]

    got = read_all(pieces)
    assert got == read_all([text])
    if is_open is None and not got[2]:
        assert got[0] == text
    if name == "qwen3_coder":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in got[2])


def test_tool_call_parser_streams_arguments():
    parser = new_parser("hermes", OutputBuilder(TOOLS, None, False), None)
    parsed = [parser.push(text) for text in ('a <tool_call>{"name":"f","arguments":', "{", '"a":1')]
    assert parsed[0] == Delta("a")
    begun = parsed[1].tool_calls[0]
    assert (begun.name, begun.arguments) == ("f", "{")
    assert begun.call_id.startswith("call_")
    (more,) = parsed[2].tool_calls
    assert (more.call_id, more.name, more.arguments) == ("", "", '"a":1')


def is_object(text: str) -> bool:
    scan = JsonObject()
    return all(map(scan.take, text)) and scan.ended


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON), st.data())
@settings(deadline=None, max_examples=150)
def test_json_object_scanner_matches_json_loads(value, data):
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    assert is_object(text)
    place = data.draw(st.integers(0, len(text)))
    other = (
        text[:place]
        + data.draw(st.sampled_from([*'{}[],:"\\ 0-.eE+u\n', "tru", ""]))
        + text[place + data.draw(st.integers(0, 2)) :]
    )
    try:
        is_valid = isinstance(json.loads(other), dict) and other[0] == "{" and other[-1] == "}"
    except ValueError:
        is_valid = False
    assert is_object(other) == is_valid
