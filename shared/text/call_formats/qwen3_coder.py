"""XML elements in `<tool_call>`: Qwen3 Coder, Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    CallFormat,
    any_of,
)
from shared.text.call_formats.typed_parameters import ParameterTags, parameter_rules
from shared.text.delimiters import CALL, CALL_END
from shared.text.grammar_source import literal
from shared.text.parsing import arguments as values
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor
from shared.text.parsing.text_schema import ParameterSchemas

FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_HEADER = re.compile(
    r"\s*(<tool_call>\s*)?(<function=[^<>\n]+>\s*(<parameter=[^<>\n]+>\s*|<[^<>\n]*)?|<[^<>\n]*)?"
)
_TAGS = ParameterTags(
    begin=_PARAMETER, after_key=">\n", before_end="\n", end=PARAMETER_END, separator="\n"
)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses one function.

    Models omit tags. A call may begin with `<function=NAME>`, and a missing closing tag of a value
    or a call is inferred from a later tag. A grammar allows neither, so with constrained calls only
    the tags that the grammar requires are recognised.
    """
    if lead.endswith(_FUNCTION):
        lead = lead.removesuffix(_FUNCTION)
        source.put_back(_FUNCTION)
    source.record()
    name = yield from _read_tag(source, _FUNCTION)
    if name and output.allows_call(name):
        arguments = yield from _read_arguments(source, output, output.tools[name])
        if arguments is not None:
            output.add_whole_call(name, arguments)
            yield from source.close(CALL_END, output)
            return True
    text = lead + source.recorded()
    if source.ended and _HEADER.fullmatch(text):
        output.add_partial_tag(text)
    else:
        source.give_up(text, output)
    return False


def _read_arguments(
    source: TextCursor, output: OutputBuilder, schema: dict[str, Any]
) -> ParserStep[str | None]:
    """Returns the arguments as JSON; None if the list of parameters is not complete."""
    schemas = ParameterSchemas(schema)
    entries: list[str] = []
    missing = set(schemas.properties)
    while (key := (yield from _read_tag(source, _PARAMETER))) is not None:
        missing.discard(key)
        text = (yield from _read_value(source, output, missing, key, schemas)) if key else None
        if text is None:
            return None
        entries.append(f"{values.to_json(key)}: {values.argument_json(text, key, schemas)}")
    is_whole = (yield from source.expect(FUNCTION_END)) or (yield from source.expect(CALL_END))
    return f"{{{', '.join(entries)}}}" if is_whole else None


def _read_tag(source: TextCursor, opening: str) -> ParserStep[str | None]:
    """Reads the name in a tag such as `<function=NAME>`; "" if the tag is invalid.

    Reads nothing and returns None if other text follows.
    """
    if not (yield from source.expect(opening)):
        return None
    name = ""
    while (char := (yield from source.next())) != ">":
        if not char or char in "<\n":
            source.put_back(char)
            return ""
        name += char
    return name


def _read_value(
    source: TextCursor,
    output: OutputBuilder,
    missing: Collection[str],
    key: str,
    schemas: ParameterSchemas,
) -> ParserStep[str | None]:
    """Reads the text of a parameter; returns None if it has no end.

    A value within the reasoning ends with the reasoning; the call is then no call.

    Args:
      source: Reads the text.
      output: Reports if the text is reasoning.
      missing: Parameters without a value so far; the opening tag of one ends this value.
      key, schemas: Parameter and its schema; a closing tag within a string of JSON ends no value.
    """
    openings = tuple(f"{_PARAMETER}{key}>" for key in missing)
    value = tag = ""
    while not tag and (char := (yield from source.next())):
        value += char
        if output.is_thinking and value.endswith(output.reasoning_end):
            source.put_back(output.reasoning_end)
            return None
        if char != ">":
            continue
        if value.endswith(PARAMETER_END):
            whole = _trimmed(value.removesuffix(PARAMETER_END))
            if not output.are_calls_constrained or values.is_whole(whole, key, schemas):
                return whole
        if not output.are_calls_constrained:
            tag = yield from _later_tag(source, value, openings)
    source.put_back(tag)
    return _trimmed(value.removesuffix(tag)) if tag else None


def _later_tag(source: TextCursor, value: str, openings: tuple[str, ...]) -> ParserStep[str]:
    """Returns the tag at the end of a value that shows that the value's closing tag is missing.

    A value may mention closing tags, so a tag counts only if the next tag confirms the call's end.
    """
    if value.endswith(openings):
        return next(opening for opening in openings if value.endswith(opening))
    for tag, followers in ((FUNCTION_END, (CALL_END, CALL, _FUNCTION)), (CALL_END, (CALL,))):
        if value.endswith(tag) and (yield from _comes_next(source, followers)):
            return tag
    return ""


def _comes_next(source: TextCursor, tags: tuple[str, ...]) -> ParserStep[bool]:
    """Returns True if one of the tags or the end of the text follows; reads nothing."""
    for tag in tags:
        if text := (yield from source.expect(tag)):
            source.put_back(text)
            return True
    space = yield from source.skip_space()
    char = yield from source.next()
    source.put_back(space + char)
    return not char


def _trimmed(value: str) -> str:
    """Removes the line breaks next to the tags of a value."""
    return value.removeprefix("\n").removesuffix("\n")


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a call after its opening tag."""
    inner = f"inner: {literal(chr(10))} ({any_of('f', tools)}) {literal(chr(10) + CALL_END)}"
    made = [inner]
    for number, tool in enumerate(tools):
        begin, end = literal(f"{_FUNCTION}{tool.name}>\n"), literal(FUNCTION_END)
        made.append(f"f_{number}: {begin} p_{number} {end}")
    return made + parameter_rules(tools, _TAGS)


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return "\n".join(map(_written, calls))


def _written(call: Call) -> str:
    name, arguments = call
    parameters = "".join(_TAGS.write(key, value) for key, value in arguments.items())
    return f"{CALL}\n{_FUNCTION}{name}>\n{parameters}{FUNCTION_END}\n{CALL_END}"


FORMAT = CallFormat(
    name="qwen3_coder",
    description="XML elements in <tool_call>",
    markers=(CALL, _FUNCTION),
    openings=(CALL,),
    loose_openings=(_FUNCTION,),
    marks=(CALL, CALL_END, FUNCTION_END, PARAMETER_END),
    read_calls=read_calls,
    rules=rules,
    separator=r"\n{0,2}",
    write=write,
)
