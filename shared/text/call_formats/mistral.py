"""`[TOOL_CALLS]` with a JSON list, or with a name and `[ARGS]`: Mistral, Devstral, Magistral."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.json_calls import (
    function_rules,
    list_rule,
    read_call_list,
    written_list,
)
from shared.text.call_formats.named_calls import NameTags, read_named_call
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_TAGS = NameTags(begin="", after_name=_ARGS, end="")
_ID_LENGTH = 9
_ID = f"/[a-zA-Z0-9]{{{_ID_LENGTH}}}/"


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses a list of calls, or the name and the arguments of one."""
    space = yield from source.skip_space()
    char = yield from source.next()
    source.put_back(space + char)
    if char == "[":
        return (yield from read_call_list(source, output, lead))
    return (yield from read_named_call(source, output, lead, _TAGS, _split))


def _split(text: str) -> tuple[str, str]:
    name, _, call_id = text.partition(_CALL_ID)
    return name.strip(), call_id


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of both forms; a model writes the one that its training has."""
    return [
        f'inner: " "? list | {any_of("n", tools)}',
        list_rule(tools, many),
        f'id: ", \\"id\\": \\"" {_ID} "\\""',
        f'call_id: "{_CALL_ID}" {_ID}',
        *function_rules(tools, "arguments", "id?"),
        *_TAGS.name_rules(tools, "call_id?"),
    ]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return _CALLS + written_list(calls)


def new_id() -> str:
    """Returns an id as the chat templates require it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


FORMAT = CallFormat(
    name="mistral",
    description="JSON list or a name and [ARGS] after [TOOL_CALLS]",
    markers=(_CALLS,),
    openings=(_CALLS,),
    marks=(_CALLS, _CALL_ID, _ARGS),
    read_calls=read_calls,
    rules=rules,
    separator="",
    write=write,
    new_id=new_id,
)
