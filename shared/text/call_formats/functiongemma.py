"""`call:NAME{...}` in `<start_function_call>`: FunctionGemma, which is a Gemma 3 model."""

from __future__ import annotations

from shared.text.call_formats.gemma_calls import GemmaTags

_TAGS = GemmaTags("<start_function_call>", "<end_function_call>", "<escape>")

FORMAT = _TAGS.call_format("functiongemma", "call:NAME{...} in <start_function_call>")
