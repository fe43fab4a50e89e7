"""Conversations with tool calls in templates that read arguments as text or as objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.text.chat_template import ChatTemplate, Conversation, TemplateError
from shared.text.jinja_environment import environment
from tests.support.family_templates import TEMPLATES

DEEPSEEK_R1 = """
{%- set state = namespace(in_outputs=false, first=true) %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set state.in_outputs = false %}{{ '<User>' +
message['content'] }}{% endif %} {%- if message['role'] == 'assistant' and message['content'] is
none %} {%- for tool in message['tool_calls'] %}
{{- '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\n```json\n' +
tool['function']['arguments'] + '\n```<end>' }} {%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<Assistant>' +
message['content'] }}{% endif %} {%- if message['role'] == 'tool' %}{{ '<output>' +
message['content'] + '<output end>' }}{% endif %} {%- endfor %}
"""
"""Form of DeepSeek's template: writes a call if the content is none, its arguments as text."""

LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
LOOP += "{}{% endfor %}{{ m.content or '' }}|{% endfor %}"
TEMPLATES_OF_TEXT = {
    "DeepSeek's own": DEEPSEEK_R1,
    "printed": LOOP.replace("{}", "{{ c.function.arguments }}"),
    "joined": LOOP.replace("{}", "{{ ' ' ~ c.function.arguments ~ ' ' }}"),
    "added": LOOP.replace("{}", "{{ ' ' + c.function.arguments + ' ' }}"),
    "stripped": LOOP.replace("{}", "{{ c.function.arguments.strip() }}"),
    "filtered": LOOP.replace("{}", "{{ c.function.arguments | trim }}"),
    "as JSON": LOOP.replace("{}", "{{ c.function.arguments | tojson }}"),
    "either": LOOP.replace(
        "{}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
    ),
}
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "deep": {"a": None, "b": True}}


def talk(content: Any) -> list[dict[str, Any]]:
    """Returns two turns with calls that repeat the question, so that only the count shows them."""
    messages: list[dict[str, Any]] = []
    for number in range(2):
        function = {"name": "weather", "arguments": ARGUMENTS}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"weather {json.dumps(ARGUMENTS, ensure_ascii=False)}"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"sunny {number}"},
        ]
    return messages


@pytest.mark.parametrize("content", ["", "I will look."])
@pytest.mark.parametrize("name", TEMPLATES_OF_TEXT)
def test_render_keeps_calls_for_string_argument_templates(name: str, content: str):
    template = ChatTemplate(TEMPLATES_OF_TEXT[name], {})
    prompt = template.render(Conversation(talk(content)))
    assert prompt.count(json.dumps(ARGUMENTS, ensure_ascii=False)) == 4  # in questions and calls
    assert prompt.count("<call>") == 2
    assert prompt.count("weather") == 4
    assert all(f"sunny {number}" in prompt for number in range(2))


def test_render_keeps_text_next_to_call():
    template = ChatTemplate(TEMPLATES_OF_TEXT["added"], {})
    assert template.render(Conversation(talk("I will look."))).count("I will look.") == 2


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek", "mistral"])
def test_template_reading_objects_receives_messages_unchanged(name: str):
    prompt = ChatTemplate(TEMPLATES[name], {}).render(Conversation(talk("")))
    written = environment().from_string(TEMPLATES[name])
    assert prompt == written.render(messages=talk(""), add_generation_prompt=True)


def test_render_rejects_template_without_calls():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %} tool", {})
    with pytest.raises(TemplateError, match="omits the function 'weather'"):
        template.render(Conversation(talk("")[1:3]))
