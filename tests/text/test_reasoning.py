"""Reasoning parsers: separation from the content, independent of chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.options.server import REASONING_PARSERS
from shared.server.completions.parsers import new_parser
from shared.text.grammar_worker import GrammarRequest, OutputFormat
from shared.text.parsing.delta import Delta, OutputParser
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.parsing.reasoning import is_open_after, thinking_after
from shared.text.reasoning_formats import ALWAYS_OPEN, REASONING_FORMATS

QWEN_OPEN = "<|im_start|>assistant\n<think>\n"
QWEN_CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
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


def thinking(is_open: bool) -> OutputParser:
    return new_parser(None, OutputBuilder({}, None, False), is_open)


def read(parser: OutputParser, pieces: list[str]) -> tuple[str, str]:
    parsed = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut=False)
    return parsed.reasoning, parsed.text


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
def test_reasoning_parser_splits_at_end_tag(text, is_open, want):
    for size in (1, 2, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(thinking(is_open), pieces) == want


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.booleans(), st.data())
@settings(deadline=None, max_examples=200)
def test_reasoning_parser_independent_of_chunks(parts, is_open, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got = read(thinking(is_open), pieces)
    assert got == read(thinking(is_open), [text])
    if "<think>" not in text and not is_open:
        assert got == ("", text)


def test_reasoning_parser_streams_certain_text():
    parser = thinking(False)
    parsed = [parser.push(text) for text in ("<think>", "a ", "b</th", "e</think", ">", "\nc")]
    reasoning = [delta.reasoning for delta in parsed]
    assert reasoning == ["", "a", " b", "</the", "", ""]
    assert parsed[-1].text == "c"


def test_reasoning_end_and_call_parsed_from_one_chunk():
    """Another server lost the call (v#43221)."""
    text = '<think>look</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for size in (1, 7, len(text)):
        parser = new_parser("hermes", OutputBuilder({"f": {}}, None, False), False)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        parsed = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut=False)
        assert (parsed.reasoning, parsed.text) == ("look", "")
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", '{"a": 1}')]


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": '{"name": "f", "parameters": {"a": "x"}}',
}


@pytest.mark.parametrize("name", ["mistral", "gemma4", "cohere", "kimi_k3", "hy3"])
def test_reasoning_parser_reads_tags_of_format(name: str):
    tags = REASONING_FORMATS[name]
    text = f"{tags.begin}\nhm </think>\n{tags.end}\nYes."
    for size in (1, 3, len(text)):
        parser = new_parser(None, OutputBuilder({}, None, False), False, tags)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(parser, pieces) == ("hm </think>", "Yes.")
    assert is_open_after(f"<model>\n{tags.begin}\n", name) is True
    assert thinking_after(f"<model>\n{tags.begin}\n{tags.end}", name) is None
    assert thinking_after("<model>\n", name) == f"maybe {tags.begin}"
    form = OutputFormat(kind="choice", value=["a"])
    for lead in (tags.lead("open"), tags.lead("maybe")):
        written = GrammarRequest(form=form, calls=None, lead=lead).grammar()
        assert json.dumps(tags.end)[1:-1] in json.loads(written)["grammars"][0]["lark_grammar"]


@pytest.mark.parametrize("style", [None, "hermes"])
@pytest.mark.parametrize("name", ["cohere", "kimi_k3"])
def test_tags_of_content_are_dropped(name: str, style: str | None):
    tags = REASONING_FORMATS[name]
    for begin in tags.content_begins:
        text = f"{tags.begin}hm{tags.end}{begin}Yes <b>.\n{tags.content_ends[0]}"
        for size in (1, 3, len(text)):
            parser = new_parser(style, OutputBuilder({"f": {}}, None, False), False, tags)
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert read(parser, pieces) == ("hm", "Yes <b>.")
    form = OutputFormat(kind="choice", value=["a"])
    written = GrammarRequest(form=form, calls=None, lead=tags.lead("open")).grammar()
    assert json.dumps(tags.content_begins[0])[1:-1] in written.replace('\\"', '"')


def read_all(name: str, are_held: bool, text: str, size: int) -> tuple[str, str, list[str]]:
    parser = new_parser(name, OutputBuilder({"f": {}}, None, are_held), True)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parsed = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut=False)
    return parsed.reasoning, parsed.text, [call.arguments for call in parsed.tool_calls]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "num_calls"),
    [
        ("I look.\n{call}", "I look.", "", 1),
        ("I look.\n{call}\n{call}\n</think>\n\nSo.", "I look.", "So.", 2),
        ("{call}\n</think>\n\n{call}", "", "", 2),
        ("hm {call} so </think>", "hm", " so </think>", 1),
        ("Is <tool_call> right? {call}", "Is <tool_call> right?", "", 1),
        ("Is <tool_call> so?\n</think>\n\n<tool_call>", "Is <tool_call> so?", "<tool_call>", 0),
        ("hm <tool_call>", "hm <tool_call>", "", 0),
        ("hm <tool_call>\n</think>\n{call}", "hm <tool_call>", "", 1),
    ],
)
def test_tool_call_within_reasoning_ends_reasoning(name, text, reasoning, answer, num_calls):
    whole = text.replace("{call}", CALLS[name])
    for size in (1, 2, 5, len(whole)):
        got = read_all(name, False, whole, size)
        assert got[:2] == (reasoning, answer)
        assert [json.loads(arguments) for arguments in got[2]] == [{"a": "x"}] * num_calls


def test_incomplete_call_in_reasoning_preserves_later_call():
    draft = "hm <tool_call>\n<function=f>\n<parameter=a>\ny"
    text = f"{draft}\n</think>\n\n{CALLS['qwen3_coder']}"
    for size in (1, 5, 500):
        assert read_all("qwen3_coder", False, text, size) == (draft, "", ['{"a": "x"}'])


@pytest.mark.parametrize(
    ("name", "are_held"), [("llama3", False), ("hermes", True), ("qwen3_coder", True)]
)
def test_constrained_reasoning_keeps_call_text(name, are_held):
    for size in (1, 5, 500):
        got = read_all(name, are_held, f"hm\n{CALLS[name]}\n</think>\n{CALLS[name]}", size)
        assert got[:2] == (f"hm\n{CALLS[name]}", "")
        assert [json.loads(arguments) for arguments in got[2]] == [{"a": "x"}]


@pytest.mark.parametrize(
    ("name", "prompt", "want"),
    [
        ("qwen3", QWEN_OPEN, True),
        ("qwen3", QWEN_CLOSED, False),
        ("qwen3", "what is <think>?<|im_start|>assistant\n", False),
        (ALWAYS_OPEN, "<Assistant>", True),
        (ALWAYS_OPEN, "<Assistant><think>\n", True),
        (ALWAYS_OPEN, QWEN_CLOSED, False),
    ],
)
def test_is_open_after_detects_open_reasoning(name, prompt, want):
    assert name in REASONING_PARSERS
    assert is_open_after(prompt, name) == want


ASKED = "what is <think>?<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen3", ALWAYS_OPEN])
@pytest.mark.parametrize(
    ("before", "begun", "want"),
    [
        (ASKED, "<think>well", True),
        (ASKED, "<think>well</think>so", None),
        (ASKED, "<think>a</think>b<think>", True),
        (ASKED, "so ", None),
        (f"{ASKED}<think>\n", "well, ", True),
        (f"{ASKED}<think>\n\n</think>\n\n", " so", None),
        (f"{ASKED}<think>\nhm\n</think>\n\n", "<think>again", True),
    ],
)
def test_is_open_after_continued_message(name, before, begun, want):
    """Also if the template strips the content."""
    for prompt in (before + begun, before + begun.strip()):
        assert is_open_after(prompt, name, begun) is want
        assert thinking_after(prompt, name, begun) == ("open" if want else None)


@pytest.mark.parametrize("name", ["qwen3", ALWAYS_OPEN])
def test_is_open_after_empty_beginning_equals_none(name):
    for prompt in (ASKED, QWEN_OPEN, QWEN_CLOSED):
        assert is_open_after(prompt, name, "") == is_open_after(prompt, name)
