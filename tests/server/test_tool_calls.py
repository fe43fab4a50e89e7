"""Calls of tools read out of a text, in each format and wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.options.server import TOOL_CALL_PARSERS
from shared.server.call_formats import FORMATS, ToolCallParser
from shared.server.delta import Delta
from shared.server.json_object import JsonObject

CITY = {"city": {"type": "string"}, "days": {"type": "integer"}, "odd": {"type": ["string"]}}
TOOLS = {"get": {"type": "object", "properties": CITY}, "f": {}}
GET = '{"name": "get", "arguments": {"city": "Pa\\"}{ris", "days": [1, {"a": 2.5e3}]}}'
ARGUMENTS = '{"city": "Pa\\"}{ris", "days": [1, {"a": 2.5e3}]}'
ELEMENTS = (
    "<tool_call>\n<function=get>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n"
    "</parameter>\n</function>\n</tool_call>"
)

Calls = list[tuple[str, str]]


def read(name: str, pieces: list[str], most: int | None = None) -> tuple[str, Calls]:
    parser = ToolCallParser(name, TOOLS, most)
    said = sum(map(parser.push, pieces), Delta()) + parser.flush()
    return said.text, [(call.name, call.arguments) for call in said.tool_calls]


CASES = [
    ("hermes", f"Hi\n<tool_call>\n{GET}\n</tool_call>\n", "Hi", [("get", ARGUMENTS)]),
    ("qwen", f"<tool_call>{GET}</tool_call>, so", ", so", [("get", ARGUMENTS)]),
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
def test_calls_are_read_and_the_rest_is_text(name, text, left, calls):
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
    ],
)
def test_what_is_no_call_is_text_and_nothing_is_lost(name, text):
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
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>2</par",
            "<parameter=b>2</par",
            '{"a": "1"',
        ),
    ],
)
def test_a_call_that_breaks_off_ends_there_and_the_rest_is_text(name, text, left, arguments):
    for size in (1, 5, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(name, pieces) == (left, [("f", arguments)])


def test_a_call_beyond_the_most_is_text():
    one = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert read("hermes", [one + one], most=1) == (one, [("f", "{}")])


PARTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "<|python_tag|>", ";", " ", "\n", "é"),
    *('{"name": "f", "arguments": ', '{"name":"get","parameters":', '{"a": 1}', "{}", "}", "{"),
    *("<function=get>", "<function=", "<parameter=city>", "x", "</parameter>", "</function>"),
]


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), data=st.data())
@settings(deadline=None, max_examples=120)
def test_calls_do_not_depend_on_how_the_text_was_cut(name, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got = read(name, pieces)
    assert got == read(name, [text])
    if not got[1]:
        assert got[0] == text


def test_arguments_are_said_while_they_are_read():
    parser = ToolCallParser("hermes", TOOLS, None)
    said = [parser.push(text) for text in ('a <tool_call>{"name":"f","arguments":', "{", '"a":1')]
    assert said[0] == Delta("a")
    begun = said[1].tool_calls[0]
    assert (begun.name, begun.arguments) == ("f", "{")
    assert begun.call_id.startswith("call_")
    (more,) = said[2].tool_calls
    assert (more.call_id, more.name, more.arguments) == ("", "", '"a":1')


def is_object(text: str) -> bool:
    scan = JsonObject()
    return all(map(scan.take, text)) and scan.ended


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=3), JSON), st.data())
@settings(deadline=None, max_examples=150)
def test_a_text_is_an_object_where_pythons_reader_says_so(value, data):
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    assert is_object(text)
    place = data.draw(st.integers(0, len(text)))
    other = text[:place] + data.draw(st.sampled_from([*'{}[],:"\\ 0-.eE+u\n', "tru", ""])) + text[
        place + data.draw(st.integers(0, 2)) :
    ]  # fmt: skip
    try:
        is_valid = isinstance(json.loads(other), dict) and other[0] == "{" and other[-1] == "}"
    except ValueError:
        is_valid = False
    assert is_object(other) == is_valid


def test_the_parsers_of_the_flag_are_those_that_are_there():
    assert set(TOOL_CALL_PARSERS) == FORMATS.keys()
