"""`call:NAME{...}` in `<|tool_call>`: Gemma 4."""

from __future__ import annotations

from shared.text.call_formats.call_format import CallFormat
from shared.text.call_formats.gemma_calls import GemmaTags

_TAGS = GemmaTags("<|tool_call>", "<tool_call|>", '<|"|>')

FORMAT = CallFormat(
    name="gemma4",
    description="call:NAME{...} in <|tool_call>",
    markers=(_TAGS.begin,),
    openings=(_TAGS.begin,),
    marks=(_TAGS.begin, _TAGS.end, _TAGS.quote),
    read_calls=_TAGS.read_calls,
    rules=_TAGS.rules,
    separator="",
    write=_TAGS.write,
)
