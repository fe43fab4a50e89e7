"""Reasoning told from the answer, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.options.server import REASONING_PARSERS
from shared.server.call_formats import ToolCallParser
from shared.server.delta import Delta, OutputParser, PlainText
from shared.server.reasoning import ALWAYS_OPEN, ReasoningParser, is_open_after

QWEN_THINKS = "<|im_start|>assistant\n<think>\n"
QWEN_DOES_NOT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PARTS = [
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "</",
    "</think",
    ">",
    " ",
    "\n",
    "a",
    "é",
    "<",
    "b c",
]


def read(parser: OutputParser, pieces: list[str]) -> tuple[str, str]:
    said = sum(map(parser.push, pieces), Delta()) + parser.flush()
    return said.reasoning, said.text


@pytest.mark.parametrize(
    ("text", "is_open", "want"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False, ("hm, so", "Yes.")),
        ("\n <think>hm</think>Yes.", False, ("hm", "Yes.")),
        ("Yes.", False, ("", "Yes.")),
        (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
        ("hm\n</think>\nYes </think>", True, ("hm", "Yes </think>")),
        ("<think>hm</think>Yes", True, ("hm", "Yes")),
        ("<think>hm, and", False, ("hm, and", "")),
        ("hm\n</thi", True, ("hm\n</thi", "")),
        ("<thi", False, ("", "<thi")),
        ("<thi", True, ("<thi", "")),
        ("<think>a</b </think> ", False, ("a</b", "")),
        ("</think>Yes", True, ("", "Yes")),
    ],
)
def test_reasoning_is_what_stands_before_its_end(text, is_open, want):
    for size in (1, 2, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(ReasoningParser(PlainText(), is_open), pieces) == want


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.booleans(), st.data())
@settings(deadline=None, max_examples=200)
def test_reasoning_does_not_depend_on_how_the_text_was_cut(parts, is_open, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got = read(ReasoningParser(PlainText(), is_open), pieces)
    assert got == read(ReasoningParser(PlainText(), is_open), [text])
    if "<think>" not in text and not is_open:
        assert got == ("", text)


def test_reasoning_is_said_as_soon_as_it_is_certain():
    parser = ReasoningParser(PlainText(), False)
    said = [parser.push(text) for text in ("<think>", "a ", "b</th", "e</think", ">", "\nc")]
    reasoning = [delta.reasoning for delta in said]
    assert reasoning == ["", "a", " b", "</the", "", ""]
    assert said[-1].text == "c"


def test_reasoning_and_a_call_may_end_and_begin_in_one_accepted_run():
    """Others lost the call (v#43221)."""
    text = '<think>look</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for size in (1, 7, len(text)):
        parser = ReasoningParser(ToolCallParser("hermes", {"f": {}}, None), False)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        said = sum(map(parser.push, pieces), Delta()) + parser.flush()
        assert (said.reasoning, said.text) == ("look", "")
        assert [(call.name, call.arguments) for call in said.tool_calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("name", "prompt", "want"),
    [
        ("qwen3", QWEN_THINKS, True),
        ("qwen3", QWEN_DOES_NOT, False),
        ("qwen3", "what is <think>?<|im_start|>assistant\n", False),
        (ALWAYS_OPEN, "<Assistant>", True),
        (ALWAYS_OPEN, "<Assistant><think>\n", True),
        (ALWAYS_OPEN, QWEN_DOES_NOT, False),
    ],
)
def test_the_prompt_says_whether_the_model_is_within_its_reasoning(name, prompt, want):
    assert name in REASONING_PARSERS
    assert is_open_after(prompt, name) == want
