"""Parser of tool calls written as a JSON object."""

from __future__ import annotations

import re
from typing import Any

from shared.server.parsing.arguments import from_json, to_json
from shared.server.parsing.json_object import JsonObject
from shared.server.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_KEYS = {"name", "arguments", "parameters", "id", "type"}


def read_json_call(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses a tool call written as a JSON object with a name and arguments.

    The arguments are streamed if the name precedes them, as models are trained to write it. Else
    the call is added when the object is complete.

    Args:
      source: Reads the text.
      output: Receives the call, or the text.
      lead: Text before the object; added as text if there is no call.

    Returns:
      True if there was a call. Other text is added as text, or put back into `source`.
    """
    scan, held = JsonObject(), lead + (yield from source.skip_space())
    has_begun = is_arguing = False
    while not scan.ended:
        char = yield from source.next()
        if not char and not has_begun and scan.depth < 2:
            output.add_partial_tag(held)
            return False
        if not char or not scan.take(char):
            source.put_back(char)
            source.give_up(held, output)
            return False
        opens = not has_begun and char == "{" and scan.depth == 2
        if opens and _begin(held.removeprefix(lead), output):
            has_begun, is_arguing, held = True, True, ""
        if is_arguing:
            output.add_arguments(char)
            is_arguing = scan.depth > 1
            if not is_arguing:
                output.end_call()
        else:
            held += char
    if has_begun and held.strip() == "}":
        return True
    if not has_begun and _add_whole_call(held.removeprefix(lead), output):
        return True
    output.add_text(held)
    return has_begun


def _begin(header: str, output: OutputBuilder) -> bool:
    """Starts a call if the header is complete and the function may be called."""
    parts = _HEADER.fullmatch(header)
    if not parts or not output.allows_call(parts[1]):
        return False
    output.begin(parts[1])
    return True


def _add_whole_call(text: str, output: OutputBuilder) -> bool:
    """Adds the call of a complete object; returns False if the object is not a call."""
    call = read_object(text)
    if call is None:  # nested too deeply
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI writes it
        arguments = read_object(arguments)
    if not (
        call.keys() <= _KEYS
        and output.allows_call(call.get("name"))
        and isinstance(arguments, dict)
    ):
        return False
    output.begin(call["name"])
    output.add_arguments(to_json(arguments))
    output.end_call()
    return True


def read_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object of a text; None if the text is not one."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
