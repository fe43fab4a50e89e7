"""Incremental parsers of generated text: reasoning, tool calls, JSON."""
