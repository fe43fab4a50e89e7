"""`call:NAME{...}` in `<start_function_call>`: FunctionGemma, which is a Gemma 3 model."""

from __future__ import annotations

from shared.text.call_formats.call_format import CallFormat
from shared.text.call_formats.gemma_calls import GemmaTags

_TAGS = GemmaTags("<start_function_call>", "<end_function_call>", "<escape>")

FORMAT = CallFormat(
    name="functiongemma",
    description="call:NAME{...} in <start_function_call>",
    markers=(_TAGS.begin,),
    openings=(_TAGS.begin,),
    marks=(_TAGS.begin, _TAGS.end, _TAGS.quote),
    read_calls=_TAGS.read_calls,
    rules=_TAGS.rules,
    separator="",
    write=_TAGS.write,
)
