"""A JSON list after `<|tool_call|>` or `<tool_call>`: Granite 3."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat
from shared.text.call_formats.json_calls import (
    function_rules,
    list_rule,
    read_call_list,
    written_list,
)

_OPENING = "<|tool_call|>"


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a list of calls."""
    return ['inner: " "? list', list_rule(tools, many), *function_rules(tools, "arguments")]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return _OPENING + written_list(calls)


FORMAT = CallFormat(
    name="granite",
    description="JSON list after <|tool_call|>",
    markers=(_OPENING,),
    openings=(_OPENING, "<tool_call>"),
    marks=(_OPENING, "<tool_call>"),
    read_calls=read_call_list,
    rules=rules,
    write=write,
)
