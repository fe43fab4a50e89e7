"""Elements with `<|open|>` and `<|close|>`, one for each argument: Kimi K3."""

from __future__ import annotations

from shared.text.call_formats.section_calls import SectionTags
from shared.text.call_formats.typed_parameters import KindAttribute, ParameterTags
from shared.text.delimiters import CLOSE, OPEN, SEPARATOR

_TYPES = ("number", "boolean", "null", "object", "array")
_TAGS = SectionTags(
    begin=f"{OPEN}tools{SEPARATOR}",
    end=f"{CLOSE}tools{SEPARATOR}",
    call=f'{OPEN}call tool="',
    after_name=('" index="', f'"{SEPARATOR}'),
    call_end=f"{CLOSE}call{SEPARATOR}",
    parameters=ParameterTags(
        begin=f'{OPEN}argument key="',
        kind=KindAttribute(begin='" type="', text="string", others=_TYPES, end=f'"{SEPARATOR}'),
        end=f"{CLOSE}argument{SEPARATOR}",
        separator="",
    ),
    line="",
)

FORMAT = _TAGS.call_format(
    "kimi_k3", f"call and argument in {_TAGS.begin}", (OPEN, CLOSE, SEPARATOR)
)
