"""Selection among several chat templates of a folder, equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.text import template_worker, worker
from shared.text.chat_template import Conversation, TemplateError
from shared.text.chat_templates import ChatTemplates
from shared.text.tokenizer import Tokenizer
from tests.support.http_fixtures import save_tokenizer

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "SECRET_NAME", "parameters": {}}}
PLAIN = "plain {{ messages[0].content }}"
TOOLS = "{{ messages[0].content }} {{ tools | tojson }}{{ kind }}{{ think }}{{ bos_token }}"
OTHER = "other {{ messages[0].content }}"

OFF = {"reasoning_effort": "none"}


def named(**sources: str) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in sources.items()]


FOLDERS: dict[str, dict[str, Any]] = {
    "one": {"config": PLAIN},
    "several": {"config": named(default=PLAIN, tool_use=TOOLS, rag=OTHER)},
    "no tool_use": {"config": named(rag=OTHER, default=PLAIN + "{{ tools }}")},
    "a file": {"jinja": PLAIN + "{{ tools }}", "config": named(default=OTHER, tool_use=OTHER)},
    "files": {"jinja": PLAIN, "more": {"tool_use": TOOLS}, "config": OTHER},
    "files by name alone": {"more": {"tool_use": TOOLS, "default": PLAIN}, "config": OTHER},
}


def save(folder: Path, config: Any = None, jinja: str = "", **more: dict[str, str]) -> Tokenizer:
    save_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>"}
    if config is not None:
        settings["chat_template"] = config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    for name, source in more.get("more", {}).items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_named_templates_match_transformers(tmp_path: Path, case: str, tools: list[Any]):
    tokenizer = save(tmp_path, **FOLDERS[case])
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    want = oracle.apply_chat_template(USER, tools=tools or None, tokenize=False)
    if case == "one" and tools:
        with pytest.raises(TemplateError, match="does not support tools"):
            tokenizer.render_chat(Conversation(USER, tools))
    else:
        assert tokenizer.render_chat(Conversation(USER, tools)) == want
        assert ("SECRET_NAME" in want) == bool(tools)


def test_missing_default_template_raises_with_names(tmp_path: Path):
    tokenizer = save(tmp_path, config=named(tool_use=TOOLS, rag=OTHER))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template default; it has rag, tool_use"):
        tokenizer.render_chat(Conversation(USER))
    assert "SECRET_NAME" in tokenizer.render_chat(Conversation(USER, [TOOL]))


def test_template_arguments_checked_for_selected_template(tmp_path: Path):
    default = PLAIN + "{{ mood }}{% if enable_thinking %}<think>{% endif %}"
    tokenizer = save(tmp_path, config=named(default=default, tool_use=TOOLS + "<think>"))
    assert tokenizer.render_chat(Conversation(USER, arguments={"mood": "!"})) == "plain hi!"
    assert tokenizer.render_chat(Conversation(USER, [TOOL], {"kind": "?"})).endswith(
        "?<|end|><think>"
    )
    for asked in (
        Conversation(USER, arguments={"kind": "?"}),
        Conversation(USER, [TOOL], {"mood": "!"}),
    ):
        with pytest.raises(TemplateError, match="has no argument"):
            tokenizer.render_chat(asked)
    assert tokenizer.render_chat(Conversation(USER, advice=OFF)) == "plain hi"
    templates = ChatTemplates({"default": default, "tool_use": TOOLS + "<think>"}, {})
    assert templates.unread(OFF, has_tools=False) == []
    assert templates.unread(OFF, has_tools=True) == ["reasoning_effort"]


def test_template_worker_receives_all_templates():
    templates = ChatTemplates({"default": PLAIN, "tool_use": TOOLS}, {"bos_token": "<s>"})
    given, asked = (
        json.loads(packed[worker.LENGTH.size :])
        for packed in (
            template_worker.pack_templates(templates),
            template_worker.pack_conversation(Conversation(USER, [TOOL])),
        )
    )
    render = template_worker.begin(given)
    assert render(asked) == templates.render(Conversation(USER, [TOOL]))
    assert render(asked | {"tools": []}) == "plain hi"


@pytest.mark.parametrize(
    "given",
    [{"config": named(default="{% if %}")}, {"config": [1]}, {"config": 3}, {"config": [{}]}]
    + [{"jinja": PLAIN, "more": {"x": "{% if %}"}}],
)
def test_broken_template_raises_at_startup(tmp_path: Path, given: dict[str, Any]):
    with pytest.raises(ValueError, match="the chat template in .* cannot be read"):
        save(tmp_path, **given)
