"""Data of the demo model with tools: valid calls, complete loops, the chat template's text."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jax_impl.training.examples import open_tokenizer, row_of
from models.demo.agents import PARTS, agents, with_call_fields
from models.demo.data import KINDS
from models.demo.example import Example
from models.demo.problems import LARGEST
from models.demo.tools import VALUES, call_text, calls_of, draw_functions, draw_request
from shared.text.chat_template import Conversation
from shared.text.tokenizer import Tokenizer
from tests.support.tasks import is_right, prompt_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
COUNT = 400
MAX_TOKENS = 1100
"""Tokens of a conversation; `jax_impl.train` drops rows above 1,024."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(DEMO)


@pytest.fixture(scope="module")
def conversations() -> list[Example]:
    return list(islice(agents("train", 3), COUNT))


def all_messages(example: Example) -> list[dict[str, Any]]:
    return [*example.messages, {"role": "assistant", "content": example.answer}]


def calls_in(example: Example) -> list[list[dict[str, Any]]]:
    """The calls of each assistant turn that has some."""
    turns = [each["content"] for each in all_messages(example) if each["role"] == "assistant"]
    return [calls for turn in turns if (calls := calls_of(turn)) is not None]


def test_every_call_satisfies_schema_of_its_tool(conversations: list[Example]):
    types = Counter[str]()
    for example in conversations:
        schemas = {e["function"]["name"]: e["function"]["parameters"] for e in example.tools}
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        for call in (call for calls in calls_in(example) for call in calls):
            jsonschema.validate(call["arguments"], schemas[call["name"]])
            assert call["arguments"].keys() <= schemas[call["name"]]["properties"].keys()
            types.update(type(value).__name__ for value in call["arguments"].values())
    assert set(types) == {"str", "int", "float", "bool", "list"}


def test_conversations_contain_every_kind_of_turn(conversations: list[Example]):
    lengths = Counter(len(calls) for example in conversations for calls in calls_in(example))
    assert {1, 2, 3} == set(lengths)
    is_call = Counter(calls_of(example.answer) is not None for example in conversations)
    assert min(is_call.values()) > COUNT // 4
    assert sum(not calls_in(example) for example in conversations) > COUNT // 20
    assert max(len(calls_in(example)) for example in conversations) > 3
    assert sum("Please give me the" in str(all_messages(each)) for each in conversations) > 5
    assert len(PARTS) == 4


def test_results_follow_their_calls(conversations: list[Example]):
    for example in conversations:
        open_calls = 0
        for message in all_messages(example):
            if message["role"] == "tool":
                open_calls -= 1
                assert open_calls >= 0
            else:
                assert open_calls == 0
            if message["role"] == "assistant":
                open_calls = len(calls_of(message["content"]) or ())


def test_calculator_calls_solve_problem(conversations: list[Example]):
    signs = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
    checked = 0
    for example in conversations:
        messages = all_messages(example)
        for message, result in pairwise(messages):
            calls = calls_of(message["content"]) if message["role"] == "assistant" else None
            if calls and calls[0]["name"] in signs:
                (call,) = calls
                a, b = call["arguments"]["a"], call["arguments"]["b"]
                assert eval(f"{a} {signs[call['name']]} {b}") == int(result["content"]) <= LARGEST
                checked += 1
    assert checked > 30


def test_request_mentions_every_argument():
    rng = random.Random(2)
    for function in draw_functions(rng, 60):
        request = draw_request(rng, function)
        for value in request.arguments.values():
            entries = value if isinstance(value, list) else [value]
            assert isinstance(value, bool) or all(str(entry) in request.text for entry in entries)
    assert {"urgent", "items", "weight", "color", "quantity", "name"} <= VALUES.keys()


def test_calls_as_text_equal_template_output(conversations: list[Example], tokenizer: Tokenizer):
    """Training text, and the text of a client that sends calls as fields."""
    for example in conversations[:80]:
        tools = list(example.tools)
        sent = with_call_fields(all_messages(example))
        for message in sent:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        texts = [
            tokenizer.render_chat(Conversation(messages, tools, add_generation_prompt=False))
            for messages in (all_messages(example), sent)
        ]
        assert texts[0] == texts[1]
        assert "tool_calls" not in texts[0]


def test_training_row_learns_every_answer(conversations: list[Example], tokenizer: Tokenizer):
    longest = 0
    for example in conversations[:80]:
        line = {"messages": example.messages, "answer": example.answer, "tools": example.tools}
        row = row_of("line", json.loads(json.dumps(line)), tokenizer)
        turns = [m["content"] for m in all_messages(example) if m["role"] == "assistant"]
        learnt = [t for t, is_answer in zip(row.tokens, row.is_answer, strict=True) if is_answer]
        assert learnt == [
            token for turn in turns for token in (*tokenizer.encode_more(turn), tokenizer.end_id)
        ]
        assert tuple(row.tokens[: len(prompt_of(example, tokenizer))]) == prompt_of(
            example, tokenizer
        )
        longest = max(longest, len(row.tokens))
    assert 600 < longest < MAX_TOKENS


def test_is_right_compares_calls_by_content():
    answer = call_text("find_order", {"city": "Oslo", "free": True})
    spaced = '<tool_call> {"arguments": {"free": true, "city": "Oslo"}, "name": "find_order"} '
    assert is_right("tools", spaced + "</tool_call>", answer)
    assert not is_right("tools", call_text("find_order", {"city": "Oslo"}), answer)
    assert not is_right("tools", "find_order", answer)
    assert not is_right("tools", f"I call. {answer}", answer)
    assert is_right("tools", "Done.", "Done.")
    assert not is_right("tools", answer, "Done.")


NO_CALLS = (
    *("", "{}", "a</tool_call>"),
    *("<tool_call>\n{}\n</tool_call>", "<tool_call>\n[1\n</tool_call>"),
)


@pytest.mark.parametrize("text", NO_CALLS)
def test_calls_of_text_without_calls_is_none(text: str):
    assert calls_of(text) is None


def test_tools_kind_is_agents():
    assert KINDS["tools"] is agents
