"""JSON in messages to functions, next to messages in channels: gpt-oss.

An output is a list of messages. A header has the channel of its message and the recipient of a
call: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`. The recipient may
precede the channel. The chat template writes the beginning of the first header, up to the role.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    CallFormat,
    any_of,
    to_json,
)
from shared.text.call_formats.json_calls import argument_rules, read_json_arguments
from shared.text.delimiters import CHANNEL_MARKS
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN = CHANNEL_MARKS
_TO, _NAMESPACE, _ROLE = "to=", "functions.", "assistant"
_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*)?(?:(?!to=)\w+)?\s*(?:to=(?P<before>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w+))?\s*(?:to=(?P<after>[^\s<]+))?\s*"
    r"(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
_ROLE_TAG = re.compile(r"\s*<\|start\|>\s*(?!to=)\w*")
_BEGINNINGS = (_START, _CHANNEL, _TO, _MESSAGE)
_ENDS = (_END, _CALL, _RETURN, _START, _CHANNEL)
MAX_HEADER = 512  # characters
SEPARATOR = "\n\n"
"""Text between two messages that both are content, or both reasoning."""


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses all messages of an output; text without a header is content.

    The text begins within reasoning if `output.is_thinking` is set.
    """
    has_text = {output.is_thinking: True} if output.is_thinking else {}
    if output.is_thinking:
        yield from _read_body(source, output)
    while not (yield from _is_at_end(source)):
        header = yield from _read_header(source, output)
        if not header and (yield from _is_at_end(source)):
            break
        parts = _HEADER.fullmatch(header)
        recipient = parts and (parts["before"] or parts["after"])
        output.is_thinking = bool(parts) and not recipient and parts["channel"] == "analysis"
        if recipient:
            if not (yield from _read_call(source, output, header, recipient)):
                output.note_malformed()
        else:
            output.add_text(SEPARATOR if parts and has_text.get(output.is_thinking) else "")
            output.add_text(header if header and not parts else "")
            has_text[output.is_thinking] = True
        yield from _read_body(source, output)
    return output.num_calls > 0


def _is_at_end(source: TextCursor) -> ParserStep[bool]:
    char = yield from source.next()
    source.put_back(char)
    return not char


def _read_header(source: TextCursor, output: OutputBuilder) -> ParserStep[str]:
    """Returns a header, or its first tag if the rest is no header; "" if other text follows.

    A header at the end of an output that `max_tokens` cut is dropped.
    """
    first = yield from source.expect_any(_BEGINNINGS)
    text = first
    while first and not text.endswith(_MESSAGE) and len(text) < MAX_HEADER:
        char = yield from source.next()
        if not char and output.was_cut:
            return ""
        if not char or char == "\n":
            source.put_back(char)
            break
        text += char
    if _HEADER.fullmatch(text):
        return text
    source.put_back(text.removeprefix(first))
    return first


def _read_call(
    source: TextCursor, output: OutputBuilder, header: str, recipient: str
) -> ParserStep[bool]:
    """Parses the arguments of a call; without them the header is content."""
    name, space = recipient.removeprefix(_NAMESPACE), (yield from source.skip_space())
    char = yield from source.next()
    source.put_back(char)
    if char == "{" and output.allows_call(name):
        return (yield from read_json_arguments(source, output, name))
    source.put_back(space)
    if char or not output.was_cut:
        output.add_text(_ROLE_TAG.sub("", header))
    return False


def _read_body(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
    """Adds the text of a message up to its end; a tag of the next header is put back."""
    end = (yield from source.up_to(_ENDS, output)).strip()
    if end in (_START, _CHANNEL):
        source.put_back(end)


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the whole output: calls, each with its header.

    Tags and words of a header are lexemes of their own, because other messages share the first
    ones and the library's lexer takes the longest match.
    """
    more = f" ({literal(_CALL)} {literal(_START)} {literal(_ROLE)} call)*" if many else ""
    form = f'" " {literal(_CONSTRAIN)}? "json" {literal(_MESSAGE)}'
    made = [f"calls: call{more}", f"call: {any_of('n', tools)}"]
    channel = f'{literal(_CHANNEL)} "commentary"'
    for number, tool in enumerate(tools):
        to = literal(f" {_TO}{_NAMESPACE}{tool.name}")
        made.append(f"n_{number}: ({channel} {to} | {to} {channel}) {form} a_{number}")
    return made + list(argument_rules(tools))


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return f"{_CALL}{_START}{_ROLE}".join(map(_written, calls))


def _written(call: Call) -> str:
    name, arguments = call
    head = f"{_CHANNEL}commentary {_TO}{_NAMESPACE}{name} {_CONSTRAIN}json{_MESSAGE}"
    return head + to_json(arguments)


FORMAT = CallFormat(
    name="harmony",
    description="JSON in messages to functions.NAME",
    markers=(f"{_CHANNEL}commentary", _CALL),
    marks=CHANNEL_MARKS,
    read_calls=read_calls,
    rules=rules,
    other_text=(
        f'other_text: {literal(_CHANNEL)} "final" {literal(_MESSAGE)} CONTENT\n'
        r"CONTENT: /(.|\n)*/ & ~/(.|\n)*<\|start\|>(.|\n)*/"
    ),
    write=write,
)
