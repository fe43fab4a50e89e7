"""`call:NAME{...}` in `<|tool_call>`: Gemma 4."""

from __future__ import annotations

from shared.text.call_formats.gemma_calls import GemmaTags

_TAGS = GemmaTags("<|tool_call>", "<tool_call|>", '<|"|>')

FORMAT = _TAGS.call_format("gemma4", "call:NAME{...} in <|tool_call>")
