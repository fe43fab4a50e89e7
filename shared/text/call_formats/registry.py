"""Registry of tool-call formats: a new format adds its module here, and its name to `names`."""

from __future__ import annotations

from collections.abc import Mapping

from shared.text.call_formats import (
    cohere,
    deepseek_v3,
    deepseek_v4,
    deepseek_v31,
    deepseek_v32,
    functiongemma,
    gemma4,
    glm45,
    granite,
    harmony,
    hermes,
    hy3,
    kimi_k2,
    kimi_k3,
    llama3,
    minimax_m2,
    mistral,
    nemotron,
    phi4,
    pythonic,
    qwen3_coder,
)
from shared.text.call_formats.call_format import CallFormat
from shared.text.reasoning_formats import REASONING_FORMATS

_MODULES = (
    *(hermes, qwen3_coder, llama3, pythonic, mistral, glm45, granite, phi4),
    *(deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, kimi_k2, kimi_k3, minimax_m2),
    *(harmony, gemma4, functiongemma, nemotron, hy3, cohere),
)

FORMATS: Mapping[str, CallFormat] = {module.FORMAT.name: module.FORMAT for module in _MODULES}
"""Formats by their name, the value of `--tool-call-parser`."""


def marks_of(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """Returns the delimiters that the parsers of a server read; none without a parser."""
    of_calls = () if tool_call_parser is None else FORMATS[tool_call_parser].marks
    of_reasoning = () if reasoning_parser is None else REASONING_FORMATS[reasoning_parser].marks
    return tuple(dict.fromkeys(of_calls + of_reasoning))
