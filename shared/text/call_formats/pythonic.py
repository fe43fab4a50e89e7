"""A list of Python calls as the whole output: Llama 3.2, Llama 4, ToolACE."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from typing import Any

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    CallFormat,
    any_of,
    object_schema,
)
from shared.text.call_formats.literal_rules import LiteralRules, Notation, common_rules
from shared.text.delimiters import PYTHON_TAG
from shared.text.grammar_source import InvalidGrammarError, literal
from shared.text.json_schema_refs import resolve_ref
from shared.text.parsing import arguments as values
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_START, _END = "<|python_start|>", "<|python_end|>"
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}
_JSON_ESCAPES = r"/\"([^\"\\\x00-\x1f\x7f]|\\[\"\\nrtbf])*\"/"


def _written_string(value: str) -> str:
    """Returns a string with the escapes that Python and JSON have in common.

    Lone surrogates are escaped, because Python parses no text that contains them.
    """
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


_NOTATION = Notation(
    constants={True: "True", False: "False", None: "None"},
    string=_JSON_ESCAPES,
    write_string=_written_string,
    write_key=lambda key: f"{_written_string(key)}: ",
    key=f'{_JSON_ESCAPES} ": "',
    separator=", ",
)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses `[name(key=value, ...), ...]` at the beginning of the output."""
    lead += yield from source.skip_space()
    for tag in (_START, PYTHON_TAG):
        lead += yield from source.expect(tag)
    source.record()
    text = yield from _read_list(source)
    calls = None if text is None else _calls_of(text)
    if calls and all(output.allows_call(name) for name, _ in calls):
        source.recorded()
        left = calls if output.max_calls is None else calls[: output.max_calls]
        for name, arguments in left:
            output.add_whole_call(name, values.to_json(arguments))
        if len(left) == len(calls):
            yield from source.close(_END, output)
        else:
            output.add_text(text or "")
        return True
    source.give_up(lead + source.recorded(), output)
    return False


def _read_list(source: TextCursor) -> ParserStep[str | None]:
    """Reads a list up to its closing bracket; None if the text is not a complete list."""
    text, expected, quote = "", [], ""
    while len(text) < values.MAX_LITERAL and (char := (yield from source.next())):
        text += char
        if quote:
            if char == "\\":
                text += yield from source.next()
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _CLOSING:
            expected.append(_CLOSING[char])
        elif expected and char == expected[-1]:
            expected.pop()
        if text[0] != "[" or (not quote and char in ")]}" and not expected):
            break
    return text if text and not expected and not quote and text[-1] == "]" else None


def _calls_of(text: str) -> list[Call] | None:
    """Returns the calls of a list; None if it is not a list of calls with keyword arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escape sequences
            tree = ast.parse(text, mode="eval").body
            return list(map(_call_of, tree.elts)) if isinstance(tree, ast.List) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _call_of(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {each.arg or "": _value_of(each.value) for each in node.keywords}
    if "" in arguments:
        raise ValueError("an argument has no name")
    return ast.unparse(node.func), values.from_json(values.to_json(arguments))


def _value_of(node: ast.expr) -> Any:
    """Returns the value of a literal; JSON's constants are literals as well."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return list(map(_value_of, items))
        case ast.Dict(keys=keys, values=entries) if None not in keys:
            pairs = zip(keys, entries, strict=True)
            return {ast.literal_eval(key): _value_of(x) for key, x in pairs if key is not None}
        case _:
            return ast.literal_eval(node)


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the whole output: a list of calls."""
    more = ' (", " call)*' if many else ""
    made = [f'calls: "[" call{more} "]"', f"call: {any_of('f', tools)}", *common_rules(_NOTATION)]
    for number, tool in enumerate(tools):
        schema = object_schema(tool)
        written = LiteralRules(_NOTATION, schema, f"v_{number}")
        parameters = _any_parameters()
        if tool.schema is not None:
            whole = resolve_ref(schema, schema)
            if not all(key.isidentifier() for key in whole.get("properties", {})):
                reason = "has a parameter name that is not an identifier"
                raise InvalidGrammarError(f"the function {tool.name} {reason}, as Python requires")
            parameters = written.entries(whole, lambda key: f"{key}=")
        made += [f'f_{number}: {literal(tool.name + "(")} {parameters} ")"', *written.rules]
    return made


def _any_parameters() -> str:
    parameter = '/[a-zA-Z_][a-zA-Z0-9_]*/ "=" any_value'
    return f'({parameter} (", " {parameter})*)?'


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return f"[{', '.join(map(_written, calls))}]"


def _written(call: Call) -> str:
    name, arguments = call
    return f"{name}({_NOTATION.entries(arguments, lambda key: f'{key}=')})"


FORMAT = CallFormat(
    name="pythonic",
    description="a list of Python calls",
    marks=(_START, _END, PYTHON_TAG),
    read_calls=read_calls,
    rules=rules,
    other_text="other_text: OTHER_TEXT\n"
    r"OTHER_TEXT: /[^\[<\s](.|\n)*/",
    write=write,
)
