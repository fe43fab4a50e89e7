"""Outputs of gpt-oss: channels, calls and their grammars."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import pytest

from shared.text.chat_template import ChatTemplate, Conversation
from shared.text.grammar import CompiledGrammar, Compiler
from shared.text.grammar_worker import GrammarRequest, OutputFormat, ToolCallSpec
from shared.text.parsing.delta import Delta
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.parsing.reasoning import is_open_after, thinking_after
from shared.text.reasoning_formats import HARMONY
from shared.text.text_parsers import new_parser
from tests.support.call_texts import FUNCTIONS, cut
from tests.support.http_fixtures import byte_tokenizer

PROMPT = "<|start|>system<|message|>...<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
SPOKEN = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
OTHER_CALL = " to=functions.stop<|channel|>commentary json<|message|>{}"
UNKNOWN = CALL.replace("stop", "frog")
LEAD = HARMONY.lead("maybe")


def read(
    pieces: list[str], *, functions: Any = FUNCTIONS, is_open: bool = False, was_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]], int]:
    calls = "harmony" if functions else None
    parser = new_parser(calls, OutputBuilder(functions, None, False), is_open, HARMONY)
    found = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut)
    said = [(call.name, call.arguments) for call in found.tool_calls]
    return found.text, found.reasoning, said, parser.num_malformed_calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "malformed"),
    [
        (f"{THOUGHT}{FINAL}Yes.", "Yes.", "hm", 0, 0),
        (f"{THOUGHT}{FINAL}Yes.<|return|>", "Yes.", "hm", 0, 0),
        (f"{FINAL} {{a}} \n", " {a} \n", "", 0, 0),
        ("Yes, in a continued message.", "Yes, in a continued message.", "", 0, 0),
        (f"{THOUGHT}{CALL}", "", "hm", 1, 0),
        (f"{THOUGHT}{OTHER_CALL}<|call|>", "", "hm", 1, 0),
        (f"{THOUGHT}{SPOKEN}{CALL}<|call|>", "I look.", "hm", 1, 0),
        (f"{THOUGHT}{SPOKEN}{THOUGHT}{FINAL}So.", "I look.\n\nSo.", "hm\n\nhm", 0, 0),
        (f"{CALL}<|call|><|start|>assistant{CALL}", "", "", 2, 0),
        (f"{THOUGHT}{UNKNOWN}", UNKNOWN, "hm", 0, 1),
        (f"{CALL[:-2]}frog", f"{CALL[:-2]}frog", "", 0, 1),
        (f"{CALL[:-2]}{{frog}}", "frog}", "", 1, 1),
        (f"{CALL}}}<|call|>", "}", "", 1, 0),  # a stray brace is not a call
        ("<|channel|>thoughts<|message|>So.", "So.", "", 0, 0),
        ("<|channel|>final oh no<|message|>So.", "<|channel|>final oh no<|message|>So.", "", 0, 0),
        ("<|message|>So.", "So.", "", 0, 0),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>So.", "So.", "hm", 0, 0),
    ],
)
def test_output_is_split_by_channels(text, content, reasoning, calls, malformed) -> None:
    for size in (1, 2, 7, len(text)):
        found = read([text[at : at + size] for at in range(0, len(text), size)])
        if "{frog}" in text:  # the arguments break off after their brace
            assert found == (content, reasoning, [("stop", "{")], malformed)
        else:
            assert found == (content, reasoning, [("stop", "{}")] * calls, malformed)


def test_channels_are_separated_without_functions() -> None:
    assert read([f"{THOUGHT}{FINAL}Yes."], functions={})[:2] == ("Yes.", "hm")
    assert read([f"{THOUGHT}{CALL}"], functions={})[:2] == (CALL, "hm")


def test_output_may_begin_within_reasoning() -> None:
    assert read([f"so<|end|><|start|>assistant{FINAL}Yes."], is_open=True)[:2] == ("Yes.", "so")


@pytest.mark.parametrize(
    "text", ["<|start|>assis", "<|start|>assistant<|channel|>final", CALL[:-2]]
)
def test_cut_header_is_dropped(text: str) -> None:
    whole = f"{FINAL}So.<|end|>{text}"
    assert read([whole], was_cut=True) == ("So.", "", [], 0)
    assert text in read([whole])[0]


def test_random_parts_parse_alike_at_every_split() -> None:
    parts = [THOUGHT, SPOKEN, FINAL, CALL, OTHER_CALL, UNKNOWN, "<|end|>", "<|start|>", "{", " a\n"]
    for seed in range(400):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(parts, k=chosen.randrange(1, 7)))
        is_open, was_cut = chosen.random() < 0.2, chosen.random() < 0.3
        want = read([text], is_open=is_open, was_cut=was_cut)
        assert read(cut(text, chosen), is_open=is_open, was_cut=was_cut) == want, text


def test_prompt_sets_state_of_output() -> None:
    assert is_open_after(PROMPT, "harmony") is False
    assert thinking_after(PROMPT, "harmony") == LEAD
    assert thinking_after(f"{PROMPT}{FINAL}So", "harmony", "So") is None
    assert is_open_after(f"{PROMPT}<|channel|>analysis<|message|>So", "harmony", "So") is True


@lru_cache
def compiler() -> Compiler:
    return Compiler(byte_tokenizer().to_str(), 300)


def follows(compiled: CompiledGrammar, text: str) -> bool:
    matcher = compiled.matcher()
    return all(map(matcher.take, text.encode())) and matcher.is_satisfied


def grammar(free: str | None, form: OutputFormat | None) -> CompiledGrammar:
    calls = ToolCallSpec(style="harmony", tools=[("stop", FUNCTIONS["stop"])], many=True, free=free)
    request = GrammarRequest(form=form, calls=calls, lead=LEAD)
    return compiler().compile(request.grammar())


def test_forced_call_follows_other_channels() -> None:
    compiled = grammar(None, None)
    for lead in ("", THOUGHT, SPOKEN, THOUGHT + SPOKEN + THOUGHT):
        assert follows(compiled, lead + CALL)
        assert follows(compiled, lead + OTHER_CALL)
        for text in (f"{FINAL}So.", UNKNOWN, CALL[:-2], f"{CALL}x", ""):
            assert not follows(compiled, lead + text), text


def test_call_beside_text_is_constrained() -> None:
    compiled = grammar("text", None)
    for lead in ("", THOUGHT + SPOKEN):
        for text in (CALL, OTHER_CALL, f"{FINAL}So."):
            assert follows(compiled, lead + text), text
        for text in (UNKNOWN, f"{FINAL}So.<|end|><|start|>assistant{UNKNOWN}"):
            assert not follows(compiled, lead + text), text


def test_schema_constrains_final_channel() -> None:
    form = OutputFormat(kind="schema", value={"enum": ["yes"]})
    alone = compiler().compile(GrammarRequest(form=form, calls=None, lead=LEAD).grammar())
    for compiled in (alone, grammar("answer", form)):
        for lead in ("", THOUGHT + SPOKEN):
            assert follows(compiled, f'{lead}{FINAL}"yes"')
            assert not follows(compiled, f'{lead}{FINAL}"no"')
            assert not follows(compiled, f'{lead}"yes"')
        for tag in ("<|start|>", "<|channel|>", "<|call|>", "<|return|>"):
            thought = THOUGHT.replace("hm", f"hm {tag} hm")
            assert not follows(compiled, f'{thought}{FINAL}"yes"'), tag
        assert follows(compiled, THOUGHT + CALL) == (compiled is not alone)


TEMPLATE = """
{%- for m in messages %}
{%- if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if m.content or m.thinking %}{{- '[' + (m.content or m.thinking) + ']' }}{% endif %}
{{- call.function.name + call.function.arguments | tojson }}
{%- else %}{{- m.role + ':' + m.content + '|' }}
{%- endfor %}
{%- endfor %}
"""
"""Form of gpt-oss's template: reads reasoning as `thinking`, and rejects text next to it."""


@pytest.mark.parametrize("content", ["", "I look."])
def test_reasoning_of_calls_is_rendered(content: str) -> None:
    function = {"name": "stop", "arguments": {}}
    called = {"id": "call_1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Stop?"},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "hm",
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    prompt = ChatTemplate(TEMPLATE, {}).render(Conversation(messages))
    thought = f"hm\n\n{content}" if content else "hm"
    assert prompt == f"user:Stop?|[{thought}]stop{json.dumps({})}tool:done|"
