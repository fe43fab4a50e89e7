"""Delimiters of tool calls and reasoning in model output.

A tokenizer may have a delimiter as one token, special or not. Either way the output contains its
text: the parser finds it there, and a grammar that requires the text allows the token.
"""

from __future__ import annotations

from collections.abc import Mapping

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
THINK, THINK_END = "<think>", "</think>"

_OF_CALLS: Mapping[str, tuple[str, ...]] = {
    "hermes": (CALL, CALL_END),
    "qwen": (CALL, CALL_END),
    "qwen3_coder": (CALL, CALL_END, FUNCTION_END, PARAMETER_END),
    "llama3": (PYTHON_TAG,),
}


def marks_of(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """Returns the delimiters that the parsers of a server read; none without a parser."""
    of_calls = () if tool_call_parser is None else _OF_CALLS[tool_call_parser]
    return (*of_calls, *(() if reasoning_parser is None else (THINK, THINK_END)))
