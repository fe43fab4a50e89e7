"""Tool-call parsers, one for each format.

A parser receives one character at a time, so its output does not depend on chunk borders. It
emits output as soon as it is certain. Text that turns out to be no call is content.

A JSON call begins once its name and the start of its arguments are read. If it breaks off later,
the arguments end there and the rest is text. An XML-style call is emitted when it is complete,
because its arguments are JSON only then; if it breaks off, all of it is text. A partial tag right
after a complete call is dropped if `max_tokens` cut it: see `OutputBuilder.add_partial_tag`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shared.server.parsing.arguments import argument_json, to_json
from shared.server.parsing.json_tool_call import read_json_call
from shared.server.parsing.output_parser import (
    OutputBuilder,
    ParserStep,
    ReadAll,
    ReadCall,
    TextCursor,
)
from shared.server.parsing.text_schema import ParameterSchemas
from shared.text.delimiters import (
    CALL,
    CALL_END,
    FUNCTION_END,
    PARAMETER_END,
    PYTHON_TAG,
    THINK_END,
)

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_HEADER = re.compile(
    r"\s*(<tool_call>\s*)?(<function=[^<>\n]+>\s*(<parameter=[^<>\n]+>\s*|<[^<>\n]*)?|<[^<>\n]*)?"
)


def read_tagged(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
    """Parses `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes, Qwen)."""
    while lead := (yield from source.up_to((CALL,), output)):
        yield from _read_tagged_call(source, output, lead)


def _read_tagged_call(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    if (yield from read_json_call(source, output, lead)):
        yield from source.close(CALL_END, output)
        return True
    return False


def read_bare(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
    """Parses `{"name": ..., "parameters": ...}` (Llama 3): the whole text, or several after `;`."""
    lead = yield from source.skip_space()
    if (yield from source.expect(PYTHON_TAG)):
        lead += PYTHON_TAG
    while (yield from read_json_call(source, output, lead)):
        lead = yield from source.skip_space()
        if not (yield from source.expect(";")):
            break
        lead += ";"
    yield from source.rest(output)


def read_elements(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
    """Parses `<tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call>`.

    Qwen3 Coder and Qwen3.5 write this format.

    Models omit tags. A call may begin with `<function=NAME>`, and a missing closing tag of a value
    or a call is inferred from a later tag. A grammar allows neither, so with constrained calls only
    the tags that the grammar requires are recognised.
    """
    tags = (CALL,) if output.are_calls_constrained else (CALL, _FUNCTION)
    while lead := (yield from source.up_to(tags, output)):
        yield from _read_function(source, output, lead)


def _read_function(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    if lead.endswith(_FUNCTION):
        lead = lead.removesuffix(_FUNCTION)
        source.put_back(_FUNCTION)
    source.record()
    name = yield from _read_tag(source, _FUNCTION)
    if name and output.allows_call(name):
        arguments = yield from _read_arguments(source, output, output.tools[name])
        if arguments is not None:
            output.begin(name)
            output.add_arguments(arguments)
            output.end_call()
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
        text = (yield from _read_value(source, output, missing)) if key else None
        if text is None:
            return None
        entries.append(f"{to_json(key)}: {argument_json(text, key, schemas)}")
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
    source: TextCursor, output: OutputBuilder, missing: Collection[str]
) -> ParserStep[str | None]:
    """Reads the text of a parameter; returns None if it has no end.

    A value within the reasoning ends with the reasoning; the call is then no call.

    Args:
      source: Reads the text.
      output: Reports if the text is reasoning.
      missing: Parameters without a value so far; the opening tag of one ends this value.
    """
    openings = tuple(f"{_PARAMETER}{key}>" for key in missing)
    value = tag = ""
    while not tag and (char := (yield from source.next())):
        value += char
        if char != ">":
            continue
        if value.endswith(PARAMETER_END):
            return _trimmed(value.removesuffix(PARAMETER_END))
        if output.is_thinking and value.endswith(THINK_END):
            source.put_back(THINK_END)
            return None
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


@dataclass(frozen=True)
class CallFormat:
    """Format of tool calls.

    Attributes:
      read: Parses the content.
      read_call: Parses a call after `CALL`, which may also occur within the reasoning; None: the
        format has no tag, so calls within the reasoning are not recognised.
    """

    read: ReadAll
    read_call: ReadCall | None


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(read_tagged, _read_tagged_call),
    "qwen": CallFormat(read_tagged, _read_tagged_call),
    "qwen3_coder": CallFormat(read_elements, _read_function),
    "llama3": CallFormat(read_bare, None),
}
