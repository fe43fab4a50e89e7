"""Tool-call parsers, one for each format.

A reader sees one character at a time, so what it says cannot depend on how the text was cut. It
says what is certain as soon as it is, and as text whatever turns out to be no call.

A call in JSON has begun once its name and the beginning of its arguments were read; where it breaks
off behind that, its arguments end there and the rest is text. A call in elements is said when it is
whole, since its arguments are JSON only then; where it breaks off, all of it is text. Half a mark
that `max_tokens` cuts right behind a whole call is dropped, as `Said.leave` says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shared.server.parsing.arguments import argument_json, to_json
from shared.server.parsing.json_tool_call import read_json_call
from shared.server.parsing.output_parser import ParserStep, ReadAll, ReadCall, Said, TextCursor
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


def read_tagged(source: TextCursor, said: Said) -> ParserStep[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of Hermes and Qwen."""
    while lead := (yield from source.up_to((CALL,), said)):
        yield from _read_tagged_call(source, said, lead)


def _read_tagged_call(source: TextCursor, said: Said, lead: str) -> ParserStep[bool]:
    if (yield from read_json_call(source, said, lead)):
        yield from source.close(CALL_END, said)
        return True
    return False


def read_bare(source: TextCursor, said: Said) -> ParserStep[None]:
    """`{"name": ..., "parameters": ...}`, of Llama 3: the whole text, or several behind `;`."""
    lead = yield from source.skip_space()
    if (yield from source.expect(PYTHON_TAG)):
        lead += PYTHON_TAG
    while (yield from read_json_call(source, said, lead)):
        lead = yield from source.skip_space()
        if not (yield from source.expect(";")):
            break
        lead += ";"
    yield from source.rest(said)


def read_elements(source: TextCursor, said: Said) -> ParserStep[None]:
    """`<tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call>`, of Qwen3
    Coder and Qwen3.5.

    Models forget marks. A call may begin with `<function=NAME>`, and a mark that is missing at the
    end of a value or of a call is taken as written where a later one shows it. Where a grammar
    holds the calls, which knows neither, only what it asks for is a mark.
    """
    marks = (CALL,) if said.are_calls_held else (CALL, _FUNCTION)
    while lead := (yield from source.up_to(marks, said)):
        yield from _read_function(source, said, lead)


def _read_function(source: TextCursor, said: Said, lead: str) -> ParserStep[bool]:
    if lead.endswith(_FUNCTION):
        lead = lead.removesuffix(_FUNCTION)
        source.put_back(_FUNCTION)
    source.record()
    name = yield from _read_tag(source, _FUNCTION)
    if name and said.takes(name):
        arguments = yield from _read_arguments(source, said, said.tools[name])
        if arguments is not None:
            said.begin(name)
            said.add_arguments(arguments)
            said.end_call()
            yield from source.close(CALL_END, said)
            return True
    text = lead + source.recorded()
    if source.ended and _HEADER.fullmatch(text):
        said.leave(text)
    else:
        source.give_up(text, said)
    return False


def _read_arguments(
    source: TextCursor, said: Said, schema: dict[str, Any]
) -> ParserStep[str | None]:
    """The arguments as JSON; None where what comes is no list of parameters with an end."""
    schemas = ParameterSchemas(schema)
    entries: list[str] = []
    missing = set(schemas.properties)
    while (key := (yield from _read_tag(source, _PARAMETER))) is not None:
        missing.discard(key)
        text = (yield from _read_value(source, said, missing)) if key else None
        if text is None:
            return None
        entries.append(f"{to_json(key)}: {argument_json(text, key, schemas)}")
    is_whole = (yield from source.expect(FUNCTION_END)) or (yield from source.expect(CALL_END))
    return f"{{{', '.join(entries)}}}" if is_whole else None


def _read_tag(source: TextCursor, opening: str) -> ParserStep[str | None]:
    """The name in a tag such as `<function=NAME>`; "" where the tag is broken.

    Reads nothing and returns None where other text comes next.
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


def _read_value(source: TextCursor, said: Said, missing: Collection[str]) -> ParserStep[str | None]:
    """The text of a parameter; None where it has no end.

    A value within the reasoning does not reach beyond the end of that: it was a draft of a call.

    Args:
      missing: Other parameters that the function has; where one begins, this one has ended.
    """
    openings = tuple(f"{_PARAMETER}{key}>" for key in missing)
    value = mark = ""
    while not mark and (char := (yield from source.next())):
        value += char
        if char != ">":
            continue
        if value.endswith(PARAMETER_END):
            return _trimmed(value.removesuffix(PARAMETER_END))
        if said.is_thinking and value.endswith(THINK_END):
            source.put_back(THINK_END)
            return None
        if not said.are_calls_held:
            mark = yield from _later_mark(source, value, openings)
    source.put_back(mark)
    return _trimmed(value.removesuffix(mark)) if mark else None


def _later_mark(source: TextCursor, value: str, openings: tuple[str, ...]) -> ParserStep[str]:
    """The mark with which a text ends, if it shows that the one of the value's end is missing.

    A text may speak of the marks that end a call, so they count where the call is seen to end.
    """
    if value.endswith(openings):
        return next(opening for opening in openings if value.endswith(opening))
    for mark, behind in ((FUNCTION_END, (CALL_END, CALL, _FUNCTION)), (CALL_END, (CALL,))):
        if value.endswith(mark) and (yield from _comes_next(source, behind)):
            return mark
    return ""


def _comes_next(source: TextCursor, marks: tuple[str, ...]) -> ParserStep[bool]:
    """Returns True if one of the marks comes next, or the end of the text; reads nothing."""
    for mark in marks:
        if text := (yield from source.expect(mark)):
            source.put_back(text)
            return True
    space = yield from source.skip_space()
    char = yield from source.next()
    source.put_back(space + char)
    return not char


def _trimmed(value: str) -> str:
    """A value without the ends of lines that belong to its marks."""
    return value.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    Attributes:
      read: Reads an answer.
      read_call: Reads a call behind `CALL`, which the model may also write before it has closed
        its reasoning; None: the format has no mark that tells a call from such a text.
    """

    read: ReadAll
    read_call: ReadCall | None


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(read_tagged, _read_tagged_call),
    "qwen": CallFormat(read_tagged, _read_tagged_call),
    "qwen3_coder": CallFormat(read_elements, _read_function),
    "llama3": CallFormat(read_bare, None),
}
