"""Tool call and reasoning parsers detected from the chat template."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from models.make_random import chat_template
from shared.text import template_probe
from shared.text.chat_template import Conversation
from shared.text.chat_templates import ChatTemplates
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.template_probe import reasoning_parser_of, tool_call_parser_of
from shared.text.text_parsers import new_parser
from tests.support.call_templates import CALL_TEMPLATES, DESCRIBED
from tests.support.call_texts import FUNCTIONS, drawn_call, read_back
from tests.support.family_templates import TEMPLATES

CODER = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for tool in tools or [] %}{% if loop.first %}<tools>{% endif %}{{ tool | tojson }}{% endfor %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n' }}
{{- '</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
LLAMA31 = """
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eom_id|>' }}
{%- elif message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
NEEDS_RESULTS = """
{%- if messages[-1].tool_calls %}{{ raise_exception('a call needs its result') }}{% endif %}
""" + chat_template(has_images=False)
BOTH = (
    TEMPLATES["qwen3"]
    .replace("</tool_call>' }}", "</tool_call>' }}{{ E }}")
    .replace(
        "{{ E }}",
        "{{- '<function=' + call.function.name + '><parameter=probe_key>probe value</parameter>"
        "</function>' }}",
    )
)
NO_CALLS = "{{ messages[0].content }}{{ tools | tojson }}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = (
    "{{ tools }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)

CALLS: dict[str, tuple[str, str | None, str]] = {
    "qwen3": (TEMPLATES["qwen3"], "hermes", "JSON in <tool_call>"),
    "demo": (chat_template(has_images=False), "hermes", "JSON in <tool_call>"),
    "demo with images": (chat_template(has_images=True), "hermes", "JSON in <tool_call>"),
    "needs results": (NEEDS_RESULTS, "hermes", "JSON in <tool_call>"),
    "qwen3 coder": (CODER, "qwen3_coder", "elements in <tool_call>"),
    "llama3": (TEMPLATES["llama3"], "llama3", "JSON with parameters"),
    "llama3.1": (LLAMA31, "llama3", "JSON with parameters"),
    "deepseek": (TEMPLATES["deepseek"], None, "in a form that no parser reads"),
    "mistral": (TEMPLATES["mistral"], None, "in a form that no parser reads"),
    "two forms": (BOTH, None, "writes calls that several parsers read"),
    "no calls": (NO_CALLS, None, "lists tools, but writes no calls"),
    "gemma3": (TEMPLATES["gemma3"], None, ""),
    "no tools": (PLAIN, None, ""),
}
REASONING: dict[str, tuple[str, str | None]] = {
    "qwen3": (TEMPLATES["qwen3"], "qwen3"),
    "opened by the prompt": (CODER, "qwen3"),
    "switch": ("{% if enable_thinking %}<think>{% endif %}" + PLAIN, "qwen3"),
    "deepseek-r1": (TEMPLATES["deepseek"], "deepseek-r1"),
    "deepseek-r1 fullwidth": (
        TEMPLATES["deepseek"].replace("<|Assistant|>", "<｜Assistant｜>"),
        "deepseek-r1",
    ),
    "deepseek distilled": (TEMPLATES["deepseek"] + "<think>\n", "qwen3"),
    "llama3": (TEMPLATES["llama3"], None),
    "demo": (chat_template(has_images=False), None),
}


def templates_of(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, {})


@pytest.mark.parametrize("name", CALLS)
def test_tool_call_parser_of_detects_template_format(name: str):
    source, parser, reason = CALLS[name]
    choice = tool_call_parser_of(templates_of(source))
    assert choice.parser == parser
    assert reason in choice.reason
    assert bool(reason) == bool(choice.reason)


@pytest.mark.parametrize("name", [name for name, (_, parser, _) in CALLS.items() if parser])
def test_tool_call_parser_of_reads_template_calls(name: str):
    source, parser, _ = CALLS[name]
    arguments = {"city": "Rome", "note": 'a "b"'}
    called = {"function": {"name": "weather", "arguments": arguments}, "type": "function"}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    user = {"role": "user", "content": "Which weather?"}
    messages = [user, {"role": "assistant", "content": "", "tool_calls": [called]}]
    messages += [{"role": "tool", "content": "sun"}] if name == "needs results" else []
    templates = templates_of(source)
    prompt = templates.render(Conversation([user], [tool]))
    text = templates.render(Conversation(messages, [tool], add_generation_prompt=False))
    begin = next(i for i in range(len(text)) if not prompt.startswith(text[: i + 1]))
    answer = text[begin:]
    read = new_parser(
        parser, OutputBuilder({"weather": {}}, None, are_calls_constrained=False), None
    )
    (call,) = (read.push(answer) + read.flush(was_cut=False)).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", arguments)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parser_of_detects_template_tags(name: str):
    source, parser = REASONING[name]
    assert reasoning_parser_of(templates_of(source)).parser == parser


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_tool_call_parser_of_detects_family_format(name: str):
    parser, source = CALL_TEMPLATES[name]
    assert tool_call_parser_of(templates_of(source)).parser == parser


def test_tool_call_parser_of_reads_described_format():
    choice = tool_call_parser_of(templates_of(DESCRIBED))
    assert (choice.parser, choice.reason) == (
        "granite",
        "renders no calls, which the server therefore writes into contents, and describes calls as "
        "JSON list after <|tool_call|>",
    )


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_calls_survive_round_trip_through_template(name: str):
    """Calls that a client returns are rendered as the model has written them."""
    parser, source = CALL_TEMPLATES[name]
    templates = templates_of(source)
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in FUNCTIONS.items()
    ]
    for seed in range(20):
        chosen = random.Random(seed)
        calls = [drawn_call(chosen) for _ in range(chosen.randrange(1, 4))]
        ids = [f"call_{number:032}" for number in range(len(calls))]
        sent = [
            {"id": given, "type": "function", "function": {"name": called, "arguments": values}}
            for given, (called, values) in zip(ids, calls, strict=True)
        ]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Which weather?"},
            {"role": "assistant", "content": "", "tool_calls": sent},
            *({"role": "tool", "tool_call_id": given, "content": "sun"} for given in ids),
        ]
        text = templates.render(Conversation(messages, tools))
        answer = text.partition("<|assistant|>")[2].partition("<|end|>")[0]
        assert read_back(parser, answer, is_constrained=False) == calls, answer


def test_parser_detection_uses_tool_and_default_templates():
    sources = {"default": PLAIN + "<think>", "tool_use": CODER.replace("<think>", "")}
    templates = ChatTemplates(sources, {})
    assert tool_call_parser_of(templates).parser == "qwen3_coder"
    assert reasoning_parser_of(templates).parser == "qwen3"


def test_tool_call_parser_of_endless_template_returns_none(monkeypatch: pytest.MonkeyPatch):
    begun = time.monotonic()
    assert tool_call_parser_of(templates_of(ENDLESS)).parser is None
    assert time.monotonic() - begun < template_probe.STARTING_S
