"""`continue_final_message`: the prompt ends with the last message, equal to transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shared.text.chat_template import ChatTemplate, Conversation, TemplateError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
IN_PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
)
USER = {"role": "user", "content": "so "}
TEXTS = ["so", "so ", "so \n", " so", "", "<think>hm", "so so", "<|im_end|>", "é🦜"]


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def continued(template: str, content: Any, **more: Any) -> str:
    messages = [USER, {"role": "assistant", "content": content, **more}]
    return rendered(template, messages)


def rendered(template: str, messages: list[Any], begins: bool = False) -> str:
    asked = Conversation(messages, add_generation_prompt=begins, continue_final_message=True)
    return ChatTemplate(template, {}).render(asked)


@pytest.mark.parametrize("content", [*TEXTS, text("a", "b "), text("a ")])
@pytest.mark.parametrize("template", [CHATML, TRIMMING, IN_PARTS], ids=["plain", "trim", "parts"])
def test_continue_final_message_matches_transformers(template: str, content: Any):
    joined = template is not IN_PARTS and not isinstance(content, str)
    joined_content = "\n".join(part["text"] for part in content) if joined else content
    messages = [USER, {"role": "assistant", "content": joined_content}]
    (want,), _ = render_jinja_template(
        [messages], chat_template=template, continue_final_message=True
    )
    assert continued(template, content) == want
    assert not want.endswith("<|im_end|>\n")


def test_render_without_generation_prompt_ends_after_message():
    asked = Conversation([USER], add_generation_prompt=False)
    assert ChatTemplate(CHATML, {}).render(asked) == "<|im_start|>user\nso <|im_end|>\n"


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "begins", "reason"),
    [
        ([USER], False, "requires a last message of the assistant"),
        ([], False, "requires a last message of the assistant"),
        ([USER, {"role": "assistant", "content": "a"}], True, "are mutually exclusive"),
        ([{"role": "assistant", "content": None}], False, "with content"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [CALL]}],
            False,
            "without tool_calls",
        ),
    ],
)
def test_continue_final_message_rejects_invalid_messages(
    messages: list[Any], begins: bool, reason: str
):
    with pytest.raises(TemplateError, match=reason) as refused:
        rendered(CHATML + "{# tool #}", messages, begins)
    assert refused.value.part == "continue_final_message"


@pytest.mark.parametrize(
    "written", ["{{ messages[0].content }}", "{{ messages[-1].content[3:] }}", "x"]
)
def test_continue_final_message_rejects_message_changed_by_template(written: str):
    with pytest.raises(TemplateError, match="does not write the last message unchanged"):
        continued(written, "hello")


def test_continue_final_message_preserves_message():
    message = {"role": "assistant", "content": text("a")}
    assert rendered(IN_PARTS, [USER, message]).endswith("\na")
    assert message == {"role": "assistant", "content": text("a")}
