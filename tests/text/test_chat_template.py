"""Input of a chat template: messages with the client's keys, content parts if it reads parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shared.server.api.request_parsing import parse
from shared.server.protocol.openai_types import ChatRequest
from shared.text.chat_template import ChatTemplate, Conversation

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOP = "{% for part in {} %}{{ part.text | trim }}{% endfor %}"


def looped(over: str) -> str:
    return LOOP.replace("{}", over)


READING = {
    "attribute": f"{{% for m in messages %}}{looped('m.content')}{{% endfor %}}",
    "key": f"{{% for m in messages %}}{looped('m[' + repr('content') + ']')}{{% endfor %}}",
    "get": f"{{% for m in messages %}}{looped('m.get(' + repr('content') + ')')}{{% endfor %}}",
    "first message": looped("messages[0].content"),
    "variable": f"{{% set c = messages[0].content %}}{looped('c')}",
    "namespace": f"{{% set ns = namespace(c=1) %}}{{% set ns.c = messages[0].content %}}"
    f"{looped('ns.c')}",
    "with": f"{{% with c = messages[0].content %}}{looped('c')}{{% endwith %}}",
    "macro": (  # form of Qwen3.5's template
        "{% macro write(given, more) %}{% if given is string %}{{ given }}{% else %}"
        f"{looped('given')}{{% endif %}}{{% endmacro %}}"
        "{% for m in messages %}{{ write(m.content, true) }}{% endfor %}"
    ),
    "macro by keyword": (
        f"{{% macro write(given) %}}{looped('given')}{{% endmacro %}}"
        "{{ write(given=messages[0].content) }}"
    ),
    "selected": looped("messages[0].content | selectattr('type', 'equalto', 'text')"),
    "mapped": "{{ messages[0].content | map(attribute='text') | join }}",
    "slice": looped("messages[0].content[:]"),
    "choice": looped("messages[0].content or []"),
}
JOINING = {
    "unchanged": "{{ messages[0].content }}",
    "lines": "{% for line in messages[0].content.split('\\n') %}{{ line + '\\n' }}{% endfor %}",
    "other loops": "{% for m in messages %}{% for t in m.tool_calls or [] %}{% endfor %}"
    "{{ m.content }}{% endfor %}",
}


def rendered(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    """Returns the prompt text of a request's messages."""
    request = parse(json.dumps({"messages": messages, **more}).encode(), ChatRequest)
    return ChatTemplate(source, {}).render(request.to_chat().conversation)


@pytest.mark.parametrize("way", READING)
def test_chat_template_reading_parts_receives_parts(way: str):
    messages = [{"role": "user", "content": PARTS}]
    assert rendered(READING[way], messages) == "ab"
    (want,), _ = render_jinja_template([messages], chat_template=READING[way])
    assert want == "ab"


@pytest.mark.parametrize("way", JOINING)
def test_chat_template_without_parts_receives_joined_lines(way: str):
    assert rendered(JOINING[way], [{"role": "user", "content": PARTS}]).rstrip("\n") == "a\nb"


@pytest.mark.parametrize(
    "written",
    [
        "{{ messages[0].content | trim }}|",
        "{{ messages[0].content + '|' }}",
        "{{ '' + messages[0].content }}|",
        "{{ messages[0].content ~ '|' }}",
    ],
)
def test_chat_template_joins_parts_of_system_messages(written: str):
    source = (
        f"{written}"
        "{% for m in messages[1:] %}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        f"{looped('m.content')}{{% endif %}}{{% endfor %}}"
    )
    messages = [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}]
    assert rendered(source, messages) == "a\nb|ab"


CALL = {"function": {"arguments": '{"b": 1, "a": [2]}', "name": "f"}, "id": "x", "type": "function"}
MESSAGES = [
    {"content": "be brief", "role": "system"},
    {"role": "user", "name": "Ann", "content": "<hé>"},
    {"tool_calls": [CALL], "role": "assistant", "content": "so", "name": None, "refusal": None},
    {"tool_call_id": "x", "content": "4", "role": "tool"},
]
TOOL = {
    "function": {
        "parameters": {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}},
        "description": None,
        "name": "f",
    },
    "type": "function",
}
DUMP = "{{ messages | tojson }}{{ tools | tojson }}"


def test_chat_template_preserves_key_order():
    (want,), _ = render_jinja_template(
        [[{key: value for key, value in read(m).items() if value is not None} for m in MESSAGES]],
        tools=[TOOL],
        chat_template=DUMP,
    )
    assert rendered(DUMP, MESSAGES, tools=[TOOL]) == want


def read(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as objects."""
    calls = message.get("tool_calls", [])
    loaded = [{**c, "function": {**c["function"], "arguments": {"b": 1, "a": [2]}}} for c in calls]
    return {**message, "tool_calls": loaded} if calls else message


def test_chat_template_renders_none_content_as_empty():
    answered = [{"role": "assistant", "reasoning": "hm", "content": None}]
    source = "{{ '<' + messages[0].content + '>' + messages[0].reasoning_content }}"
    assert rendered(source, answered) == "<>hm"


def test_render_preserves_conversation():
    messages = [{"role": "developer", "content": list(PARTS)}]
    ChatTemplate("{{ messages[0].content }}", {}).render(Conversation(messages))
    assert messages == [{"role": "developer", "content": PARTS}]
