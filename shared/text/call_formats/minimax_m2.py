"""`<invoke>` and `<parameter>` in `<minimax:tool_call>`: MiniMax M2."""

from __future__ import annotations

from shared.text.call_formats.section_calls import SectionTags
from shared.text.call_formats.typed_parameters import ParameterTags

_CALLS, _CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = SectionTags(
    begin=_CALLS,
    end=_CALLS_END,
    call='<invoke name="',
    after_name=('">',),
    call_end="</invoke>",
    parameters=ParameterTags(
        begin='<parameter name="',
        after_key='">',
        end="</parameter>",
        separator="\n",
        are_lines_optional=True,
    ),
)

FORMAT = _TAGS.call_format(
    "minimax_m2", "<invoke> and <parameter> in <minimax:tool_call>", (_CALLS, _CALLS_END)
)
