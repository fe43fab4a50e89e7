"""gpt-oss over HTTP: schemas in the final channel, and reasoning of calls in the next prompt.

A model with random weights writes the channels, of which the grammar leaves it the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.http_fixtures import CHAT, Server, save_tokenizer, serving
from tests.support.special_token_tokenizer import HARMONY_END, harmony_tokenizer
from tests.support.tiny_models import write_tiny

TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|call|>"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "is_new": {"type": "boolean"}},
    "required": ["size", "is_new"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}},
}
ACCEPTED = "tandem:spec_decode_num_accepted_tokens_total"
QUESTION = {"role": "user", "content": "Which?"}


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, "gpt_oss", 7)
    save_tokenizer(folder, harmony_tokenizer(), HARMONY_END)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    line = ["--port", "0", "--model-path", str(folder), "--grammar-backend", "llguidance"]
    line += ["--tool-call-parser", "gpt-oss", "--reasoning-parser", "gpt-oss", *NGRAM]
    with serving(["-m", "torch_impl.serve", *line, "--max-running-requests", "4"]) as running:
        yield running


def end_of(server: Server) -> int:
    """Returns the token that ends a message."""
    (token,) = server.post("/tokenize", prompt="<|end|>").json()["tokens"]
    return token


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "NGRAM"])
def test_schema_constrains_final_channel_of_served_model(server, drafts) -> None:
    """Each choice thinks or does not; a biased token ends its thoughts."""
    fields: dict[str, Any] = {"response_format": FORMAT, "max_tokens": 150, "temperature": 2.0}
    fields |= {"n": 8, "seed": 3, "logit_bias": {str(end_of(server)): 5}}
    fields |= {} if drafts else {"speculative": {"enabled": False}}
    before = server.metrics()[ACCEPTED]
    answer = server.post(CHAT, messages=[QUESTION], **fields)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    messages = [each["message"] for each in choices if each["finish_reason"] == "stop"]
    assert messages
    for message in messages:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert any(each["message"].get("reasoning_content") for each in choices)
    assert (server.metrics()[ACCEPTED] > before) == drafts


def test_reasoning_of_call_reaches_next_prompt(server) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}

    def prompt(**more: Any) -> str:
        asked = server.post("/tokenize", messages=[QUESTION, turn | more, result], tools=[STOP])
        return server.post("/detokenize", tokens=asked.json()["tokens"]).json()["prompt"]

    assert "<|channel|>analysis<|message|>I must.<|end|>" in prompt(reasoning_content="I must.")
    assert "analysis" not in prompt()
