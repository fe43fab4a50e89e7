"""Chat template of the demo models: tools in Qwen's format, plain chats as trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from models.make_random import chat_template
from shared.text.chat_template import Conversation
from shared.text.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "models"
FOLDERS = ("random", "demo", "demo/target", "demo/standalone", "demo/vlm")
TRAINED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template that the models were trained with."""

PLAIN: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1\n"}],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "{{ x }} <b>&"},
        {"role": "user", "content": "2"},
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": "so far"},
    ],
]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ROUND = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome and Oslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("weather", city="Rome"), call("weather", city="Oslo")],
    },
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "", "tool_calls": [call("note", text='"wet"')]},
    {"role": "tool", "content": "kept"},
]
WRITTEN = """<|im_start|>system
Be brief.

# Tools

Functions that you may call:
<tools>
{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
</tools>

Write each call as JSON in tags:
<tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
<|im_start|>user
Rome and Oslo?<|im_end|>
<|im_start|>assistant
I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
sun
</tool_response>
<tool_response>
rain
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "note", "arguments": {"text": "\\"wet\\""}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
kept
</tool_response><|im_end|>
<|im_start|>assistant
"""  # noqa: E501


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return MODELS / request.param


def test_template_without_tools_writes_what_was_trained(folder: Path):
    tokenizer, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    for messages in PLAIN:
        for generates in (True, False):
            how: Any = {"add_generation_prompt": generates, "tokenize": False}
            want = oracle.apply_chat_template(messages, chat_template=TRAINED, **how)
            assert oracle.apply_chat_template(messages, **how) == want
            asked = Conversation(messages, add_generation_prompt=generates)
            assert tokenizer.render_chat(asked) == want


def test_template_writes_tools_calls_and_results(folder: Path):
    tokenizer, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    assert tokenizer.render_chat(Conversation(ROUND, [WEATHER])) == WRITTEN
    of_oracle = oracle.apply_chat_template(
        ROUND, tools=[WEATHER], add_generation_prompt=True, tokenize=False
    )
    assert of_oracle == WRITTEN


def test_folders_contain_generated_template(folder: Path):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == chat_template(has_images=folder.name == "vlm")


def test_template_joins_text_parts_and_keeps_image_positions():
    words = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image: list[dict[str, Any]] = [{"type": "image"}, *words]
    for name, parts, want in [
        ("target", words, "a\nb"),
        ("vlm", words, "ab"),
        ("vlm", image, "<|image|>ab"),
    ]:
        tokenizer = Tokenizer.from_folder(MODELS / "demo" / name)
        assert tokenizer is not None
        text = tokenizer.render_chat(Conversation([{"role": "user", "content": parts}]))
        assert text == f"<|im_start|>user\n{want}<|im_end|>\n<|im_start|>assistant\n"
