"""Completions: from a parsed request to the response, streamed or whole."""
