"""Delimiters of reasoning and of the most common tool-call formats in model output.

A tokenizer may have a delimiter as one token, special or not. Either way the output contains its
text: the parser finds it there, and a grammar that requires the text allows the token.
"""

from __future__ import annotations

CALL, CALL_END = "<tool_call>", "</tool_call>"
OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
PYTHON_TAG = "<|python_tag|>"
THINK, THINK_END = "<think>", "</think>"
CHANNEL_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Tokens around the messages of gpt-oss and their headers."""
