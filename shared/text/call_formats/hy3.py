"""A name, `<arg_key>` and `<arg_value>` in `<tool_calls>`, with a suffix in each tag: Hunyuan 3."""

from __future__ import annotations

from shared.text.call_formats.section_calls import SectionTags
from shared.text.call_formats.typed_parameters import ParameterTags

_NAMES = ("tool_calls", "/tool_calls", "tool_call", "tool_sep", "/tool_call")
_PARTS = ("arg_key", "/arg_key", "arg_value", "/arg_value")
_MARKS = tuple(f"<{name}:opensource>" for name in (*_NAMES, *_PARTS))
_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END = _MARKS
_TAGS = SectionTags(
    begin=_CALLS,
    end=_CALLS_END,
    call=_CALL,
    after_name=(_SEPARATOR,),
    call_end=_CALL_END,
    parameters=ParameterTags(
        begin=_KEY,
        after_key=f"{_KEY_END}\n{_VALUE}",
        end=_VALUE_END,
        separator="\n",
        are_lines_optional=True,
    ),
)

FORMAT = _TAGS.call_format("hy3", f"{_KEY} and {_VALUE} in {_CALLS}", _MARKS)
