"""Conversations with tool calls in templates that read arguments as text or as objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.offline.messages import for_template
from shared.server.protocol.openai_types import ChatPrompt
from shared.text.call_formats.registry import FORMATS
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

DEEPSEEK_V3_1 = """
{%- set state = namespace(after_user=false, after_call=false) %}
{%- for message in messages %}
{%- set calls = message['tool_calls'] if message['tool_calls'] is defined else none %}
{%- if message['role'] == 'user' %}
{%- set state.after_user = true %}{{ '<User>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and state.after_user %}
{%- set state.after_user = false %}{{ '<Assistant></think>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and CONDITION %}
{%- set state.after_call = false %}
{%- for tool in calls %}
{%- if not state.after_call %}
{%- set state.after_call = true %}
{%- if message['content'] is not none %}{{ message['content'] }}{% endif %}
{{- '<calls>' }}
{%- endif %}
{{- '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] + '<end>' }}
{%- endfor %}
{{- '<calls end><eos>' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + '<eos>' }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<output>' + message['content'] + '<output end>' }}
{%- endif %}
{%- endfor %}
"""
"""Form of DeepSeek-V3.1's template: the first call of a message follows its content."""

DEEPSEEK_R1_0528 = """
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] + '<Assistant>' }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}
{%- for tool in message['tool_calls'] %}
{%- set text = tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n' +
tool['function']['arguments'] + '\\n```<end>' %}
{%- if not loop.first %}{{ '\\n<call>' + text }}
{%- elif message['content'] is none %}{{ '<calls><call>' + text }}
{%- else %}{{ message['content'] + '<calls><call>' + text }}
{%- endif %}
{%- endfor %}
{{- '<calls end><eos>' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + '<eos>' }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<output>' + message['content'] + '<output end>' }}{% endif %}
{%- endfor %}
"""
"""Form of DeepSeek-R1-0528's template: the presence of `tool_calls` selects the turn of calls."""

KIMI_K2 = """
{%- for message in messages %}
{{- '<' + message['role'] + '>' }}
{%- if message['role'] == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\\n' }}{% endif %}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}
{%- endif %}
{%- if message.get('tool_calls') %}
{{- '<calls>' }}
{%- for tool in message['tool_calls'] %}
{%- set given = tool['function']['arguments'] %}
{{- '<call>' + tool['id'] + '<args>' + (given if given is string else given | tojson) + '<end>' }}
{%- endfor %}
{{- '<calls end>' }}
{%- endif %}
{{- '<eos>' }}
{%- endfor %}
"""
"""Form of Kimi K2's template: iterates over a content that is no string, so None is an error."""

GLM_4_5 = """
{%- macro visible(content) %}
{%- if content is string %}{{ content }}
{%- elif content is iterable %}{% for part in content %}{{ part.text }}{% endfor %}
{%- else %}{{ content }}
{%- endif %}
{%- endmacro %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<observation>' + m.content }}
{%- else %}{{ '<' + m.role + '>' + visible(m.content) }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<key>' + key + '<value>' + (value if value is string else value | tojson) }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endfor %}
"""
"""Form of GLM-4.5's template: reads an object, and prints a content of None as `None`."""

AS_TEXT = json.dumps({"city": "Zürich", "days": [1, 2]}, ensure_ascii=False)
WRITTEN = {
    "DeepSeek-R1-0528": (
        DEEPSEEK_R1_0528,
        f"<User>0?<Assistant>SAID<calls><call>function<sep>weather\n```json\n{AS_TEXT}\n```<end>"
        "\n<call>function<sep>time\n```json\n{}\n```<end><calls end><eos>"
        "<output>sunny<output end><output>noon<output end>Fine.<eos>",
    ),
    "Kimi K2": (
        KIMI_K2,
        f"<user>0?<eos><assistant>SAID<calls><call>functions.weather:0<args>{AS_TEXT}<end>"
        "<call>functions.time:1<args>{}<end><calls end><eos>"
        "<tool>## Return of functions.weather:0\nsunny<eos>"
        "<tool>## Return of functions.time:1\nnoon<eos><assistant>Fine.<eos>",
    ),
    "GLM-4.5": (
        GLM_4_5,
        "<user>0?<assistant>SAID<tool_call>weather<key>city<value>Zürich<key>days<value>[1, 2]"
        "</tool_call><tool_call>time</tool_call><observation>sunny<observation>noon"
        "<assistant>Fine.",
    ),
}
"""Templates in the style of three families, each with its text of one turn."""

WITH_CALLS, WITHOUT_CONTENT = "calls is not none", "message['content'] is none"

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


def calling(content: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [{"id": f"call_{i}", "type": "function", "function": x} for i, x in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": made}


@pytest.mark.parametrize(
    ("condition", "spoken"), [(WITH_CALLS, "I will look."), (WITHOUT_CONTENT, "")]
)
def test_deepseek_template_writes_all_earlier_calls(condition: str, spoken: str):
    """A template that requires content None for calls drops the text next to a call."""
    messages = [
        {"role": "user", "content": "Zürich?"},
        calling("", ("weather", ARGUMENTS), ("time", {})),
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        calling("I will look.", ("weather", {"city": "Bern"})),
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks."},
    ]
    template = ChatTemplate(DEEPSEEK_V3_1.replace("CONDITION", condition), {})
    assert template.render(Conversation(messages)) == (
        "<User>Zürich?<Assistant></think>"
        f"<calls><call>weather<sep>{json.dumps(ARGUMENTS, ensure_ascii=False)}<end>"
        "<call>time<sep>{}<end><calls end><eos>"
        "<output>sunny<output end><output>noon<output end>"
        f'{spoken}<calls><call>weather<sep>{{"city": "Bern"}}<end><calls end><eos>'
        "<output>rain<output end>Sunny.<eos><User>Thanks."
    )


def turn_of_client(number: int, said: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a turn with two calls in OpenAI's format: arguments are JSON text."""
    given = {"weather": AS_TEXT, "time": "{}"}
    calls = [
        {"id": f"call_{i}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(given.items())
    ]
    return [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", **said, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "assistant", "content": "Fine.", "tool_calls": []},
    ]


def over_http(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return ChatPrompt.model_validate({"messages": messages}).to_chat().conversation.messages


def offline(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(map(for_template, messages))


@pytest.mark.parametrize("read", [over_http, offline])
@pytest.mark.parametrize("said", [{"content": None}, {"content": ""}, {}, {"content": "I look."}])
@pytest.mark.parametrize("name", WRITTEN)
def test_family_template_writes_every_earlier_turn(name: str, said: dict[str, Any], read: Any):
    messages = [each for number in range(3) for each in turn_of_client(number, said)]
    source, turn = WRITTEN[name]
    prompt = ChatTemplate(source, {}).render(Conversation(read(messages)))
    assert prompt == "".join(
        turn.replace("SAID", said.get("content") or "")
        .replace("0?", f"{number}?")
        .replace("weather:0", f"weather:{2 * number}")
        .replace("time:1", f"time:{2 * number + 1}")
        for number in range(3)
    )


def test_render_keeps_ids_with_function_name():
    """Ids that the model wrote are not numbered anew."""
    messages = offline(turn_of_client(0, {}))
    call, result = messages[1]["tool_calls"][0], messages[2]
    call["id"] = result["tool_call_id"] = "functions.weather:7"
    prompt = ChatTemplate(KIMI_K2, {}).render(Conversation(messages))
    assert prompt.count("functions.weather:7") == 2
    assert prompt.count("functions.time:1") == 2


def test_render_keeps_text_next_to_call():
    template = ChatTemplate(TEMPLATES_OF_TEXT["added"], {})
    assert template.render(Conversation(talk("I will look."))).count("I will look.") == 2


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek", "mistral"])
def test_template_reading_objects_receives_messages_unchanged(name: str):
    prompt = ChatTemplate(TEMPLATES[name], {}).render(Conversation(talk("")))
    written = environment().from_string(TEMPLATES[name])
    assert prompt == written.render(messages=talk(""), add_generation_prompt=True)


CONTENTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# tool #}"
"""Form of Granite 3.3's and SmolLM3's templates: contents alone."""


@pytest.mark.parametrize("said", ["", "I will look."])
@pytest.mark.parametrize("name", FORMATS)
def test_template_of_contents_receives_calls_as_text(name: str, said: str):
    prompt = ChatTemplate(CONTENTS, {}, name).render(Conversation(talk(said)))
    call = FORMATS[name].write([("weather", ARGUMENTS)])
    written = f"<assistant>{said}\n{call}" if said else f"<assistant>{call}"
    assert prompt.count(f"{written}<tool>sunny") == 2


def test_template_rejecting_calls_remains_error():
    source = (
        CONTENTS + "{% if messages[1].tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    )
    with pytest.raises(TemplateError, match="no calls"):
        ChatTemplate(source, {}, "hermes").render(Conversation(talk("")))


def test_template_of_calls_ignores_call_format():
    source = TEMPLATES_OF_TEXT["as JSON"]
    messages = Conversation(talk("I will look."))
    assert ChatTemplate(source, {}, "hermes").render(messages) == ChatTemplate(source, {}).render(
        messages
    )


def test_render_rejects_template_without_calls():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %} tool", {})
    with pytest.raises(TemplateError, match="omits the function 'weather'"):
        template.render(Conversation(talk("")[1:3]))


FIRST_CALL = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}CHECK<call>{{ m.tool_calls[0].function.name }}
{{- m.tool_calls[0].function.arguments | tojson }}{% endif %}
{%- endfor %}{# tool #}"""
RAISES = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"


@pytest.mark.parametrize("check", ["", RAISES], ids=["drops", "raises"])
def test_template_of_one_call_receives_calls_separately(check: str):
    """Templates of gpt-oss and of Llama 3 render one call per message."""
    question, calling, *results = talk("I will look.")[:4]
    first, second = calling["tool_calls"][0], talk("")[4]["tool_calls"][0]
    second = {**second, "id": "call_second"}
    both = {**calling, "tool_calls": [first, second]}
    answers = [
        {"role": "tool", "tool_call_id": "call_second", "content": "second result"},
        {"role": "tool", "tool_call_id": first["id"], "content": "first result"},
    ]
    prompt = ChatTemplate(FIRST_CALL.replace("CHECK", check), {}).render(
        Conversation([question, both, *answers])
    )
    parts = prompt.split("<call>")
    assert len(parts) == 3
    assert prompt.count("I will look.") == 1
    assert "first result" in parts[1]
    assert "second result" in parts[2]
