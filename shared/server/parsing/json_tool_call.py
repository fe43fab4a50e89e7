"""Parser of tool calls written as a JSON object."""

from __future__ import annotations

import re
from typing import Any

from shared.server.parsing.arguments import from_json, to_json
from shared.server.parsing.json_object import JsonObject
from shared.server.parsing.output_parser import ParserStep, Said, TextCursor

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_KEYS = {"name", "arguments", "parameters", "id", "type"}


def read_json_call(source: TextCursor, said: Said, lead: str) -> ParserStep[bool]:
    """Reads a call as a JSON object of a name and arguments.

    The arguments are said while they are read where the name stands before them, as models are
    taught, and else when the object is whole.

    Args:
      lead: What stands before it; said as text where there is no call.

    Returns:
      Whether there was one. All that is not of it is said as text, or left to be read.
    """
    scan, held = JsonObject(), lead + (yield from source.skip_space())
    has_begun = is_arguing = False
    while not scan.ended:
        char = yield from source.next()
        if not char and not has_begun and scan.depth < 2:
            said.leave(held)
            return False
        if not char or not scan.take(char):
            source.put_back(char)
            source.give_up(held, said)
            return False
        opens = not has_begun and char == "{" and scan.depth == 2
        if opens and _begin(held.removeprefix(lead), said):
            has_begun, is_arguing, held = True, True, ""
        if is_arguing:
            said.add_arguments(char)
            is_arguing = scan.depth > 1
            if not is_arguing:
                said.end_call()
        else:
            held += char
    if has_begun and held.strip() == "}":
        return True
    if not has_begun and _say_whole(held.removeprefix(lead), said):
        return True
    said.add_text(held)
    return has_begun


def _begin(header: str, said: Said) -> bool:
    """Begins a call whose arguments come next, if there is one."""
    parts = _HEADER.fullmatch(header)
    if not parts or not said.takes(parts[1]):
        return False
    said.begin(parts[1])
    return True


def _say_whole(text: str, said: Said) -> bool:
    """Says the call that an object is, if it is one."""
    call = read_object(text)
    if call is None:  # nested too deeply
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI writes it
        arguments = read_object(arguments)
    if not (call.keys() <= _KEYS and said.takes(call.get("name")) and isinstance(arguments, dict)):
        return False
    said.begin(call["name"])
    said.add_arguments(to_json(arguments))
    said.end_call()
    return True


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
