"""`read_argument`: conversion of unquoted parameter values by their schema, within limits."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import warnings
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.server.completions.parsers import new_parser
from shared.text.call_formats.registry import FORMATS
from shared.text.parsing.arguments import from_json, read_argument, to_json
from shared.text.parsing.delta import Delta
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.parsing.text_schema import ParameterSchemas

WORD = {"type": "string"}
OPTIONAL = {"anyOf": [WORD, {"type": "null"}]}
DEFS = {
    "Word": WORD,
    "Chain": {"$ref": "#/$defs/Word"},
    "Size": {"enum": ["1", "2"]},
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    "a/b~c": {"type": "integer"},
}


def document(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"key": schema}, "$defs": DEFS}


def value_of(schema: Any, text: str) -> Any:
    return read_argument(text, "key", ParameterSchemas(document(schema)))


@pytest.mark.parametrize(
    ("schema", "text", "want"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array", "items": WORD}, "['x', 'y']", ["x", "y"]),
        ({"type": "array"}, "('x', 1)", ["x", 1]),
        ({"type": "object"}, "{'k': None}", {"k": None}),
        ({"type": "object"}, '{"k": true}', {"k": True}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a"]}, '"a"', "a"),
        ({"const": "5"}, "5", "5"),
        ({"type": ["string", "null"]}, "007", "007"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "1e5", "1e5"),
        ({"type": ["string", "null"]}, "null", None),
        (OPTIONAL, "null", None),
        (OPTIONAL, "true", "true"),
        (WORD, "null", "null"),
        (WORD, "[1]", "[1]"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "many", "many"),
        ({"$ref": "#/$defs/Chain"}, "5", "5"),
        ({"$ref": "#/$defs/Size"}, "2", "2"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/a~1b~0c"}, "5", 5),
        ({"oneOf": [{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Size"}]}, "1", "1"),
        ({"oneOf": [{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Size"}]}, "{'x': 1}", {"x": 1}),
        ({"oneOf": [WORD, WORD, {"type": "integer"}]}, "5", 5),
        ({"allOf": [WORD, {"maxLength": 2}]}, "12", "12"),
        ({"anyOf": [{**WORD, "maxLength": 2}, {"type": "integer"}]}, "123", 123),
        ({"anyOf": [{**WORD, "minLength": 2}, {"type": "integer"}]}, "1", 1),
        ({"anyOf": [{**WORD, "pattern": "^[a-z]+$"}, {"type": "integer"}]}, "1", 1),
        ({"anyOf": [{**WORD, "pattern": "^[a-z]+$"}, {"type": "integer"}]}, "a", "a"),
        ({"not": WORD}, "5", 5),
        ({"if": WORD, "then": False}, "5", 5),
        ({}, "5", "5"),
        (True, "5", "5"),
        (False, "5", 5),
        ({"$ref": "https://example.org/schema"}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "#/properties/key/allOf/0", "allOf": [{"type": "integer"}]}, "5", 5),
        ({"$ref": f"#/properties/key/allOf/{'9' * 5000}", "allOf": [True]}, "5", "5"),
        ({**WORD, "pattern": r"(?=look)(ahead)\1"}, "5", "5"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[1, b'x']", "[1, b'x']"),
        ({"type": "object"}, "{1: 2}", {"1": 2}),
        ({"type": "integer"}, "__import__('os')", "__import__('os')"),
        ({"minLength": "x", "enum": 5, "anyOf": 5, "properties": 5, "type": 5}, "5", 5),
    ],
)
def test_read_argument_converts_by_schema(schema, text, want):
    got = value_of(schema, text)
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        ({"type": "object"}, "5"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, 5),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"key": {"type": "integer"}}}}}, 5),
        ({"properties": [], "additionalProperties": {"$ref": "#"}, "type": "object"}, 5),
    ],
)
def test_read_argument_of_unnamed_parameter_uses_additional_properties(schema, want):
    assert read_argument("5", "key", ParameterSchemas(schema)) == want


TEXTS = st.sampled_from(
    ["null", "None", "true", "True", "1", "-2.50", "1e5", "[]", "['a', 1]", '["a"]', "{'k': None}"]
    + ['{"k": 1}', '"a"', "'a'", "a", "ab", "", " 1 ", "1_000", "(1,)", "[1", "\\d", '"\\ud800"']
)
SCALARS = st.sampled_from(["a", "1", "null", "True", "ab", 1, 2, None, True, ["a"], "[]"])
SCHEMAS = st.recursive(
    st.sampled_from(
        [True, False, {}, {"$ref": "#/$defs/Chain"}, {"$ref": "#/$defs/Size"}]
        + [{"$ref": "#/$defs/Point"}, {"pattern": "^[a-z]+$"}, {"pattern": "1"}]
        + [{"minLength": 2}, {"maxLength": 1}]
    )
    | st.builds(
        lambda kind: {"type": kind},
        st.sampled_from(["string", "null", "integer", "number", "boolean", "array", "object"]),
    )
    | st.builds(
        lambda kinds: {"type": kinds},
        st.lists(
            st.sampled_from(["string", "null", "integer", "boolean", "array", "object"]),
            min_size=1,
            unique=True,
        ),
    )
    | st.builds(lambda listed: {"enum": listed}, st.lists(SCALARS, min_size=1, max_size=3))
    | st.builds(lambda value: {"const": value}, SCALARS),
    lambda inner: (
        st.builds(
            lambda key, parts: {key: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        )
        | st.builds(lambda part: {"not": part}, inner)
        | st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner)
        | st.builds(lambda part: {"$ref": "#/$defs/Chain", "anyOf": [part]}, inner)
    ),
    max_leaves=5,
)


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(document(schema)).is_valid({"key": value})


def readings(text: str) -> list[Any]:
    """Returns all values that a text may represent."""
    found: list[Any] = [text]
    for word in (text, text.replace("'", '"').replace("None", "null").replace("True", "true")):
        with contextlib.suppress(ValueError):
            found.append(from_json(word))
    return found


@given(SCHEMAS, TEXTS | st.text(max_size=4))
@settings(deadline=None, max_examples=400)
def test_read_argument_valid_if_any_reading_is_valid(schema, text):
    value = value_of(schema, text)
    if any(is_valid(schema, reading) for reading in readings(text)):
        assert is_valid(schema, value)
    if is_valid(schema, text):
        assert value == (None if text == "null" and is_valid(schema, None) else text)
    assert json.loads(to_json(value)) == value


UNQUOTED = ("qwen3_coder", "glm45", "minimax_m2")
"""Formats without types: values are converted by the schema."""


def written(name: str, key: str, text: str) -> str:
    """Returns a call of a one-parameter function in a tool call format."""
    value: Any = text
    if name not in UNQUOTED:
        with contextlib.suppress(ValueError):
            value = from_json(text)
    return FORMATS[name].write([("f", {key: value})])


@pytest.mark.parametrize("name", FORMATS)
@given(SCHEMAS, TEXTS, st.data())
@settings(deadline=None, max_examples=100)
def test_tool_call_arguments_valid_for_any_chunking(name, schema, text, data):
    tools = {"f": document(schema)}
    whole = written(name, "key", text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    for parts in (pieces, [whole], list(whole)):
        parser = new_parser(name, OutputBuilder(tools, None, False), None)
        parsed = sum(map(parser.push, parts), Delta()) + parser.flush(was_cut=False)
        (call,) = parsed.tool_calls
        value = json.loads(call.arguments)["key"]
        assert (call.name, parsed.text) == ("f", "")
        taken = readings(text) if name in UNQUOTED else [value]
        if any(is_valid(schema, reading) for reading in taken):
            assert is_valid(schema, value)


def test_pythonic_writer_escapes_lone_surrogates():
    """Python does not parse a text with a lone surrogate."""
    assert FORMATS["pythonic"].write([("f", {"key": "a\ud800é"})]) == r'[f(key="a\ud800é")]'


def nested(depth: int) -> Any:
    schema: Any = {"type": "string", "maxLength": 0}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


def doubled(depth: int) -> dict[str, Any]:
    """Returns a schema with 2 ** depth validation steps."""
    both = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(depth)}
    return {"properties": {"key": {"$ref": "#/$defs/L0"}}, "$defs": {**both, f"L{depth}": False}}


SLOW = "^([ab]*a[ab]{5000}c|x)*$"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (doubled(25), "5"),
        (document({"$ref": "#/$defs/Loop"}), "5"),
        ({"$ref": "#"}, "5"),
        (document({"enum": ["a"] * 100_000}), "5"),
        (document({"not": {"$ref": "#/$defs/Loop"}}), "5"),
        (
            document({"type": "integer", "allOf": [{"pattern": SLOW + "|" * i} for i in range(9)]}),
            "5",
        ),
    ],
)
def test_read_argument_of_expensive_schema_returns_json(schema, text):
    """Above the work limit the schema decides nothing, and the value is parsed as JSON."""
    begin = time.perf_counter()
    want = "5" if schema == {"$ref": "#"} else 5
    assert read_argument(text, "key", ParameterSchemas(schema)) == want
    assert time.perf_counter() - begin < 3


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**WORD, "pattern": r"^(a+)+$"}, "a" * 200 + "!"),
        ({**WORD, "pattern": r"^(a|a)*$"}, "a" * 50_000 + "!"),
        ({**WORD, "pattern": SLOW}, "a" * 50_000 + "!"),
        ({"type": "array"}, "[" * 100_000),
        ({"type": "array"}, "[" * 5_000 + "]" * 5_000),
        ({"type": "integer"}, "-" * 30_000 + "1"),
        ({"type": "integer"}, "1" * 30_000),
        ({"type": "integer"}, "1+" * 15_000 + "1"),
        ({"type": "array"}, "[" + "1," * 500_000 + "x"),
        (nested(12), "a"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_read_argument_of_expensive_text_returns_text(schema, text):
    begin = time.perf_counter()
    assert value_of(schema, text) == text
    assert time.perf_counter() - begin < 3


def test_read_argument_opens_no_socket_and_warns_nothing(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value_of({"$ref": "http://127.0.0.1:9/schema.json"}, "5") == "5"
        assert value_of({"type": "array"}, r"['\d']") == [r"\d"]


def test_to_json_escapes_lone_surrogate():
    assert to_json(value_of({"type": "array"}, '["\\ud800é"]')) == '["\\ud800\\u00e9"]'
