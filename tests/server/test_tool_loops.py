"""Loops of tool calls with the SDKs of OpenAI and Anthropic, in the formats of gpt-oss and Gemma 4.

A script answers the unmodified loops of the example; a model with random weights chooses calls
under the grammar of their schemas.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from examples.tool_loop import LOOPS, QUESTION, call_tool
from shared.text.call_formats.registry import FORMATS, marks_of
from tests.support.call_templates import CALL_TEMPLATES
from tests.support.http_fixtures import SPECIAL, Server, save_tokenizer, serving
from tests.support.scripted_model import serving_script
from tests.support.special_token_tokenizer import HARMONY_END, harmony_tokenizer, marked_tokenizer
from tests.support.tiny_models import write_tiny

TURN, ANSWER = "<|end|><|start|>assistant", "There are 78 seats."
THOUGHTS = {
    "harmony": f"<|channel|>analysis<|message|>I multiply.{TURN}",
    "gemma4": "<|channel>thought\nI multiply.<channel|>",
}
SPOKEN = {
    "harmony": f"<|channel|>commentary<|message|>Once more.{TURN}",
    "gemma4": "Once more.",
}
FINALS = {"harmony": f"<|channel|>final<|message|>{ANSWER}", "gemma4": ANSWER}
MODELS = {"harmony": "gpt_oss", "gemma4": "gemma4"}
ENDS = {"harmony": HARMONY_END, "gemma4": SPECIAL[0]}
FACTORS = [(6, 13), (2, 39)]


def flags_of(name: str) -> list[str]:
    return ["--tool-call-parser", name, "--reasoning-parser", name]


def tokenizer_of(name: str) -> Tokenizer:
    if name == "harmony":
        return harmony_tokenizer()
    return marked_tokenizer(special=True, marks=marks_of(name, name))


def script_of(name: str) -> list[str]:
    first, second = (FORMATS[name].write([("multiply", {"a": a, "b": b})]) for a, b in FACTORS)
    return [THOUGHTS[name] + first, SPOKEN[name] + second, THOUGHTS[name] + FINALS[name]]


@pytest.fixture(scope="module", params=MODELS)
def scripted(request, tmp_path_factory) -> Iterator[Server]:
    name, folder = request.param, tmp_path_factory.mktemp("model")
    how = {"tokenizer": tokenizer_of(name), "end": ENDS[name]}
    with serving_script(folder, script_of(name), *flags_of(name), **how) as running:
        yield running


@pytest.mark.parametrize("api", LOOPS)
def test_tool_loop_of_sdk_reaches_last_answer(api, scripted):
    options = Namespace(question=QUESTION, max_rounds=3, model=None)
    options.api_key, options.timeout = None, 60
    assert LOOPS[api](scripted.url, options) == ANSWER


def test_streamed_tool_loop_separates_reasoning_text_and_calls(scripted):
    """Whole and streamed messages are equal, and each result is that of the call's arguments."""
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none")
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools: Any = [{"type": "function", "function": {"name": "multiply", "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    seen, results = [], []
    for _ in range(3):
        asked: Any = {"model": "default", "messages": messages, "tools": tools}
        whole = client.chat.completions.create(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            deltas = [x.chunk.choices[0].delta for x in stream if x.type == "chunk"]
            message = stream.get_final_completion().choices[0].message
        reasoning = "".join((x.model_extra or {}).get("reasoning_content") or "" for x in deltas)
        calls = message.tool_calls or []
        assert (message.content or "") == (whole.content or "")
        assert reasoning == ((whole.model_extra or {}).get("reasoning_content") or "")
        assert [x.function.arguments for x in calls] == [
            x.function.arguments for x in whole.tool_calls or []
        ]
        seen.append((reasoning, message.content or "", len(calls)))
        messages.append(whole)
        for call in whole.tool_calls or []:
            results.append(call_tool("multiply", json.loads(call.function.arguments)))
            result = {"role": "tool", "tool_call_id": call.id, "content": results[-1]}
            messages.append(result)
    assert seen == [("I multiply.", "", 1), ("", "Once more.", 1), ("I multiply.", ANSWER, 0)]
    assert results == ["78", "78"]


PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def strict(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PLACE, "strict": True}}


@pytest.fixture(scope="module", params=MODELS)
def drawing(request, tmp_path_factory) -> Iterator[tuple[str, Server]]:
    """A model with random weights in a format."""
    name, folder = request.param, tmp_path_factory.mktemp("model")
    write_tiny(folder, MODELS[name], 7)
    save_tokenizer(folder, tokenizer_of(name), ENDS[name])
    template = CALL_TEMPLATES[name][1]
    if name == "harmony":
        template = template.replace("'<|assistant|>'", "'<|start|>assistant'")
    (folder / "chat_template.jinja").write_text(template)
    line = ["--port", "0", "--model-path", str(folder), "--max-running-requests", "4"]
    line += ["--grammar-backend", "llguidance", "--context-length", "1024", *flags_of(name)]
    with serving(["-m", "torch_impl.serve", *line]) as running:
        yield name, running


@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_calls_of_random_model_fit_strict_schema(choice, drawing):
    """And are rendered into the next prompt as the model wrote them."""
    name, server = drawing
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tools: Any = [strict("weather"), strict("news")]
    forced: Any = {
        "required": "required",
        "named": {"type": "function", "function": {"name": "news"}},
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "default", "messages": messages, "tools": tools, "n": 4, "seed": 3}
    tokens = server.post("/tokenize", prompt="<|end|>").json()["tokens"]
    asked["logit_bias"] = {str(tokens[0]): 5} if name == "harmony" else {}
    answer = client.chat.completions.create(
        **asked, tool_choice=forced[choice], temperature=2.0, max_tokens=300
    )
    whole = [x.message for x in answer.choices if x.finish_reason == "tool_calls"]
    assert whole
    assert all(x.message.tool_calls for x in answer.choices if x.finish_reason != "length")
    for message in whole:
        calls = message.tool_calls or []
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), PLACE)
            assert call.function.name in (("news",) if choice == "named" else ("news", "weather"))
        results = [{"role": "tool", "tool_call_id": x.id, "content": "sun"} for x in calls[:1]]
        turn = {"role": "assistant", "tool_calls": [x.model_dump() for x in calls[:1]]}
        ids = server.post("/tokenize", messages=[*messages, turn, *results], tools=tools).json()
        prompt = server.post("/detokenize", tokens=ids["tokens"]).json()["prompt"]
        written = [(x.function.name, json.loads(x.function.arguments)) for x in calls[:1]]
        assert FORMATS[name].write(written) in prompt
        asked |= {"messages": [*messages, turn, *results], "n": 1, "max_tokens": 2}
        assert client.chat.completions.create(**asked).usage.completion_tokens in (1, 2)
