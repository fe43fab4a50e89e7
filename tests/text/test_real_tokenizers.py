"""Grammars on tokenizers of real models: random outputs that the parsers must read."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from transformers import AutoTokenizer

from shared.server.completions.parsers import new_parser
from shared.text.call_formats.registry import FORMATS
from shared.text.delimiters import CALL
from shared.text.grammar_worker import GrammarRequest, OutputFormat, ToolCallSpec
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.tokenizer import SPACE_MARK
from tests.support.call_schemas import SCHEMAS
from tests.support.call_texts import tags_of
from tests.support.conversations import count_refused
from tests.support.grammar_walks import walk
from tests.support.real_tokenizers import NAMES, RealTokenizer
from tests.support.special_token_tokenizer import MARKS

pytestmark = pytest.mark.matrix
SCHEMA = SCHEMAS["nested"]
TOOLS = [("trip", SCHEMA), ("node", SCHEMAS["recursive"])]
SEEDS = range(3)
OWN_BEGINNINGS = {
    **{"hermes": f"{CALL}\n", "qwen3_coder": f"{CALL}\n"},
    **{"llama3": '{"name":', "pythonic": "[", "harmony": "<|channel|>commentary to="},
}
BEGINNINGS = {name: OWN_BEGINNINGS.get(name) or each.openings[0] for name, each in FORMATS.items()}


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> RealTokenizer:
    return RealTokenizer.called(request.param)


def text_of(tokenizer: RealTokenizer, request: GrammarRequest, seed: int, begun: str = "") -> str:
    compiled = tokenizer.compiler.compile(request.grammar())
    tokens = walk(
        compiled,
        tokenizer.vocab,
        tokenizer.end,
        tokenizer.named,
        seed,
        most=8000,
        begun=begun,
        style=request.calls.style if request.calls else "",
    )
    return tokenizer.text_of(tokens)


@pytest.mark.parametrize("lead", [None, "open", "maybe"])
@pytest.mark.parametrize("free", [None, "text", "answer"])
@pytest.mark.parametrize("style", FORMATS)
def test_real_tokenizer_call_is_generated_and_parsed(tokenizer, style, free, lead):
    """The output begins with the token of the call's delimiter if the tokenizer has one."""
    if not all(map(tokenizer.shown.can_represent, FORMATS[style].marks)):
        assert (tokenizer.folder.name, style[:8]) in {
            ("llama2", "deepseek"),
            ("gemma3", "deepseek"),
        }
        return  # an error at startup
    calls = ToolCallSpec(style=style, tools=TOOLS, many=False, free=free)
    form = OutputFormat(kind="schema", value=SCHEMA) if free == "answer" else None
    tags = tags_of(style)
    end = f"{tags.end}<|start|>assistant" if tags.has_channels else tags.end
    thought = {None: "", "open": f"hm{end}", "maybe": f"{tags.begin}hm{end}"}[lead]
    key = lead and tags.lead(lead)
    for seed in SEEDS:
        begun = thought + BEGINNINGS[style] if seed or free else ""
        text = text_of(tokenizer, GrammarRequest(form=form, calls=calls, lead=key), seed, begun)
        builder = OutputBuilder(dict(TOOLS), None, are_calls_constrained=True)
        parser = new_parser(style, builder, None if lead is None else lead == "open", tags)
        found = parser.push(text) + parser.flush(was_cut=False)
        may_speak = free == "text" or tags.has_channels  # gpt-oss may announce a call
        assert may_speak or not found.text.strip()  # a token may span a delimiter's end
        assert not begun or found.reasoning == ("hm" if lead else "")
        (call,) = found.tool_calls
        jsonschema.validate(json.loads(call.arguments), dict(TOOLS)[call.name])


@pytest.mark.parametrize("lead", [None, "open", "maybe"])
def test_real_tokenizer_schema_after_reasoning_is_valid(tokenizer, lead):
    for seed in SEEDS:
        form = OutputFormat(kind="schema", value=SCHEMA)
        text = text_of(tokenizer, GrammarRequest(form=form, calls=None, lead=lead), seed)
        parser = new_parser(
            None, OutputBuilder({}, None, False), None if lead is None else lead == "open"
        )
        found = parser.push(text) + parser.flush(was_cut=False)
        jsonschema.validate(json.loads(found.text), SCHEMA)


NAMES_OF_TOKENS = [
    *sorted(mark for mark in MARKS if SPACE_MARK not in mark),
    "<b>",
    "</code>",
    "<|im_end|>",
    "<|eot_id|>",
    "<eos>",
    "</s>",
]
FORMS = [
    ("choice", NAMES_OF_TOKENS, "|".join(map(re.escape, NAMES_OF_TOKENS))),
    ("regex", r"<think>[a-c]{3}\n\n</think> é{2}", r"<think>[a-c]{3}\n\n</think> é{2}"),
    ("lark", 'start: "<b>" /[0-9]{2}/ "</b>\\n"', r"<b>[0-9]{2}</b>\n"),
    ("lark", 'root ::= "</tool_call>" [x-z]', "</tool_call>[x-z]"),
    ("schema", {"enum": NAMES_OF_TOKENS}, "|".join(f'"{re.escape(n)}"' for n in NAMES_OF_TOKENS)),
]


@pytest.mark.parametrize(("kind", "value", "pattern"), FORMS, ids=lambda x: str(x)[:20])
def test_real_tokenizer_writes_names_of_tokens(tokenizer, kind, value, pattern):
    for seed in range(8):
        text = text_of(
            tokenizer,
            GrammarRequest(form=OutputFormat(kind=kind, value=value), calls=None, lead=None),
            seed,
        )
        assert re.fullmatch(pattern, text), text


def test_render_keeps_all_content_or_raises(tokenizer):
    """Uses the model's own template; transformers confirms each dropped value."""
    if not tokenizer.shown.has_chat_template:
        pytest.skip("the tokenizer has no chat template")
    oracle, render = AutoTokenizer.from_pretrained(tokenizer.folder), tokenizer.shown.render_chat
    refused = count_refused(render, oracle)
    assert min(refused[False], refused[True]) >= 10
