"""Fields of a request that a response of the Responses API repeats."""

from __future__ import annotations

from typing import Any

from shared.server.protocol.responses_tools import (
    ChosenSubset,
    ChosenTool,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesToolChoice,
)
from shared.server.protocol.responses_types import ResponsesRequest

_SAME = (
    *("instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
"""Fields that are repeated unchanged."""


def echo_of(body: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields that a response repeats, with the defaults of omitted ones."""
    calls_one = body.parallel_tool_calls is False
    effort = body.reasoning.effort if body.reasoning else None
    return {
        **{name: getattr(body, name) for name in _SAME},
        "metadata": body.metadata or {},
        "parallel_tool_calls": not calls_one,
        "tool_choice": _choice(body.tool_choice),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "text": _text(body),
        "reasoning": {"effort": effort, "summary": None},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
    }


def _tool(tool: FunctionTool | CustomTool | NamespaceTool) -> dict[str, Any]:
    described = {"description": tool.description or ""} if isinstance(tool, NamespaceTool) else {}
    return {**tool.model_dump(), **described}


def _choice(choice: ResponsesToolChoice | None) -> Any:
    if isinstance(choice, ChosenTool):
        return {"type": choice.type, "name": choice.function.name}
    if not isinstance(choice, ChosenSubset):
        return choice or "auto"
    allowed = choice.allowed_tools
    tools = [{"type": tool.type, "name": tool.function.name} for tool in allowed.tools]
    return {"type": "allowed_tools", "mode": allowed.mode, "tools": tools}


def _text(body: ResponsesRequest) -> dict[str, Any]:
    asked = body.text and body.text.format
    form = asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}
    verbosity = body.text.verbosity if body.text else None
    return {"format": form, **({"verbosity": verbosity} if verbosity else {})}
