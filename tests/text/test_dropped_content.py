"""Content that a chat template drops raises an error; templates of five model families.

Each generated value is a unique word. The prompt that transformers renders with the same template
therefore shows independently which values the template dropped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.text.chat_template import ChatTemplate, Conversation, TemplateError
from tests.support.conversations import count_refused
from tests.support.family_templates import TEMPLATES
from tests.support.http_fixtures import save_tokenizer


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


LEAST_REJECTED = {"qwen3": 0, "deepseek": 0, "llama3": 2}
"""Smallest counts for templates that drop little; that of Llama 3 receives calls one by one."""


@pytest.mark.parametrize("family", TEMPLATES)
def test_render_keeps_all_content_or_raises(family: str, oracle: Any) -> None:
    render = ChatTemplate(TEMPLATES[family], {}).render
    refused = count_refused(render, oracle, TEMPLATES[family])
    # The property requires enough cases of both kinds.
    assert refused[False] >= 20
    assert refused[True] >= LEAST_REJECTED.get(family, 5)


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}]


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        ("{{ messages[0].content }}", ["a", "b"], "the content of message 1 (user)"),
        ("tools f {{ messages[0].content }}", ["a", CALLS], "an argument for 'f' of message 1"),
        ("tools Oslo city {{ messages[0].content }}", ["a", CALLS], "the function 'f'"),
    ],
)
def test_render_error_names_omitted_content(template: str, messages: list[Any], what: str) -> None:
    given = [
        {"role": "user", "content": each}
        if isinstance(each, str)
        else {"role": "assistant", "content": "", "tool_calls": each}
        for each in messages
    ]
    with pytest.raises(TemplateError, match=f"omits {re.escape(what)}"):
        ChatTemplate(template, {}).render(Conversation(given))
