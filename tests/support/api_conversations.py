"""Conversations in the format of each API, and a template that writes all of their parts.

The engine without a model repeats its prompt, so equal outputs mean equal prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.http_fixtures import SPECIAL, Server, save_tokenizer, serving

END = SPECIAL[0]
TEMPLATE = (
    "{% for m in messages %}{% if not loop.first or m.role != 'user' %}[{{ m.role }}]{% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<|image|>' }};{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{ {{ c.id }} {{ c.function.name }}"
    "{{ c.function.arguments | tojson }}}{% endfor %}"
    "{% if m.role == 'tool' %}@{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
MESSAGES_TOOL: Any = {"name": "look", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
USER = {"role": "user", "content": "hi"}


def _chat_call(call_id: str, arguments: str = '{"city": "Rome"}') -> Any:
    function = {"name": "look", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _block_call(call_id: str) -> Any:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": {"city": "Rome"}}


def _item_call(call_id: str) -> Any:
    arguments = '{"city": "Rome"}'
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": arguments}


def _texts(*texts: str, kind: str = "text") -> Any:
    return [{"type": kind, "text": text} for text in texts]


CONVERSATIONS: dict[str, tuple[Any, Any, Any]] = {
    "user": ({"messages": [USER]}, {"messages": [USER]}, {"input": "hi"}),
    "system": (
        {"messages": [{"role": "system", "content": "be brief"}, USER]},
        {"messages": [USER], "system": "be brief"},
        {"input": [USER], "instructions": "be brief"},
    ),
    "system parts": (
        {"messages": [{"role": "system", "content": _texts("a", "b")}, USER]},
        {"messages": [USER], "system": _texts("a", "b")},
        {"input": [{"role": "developer", "content": "b"}, USER], "instructions": "a"},
    ),
    "user parts": (
        {"messages": [{"role": "user", "content": _texts("a", "b")}]},
        {"messages": [{"role": "user", "content": _texts("a", "b")}]},
        {"input": [{"role": "user", "content": _texts("a", "b", kind="input_text")}]},
    ),
    "tools": (
        {"messages": [USER], "tools": [CHAT_TOOL]},
        {"messages": [USER], "tools": [MESSAGES_TOOL]},
        {"input": "hi", "tools": [RESPONSES_TOOL]},
    ),
    "round": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [_chat_call("c1"), _chat_call("c2")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "c2", "content": "dry"},
                {"role": "user", "content": "so?"},
            ]
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "any"},
                        {"type": "text", "text": "I look."},
                        _block_call("c1"),
                        _block_call("c2"),
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": _texts("dry")},
                        {"type": "text", "text": "so?"},
                    ],
                },
            ]
        },
        {
            "input": [
                USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                },
                {**_item_call("c1"), "id": "fc_1", "status": "completed"},
                _item_call("c2"),
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": _texts("dry", kind="input_text"),
                },
                {"role": "user", "content": "so?"},
            ]
        },
    ),
    "empty answer": (
        {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
        {"messages": [USER, {"role": "assistant", "content": []}, USER]},
        {"input": [USER, {"role": "assistant", "content": ""}, USER]},
    ),
    "reasoning only": (
        {"messages": [USER, {"role": "assistant", "reasoning_content": "hm"}, USER]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
                USER,
            ]
        },
        {
            "input": [
                USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                    "status": "incomplete",
                },
                USER,
            ]
        },
    ),
}
"""Fields of a request to chat completions, messages and responses, by name."""


@contextlib.contextmanager
def serving_apis(folder: Path, *flags: str) -> Iterator[Server]:
    """Serves the engine without a model with the template and both parsers."""
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    parsers = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    command = ["-m", "tests.support.http_fixtures", str(folder), *parsers, *flags]
    with serving(command) as running:
        yield running
