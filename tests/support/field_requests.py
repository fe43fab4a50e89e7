"""Requests with one additional field, for each endpoint."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.http_fixtures import CHAT, COMPLETIONS, USER, Server

SMALLEST: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"messages": USER, "max_tokens": 1}),
    "completions": (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
    "messages": ("/v1/messages", {"model": "default", "messages": USER, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
}
"""Path and smallest body of each endpoint."""


def post_field(server: Server, endpoint: str, field: str, value: Any) -> httpx.Response:
    """Posts the smallest body with a field, which may be one of a tool."""
    path, plain = SMALLEST[endpoint]
    parent, _, name = field.rpartition("[].")
    if not parent:
        return server.post(path, **{**plain, name: value})
    tools = [{"name": "f", "input_schema": {}, name: value}]
    return server.post(path, **{**plain, parent: tools, "tool_choice": {"type": "none"}})
