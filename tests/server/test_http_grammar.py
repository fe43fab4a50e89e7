"""Answers that are held to a form, from a model that knows none: a random one, through HTTP.

What the form leaves open ends soon, so that an answer comes to its end within its bound.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from shared.server.api.request_parsing import parse
from shared.server.completions.grammars import held_calls
from shared.server.protocol.openai_types import ChatRequest
from shared.text.grammar import Compiler
from shared.text.grammar_worker import DEADLINE_S
from shared.text.tool_call_grammar import CallableFunction, grammar_of
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    USER,
    Server,
    byte_tokenizer,
    save_tokenizer,
    serving,
)
from tests.support.special_token_tokenizer import marked_tokenizer
from tests.support.tiny_models import write_tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools or '' }}"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% else %}<think></think>"
    "{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def schema_format(**more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "thing", **more}}


FORMAT = schema_format(schema=SCHEMA)
MAX_GAP_S = 0.05
TRIES = 5
SAMPLED: Any = {"temperature": 1.0, "max_tokens": 500}


def start(folder: Path) -> Any:
    write_tiny(folder, "llama", 5)
    save_tokenizer(folder, marked_tokenizer(special=True))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    line = ["--port", "0", "--model-path", str(folder), "--speculative-algorithm", "NGRAM"]
    line += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    line += ["--grammar-backend", "llguidance", "--max-running-requests", "4"]
    return serving(["-m", "torch_impl.serve", *line])


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def content_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


# Forms


@pytest.mark.parametrize("more", [{"temperature": 0}, {"top_p": 0.9, "presence_penalty": 1.5}])
def test_json_schema_response_validates(server, more):
    for seed in range(2):
        asked = {**SAMPLED, "seed": seed, **more}
        answer = server.post(CHAT, messages=USER, response_format=FORMAT, **asked)
        jsonschema.validate(json.loads(content_of(answer)), SCHEMA)


def test_openai_client_parses_pydantic_response_format(client):
    from pydantic import BaseModel, ConfigDict

    class Thing(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_new: bool
        size: int

    schema = Thing.model_json_schema()
    schema["properties"]["size"] |= {"minimum": 0, "maximum": 99}
    form = schema_format(schema=schema, strict=True)
    answer = client.chat.completions.create(
        messages=USER, model="default", seed=4, response_format=form, max_tokens=200
    )
    assert 0 <= Thing.model_validate_json(answer.choices[0].message.content or "").size <= 99


def test_json_schema_choices_validate_with_logprobs(server):
    asked = {**SAMPLED, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2, "min_tokens": 4}
    answer = server.post(CHAT, messages=USER, response_format=FORMAT, **asked).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1
    for choice, text in zip(answer["choices"], texts, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        told = choice["logprobs"]["content"]
        assert "".join(part["token"] for part in told) == text
        # Of the model's own law: what the form forbids may be the likelier.
        assert all(len(part["top_logprobs"]) == 2 for part in told)


FORMS = [
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ({"structured_outputs": {"choice": ["yes", "no", "may/be"]}}, "yes|no|may/be"),
    ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "!"'}}, "a[bc]!"),
    ({"guided_regex": "(ab){2}"}, "abab"),
    ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
    ({"guided_json": SCHEMA}, None),
    ({"guided_choice": ["one"]}, "one"),
    ({"response_format": FORMAT}, None),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda x: str(x)[:40])
def test_structured_output_fields_constrain_completion(server, form, pattern):
    answer = server.complete("once", seed=2, **SAMPLED, **form)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    if pattern is None:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    else:
        assert re.fullmatch(pattern, choice["text"])


def test_json_object_format_returns_object(server):
    for seed in range(40):
        asked = {**SAMPLED, "seed": seed, "response_format": {"type": "json_object"}}
        choice = server.post(CHAT, messages=USER, **asked).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
            return
    raise AssertionError("no answer came to its end")


def test_json_schema_stream_equals_whole_response(server):
    asked = {"messages": USER, "response_format": FORMAT, "seed": 7, **SAMPLED}
    whole = content_of(server.post(CHAT, **asked))
    events = server.stream(CHAT, **asked)
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == whole


def test_guided_regex_supports_ignore_eos_and_stop(server):
    asked = {**SAMPLED, "seed": 3, "guided_regex": "[ab]{9}cd"}
    assert server.complete("once", ignore_eos=True, **asked)["choices"][0]["text"].endswith("cd")
    cut = server.complete("once", stop="c", **asked)["choices"][0]
    assert (len(cut["text"]), cut["finish_reason"]) == (9, "stop")


def test_structured_output_equals_plain_decoding(server):
    asked = {**SAMPLED, "seed": 11, "structured_outputs": {"json": SCHEMA}}
    drafted = server.complete("once", **asked)
    plain = server.complete("once", speculative={"enabled": False}, **asked)
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]


# Tools


def calls_of(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in called]


@pytest.mark.parametrize("seed", range(2))
def test_tool_choice_required_returns_valid_call(server, seed):
    asked = {"tools": [tool("weather"), tool("news")], "tool_choice": "required"}
    more = {"parallel_tool_calls": False, "seed": seed, **SAMPLED}
    ((name, arguments),) = calls_of(server.post(CHAT, messages=USER, **asked, **more))
    assert name in ("weather", "news")
    jsonschema.validate(arguments, CITY)


def test_named_tool_choice_calls_that_function(client):
    chunks = client.chat.completions.create(
        model="default",
        messages=USER,
        tools=[tool("weather"), tool("news")],
        tool_choice=named("news"),
        stream=True,
        max_tokens=200,
    )
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert parts[0].function.name == "news"
    jsonschema.validate(json.loads("".join(p.function.arguments or "" for p in parts)), CITY)


def test_strict_tool_with_auto_choice_returns_200(server):
    asked = {"tools": [tool("weather", strict=True)], "stop": ["q", "z", "x"], **SAMPLED}
    answer = server.post(CHAT, messages=USER, seed=1, **asked)
    assert answer.status_code == 200, answer.text


def allowed(mode: str, *names: str) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(named, names)]}}


@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_limit_calls_and_preserve_prompt(server, is_flat):
    tools = [tool("weather"), tool("news"), tool("time")]
    choice = allowed("required", "news", "time")
    if is_flat:  # as the Responses API writes it
        names = [{"type": "function", "name": name} for name in ("news", "time")]
        choice = {"type": "allowed_tools", "mode": "required", "tools": names}
    prompts, called = set(), set()
    for seed in range(4):
        asked = {"messages": USER, "tools": tools, "seed": seed, **SAMPLED}
        answer = server.post(CHAT, **asked, tool_choice=choice)
        prompts.add(answer.json()["usage"]["prompt_tokens"])
        called |= {name for name, _ in calls_of(answer)}
    assert called <= {"news", "time"}
    usage = server.post(CHAT, messages=USER, tools=tools, max_tokens=1).json()["usage"]
    assert prompts == {usage["prompt_tokens"]}


def test_allowed_tools_auto_grammar_excludes_other_tools():
    """By the grammar itself: a random model would call seldom."""
    names = ["weather", "news"]
    asked = {"messages": USER, "tools": [*map(tool, names)], "tool_choice": allowed("auto", "news")}
    request = parse(json.dumps(asked).encode(), ChatRequest)
    calls = held_calls(request, "hermes")
    assert calls is not None
    tools = [CallableFunction(name=name, schema=schema) for name, schema in calls.tools]
    grammar = grammar_of("hermes", tools, many=calls.many, free=calls.free, answer=None)
    compiled = Compiler(byte_tokenizer().to_str(), 300).compile(grammar)
    for text, is_right in (
        ("It is fine.", True),
        ('Yes <tool_call>\n{"name": "news", "arguments": {"a": 1}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', False),
    ):
        matcher = compiled.matcher()
        taken = all(map(matcher.take, text.encode()))
        assert (taken and matcher.is_satisfied) is is_right, text


# What is refused


REFUSED = [
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": schema_format()}),
    ("response_format", {"response_format": schema_format(schema={"type": "frog"})}),
    ("guided_regex", {"guided_regex": "(a"}),
    ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("structured_outputs.whitespace", {"structured_outputs": {"json": {}, "whitespace": " "}}),
    ("guided_grammar", {"guided_grammar": "start: nobody"}),
    ("guided_grammar", {"guided_grammar": "???"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [tool("a")], "tool_choice": named("b")}),
    ("tool_choice", {"tools": [tool("a")], "tool_choice": allowed("auto", "a", "b")}),
    ("tool_choice", {"tool_choice": allowed("auto", "a")}),
    ("tool_choice.allowed_tools.mode", {"tool_choice": allowed("never", "a")}),
    ("tool_choice.allowed_tools.tools", {"tool_choice": allowed("auto")}),
    ("tools", {"tools": [tool("a", strict=True, parameters={"type": "array"})]}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda x: str(x)[:50])
def test_invalid_structured_output_returns_400_with_param(server, param, fields):
    answer = server.post(CHAT, messages=USER, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert "\n" not in error["message"]


def test_guided_regex_rejects_one_token_prompt(server):
    answer = server.post(COMPLETIONS, prompt=[5], guided_regex="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


# Bombs

BOMBS: dict[str, tuple[dict[str, Any], str | None]] = {
    "regex": ({"guided_regex": "(((a{1,900}){1,900}){1,900}|b)*c{900}" * 20}, None),
    "schema": (
        {
            "guided_json": {
                "allOf": [
                    {"anyOf": [{"type": "string", "pattern": f"^.*{a}{b}.*$"} for b in "abcdefgh"]}
                    for a in "abcdefghij"
                ]
            }
        },
        "schema too large",
    ),
    "grammar": (
        {
            "guided_grammar": "\n".join(
                ["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)), 'a40: "x" | "y"']
            )
        },
        None,
    ),
    "gbnf": ({"guided_grammar": "root ::= " + "(" * 30000}, "neither Lark nor GBNF"),
    "large": ({"guided_regex": "a" * 200_000}, "should have at most"),
    "many": (
        {"guided_grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(9000))},
        "the grammar exceeds its work limit",
    ),
}
"""Each with a part of the sentence that refuses it; None: the library makes light of it."""


@pytest.mark.parametrize("name", BOMBS)
def test_grammar_bomb_times_out_without_blocking(server, name):
    """One sentence, whichever bound it meets; and the loop answers others meanwhile."""
    gaps: list[float] = []
    while len(gaps) < TRIES and min(gaps, default=1.0) >= MAX_GAP_S:
        gaps.append(_worst_gap(server, *BOMBS[name]))
    assert min(gaps) < MAX_GAP_S
    assert server.complete("once", max_tokens=2, guided_regex="ab")["choices"][0]["text"] == "ab"


def _worst_gap(server: Server, bomb: dict[str, Any], reason: str | None) -> float:
    answers: list[httpx.Response] = []
    began = time.monotonic()
    thread = threading.Thread(
        target=lambda: answers.append(server.post(COMPLETIONS, prompt="once", seed=1, **bomb))
    )
    gaps = [0.0]
    with httpx.Client(base_url=server.url) as others:
        others.get("/health")
        thread.start()
        while thread.is_alive():
            asked = time.monotonic()
            assert others.get("/health").status_code == 200
            gaps.append(time.monotonic() - asked)
            time.sleep(0.005)
    assert time.monotonic() - began < DEADLINE_S + 3
    if reason is None:
        assert answers[0].status_code == 200, answers[0].text
        return max(gaps)
    assert answers[0].status_code == 400, answers[0].text
    error = answers[0].json()["error"]
    assert error["param"] == next(iter(bomb))
    assert reason in error["message"]
    assert len(error["message"]) < 500
    return max(gaps)


def test_disconnect_during_structured_output_frees_request(server):
    body = {"prompt": "once", "guided_regex": "a{1,400}", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as answer:
        next(answer.iter_lines())
    server.wait_for_metric("tandem:num_requests_running", 0)


def test_guided_regex_applies_after_reasoning(server):
    """That the prompt has opened; a random model thinks to the end of its bound."""
    opened = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {"messages": USER, "guided_regex": "[ab]{3}", **SAMPLED, "max_tokens": 30}
    (choice,) = server.post(CHAT, seed=1, **asked, **opened).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["reasoning_content"]) > 5
    assert not choice["message"]["content"]
    assert re.fullmatch("[ab]{3}", content_of(server.post(CHAT, seed=1, **asked)))
