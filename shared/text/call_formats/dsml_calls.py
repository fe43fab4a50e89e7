"""Calls in DeepSeek's markup language, DSML: parameters with an attribute for strings."""

from __future__ import annotations

from shared.text.call_formats.call_format import CallFormat
from shared.text.call_formats.section_calls import SectionTags
from shared.text.call_formats.typed_parameters import KindAttribute, ParameterTags

_MARK = "｜DSML｜"


def dsml_format(name: str, section: str) -> CallFormat:
    """Returns a format by its name and that of the element with all calls."""
    tags = SectionTags(
        begin=f"<{_MARK}{section}>",
        end=f"</{_MARK}{section}>",
        call=f'<{_MARK}invoke name="',
        after_name=('">',),
        call_end=f"</{_MARK}invoke>",
        parameters=ParameterTags(
            begin=f'<{_MARK}parameter name="',
            kind=KindAttribute(begin='" string="', text="true", others=("false",), end='">'),
            end=f"</{_MARK}parameter>",
            separator="\n",
            are_lines_optional=True,
        ),
    )
    return tags.call_format(name, f"invoke and parameter in <{_MARK}{section}>", (_MARK,))
