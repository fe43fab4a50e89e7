"""Vision-language model over HTTP: outputs equal to the specification, also with drafts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.http_fixtures import CHAT, COMPLETIONS, Server, serving
from tests.support.images import rgb, stored, url_of
from tests.support.vlm import IMAGE
from tests.support.vlm_servers import (
    LONG,
    ONE,
    OTHER,
    conversation,
    folder_with_a_tokenizer,
)

TOKENS = 12
NEXTN = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"]
CHAIN = [*NEXTN, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
TREE = [*NEXTN, "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
# Few pages need one page table length only, which halves the programs to compile.
SMALL = ["--max-running-requests", "2", "--context-length", "224", "--page-size", "16"]
SMALL += ["--chunked-prefill-size", "64", "--dtype", "float32"]
GRAMMAR_FLAGS = ["--grammar-backend", "llguidance", "--tool-call-parser", "hermes"]
QUICK_JAX = "tests.support.serve_fast_compile"
SERVERS = [
    pytest.param(("torch_impl.serve", [*CHAIN, *GRAMMAR_FLAGS]), id="torch"),
    pytest.param((QUICK_JAX, CHAIN), id="jax"),
    pytest.param(
        ("tests.support.serve_reference", CHAIN), id="reference", marks=pytest.mark.matrix
    ),
    pytest.param((QUICK_JAX, [*CHAIN, *GRAMMAR_FLAGS]), id="jax grammar", marks=pytest.mark.matrix),
    *(
        pytest.param((module, flags), id=f"{side} {name}", marks=pytest.mark.matrix)
        for side, module in (("torch", "torch_impl.serve"), ("jax", QUICK_JAX))
        for name, flags in (("plain", []), ("tree", TREE))
    ),
]


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory) -> Iterator[Server]:
    module, flags = request.param
    folder = folder_with_a_tokenizer(tmp_path_factory.mktemp("sees"))
    command = ["-m", module, "--model-path", str(folder), "--port", "0", *SMALL, *flags]
    with serving(command) as running:
        yield running


def answer_to(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    fields = {"temperature": 0, "max_tokens": TOKENS, "return_token_ids": True, **more}
    answer = server.post(CHAT, messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_image_outputs_match_spec(server):
    """One and two images, parallel requests, and an image across prefill chunks."""
    asked = [
        conversation("what? ", ONE),
        conversation("a" * 40, ONE, "b", LONG, "and so on, and so on"),
        conversation("what? ", OTHER),
        conversation("only text"),
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: answer_to(server, one[0]), asked))
    for answer, (_, prompt) in zip(answers, asked, strict=True):
        assert answer["choices"][0]["token_ids"] == prompt.text(TOKENS)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt.tokens)
        assert usage["prompt_tokens_details"]["image_tokens"] == prompt.tokens.count(IMAGE)


def test_prefix_cache_distinguishes_images_and_reuses_encoding(server):
    rest = " and then some words, so that pages behind the image are full"
    (one, first), (two, second) = (conversation(each, rest) for each in (ONE, OTHER))
    assert first.tokens == second.tokens
    texts, cached = [], []
    for messages in (one, two, one):
        before = server.metrics()["tandem:mm_encoder_images_total"]
        answer = answer_to(server, messages)
        texts.append(answer["choices"][0]["token_ids"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert texts == [first.text(TOKENS), second.text(TOKENS), first.text(TOKENS)]
    assert cached[1] < 8, "a page of another image was reused"
    assert cached[2] >= 16
    assert server.metrics()["tandem:mm_encoder_images_total"] == before


@pytest.fixture
def grammar_server(server, request) -> Server:
    """Returns the server if it has a grammar backend."""
    if GRAMMAR_FLAGS[0] not in request.node.callspec.params["server"][1]:
        pytest.skip("a start without grammars")
    return server


def test_guided_regex_after_image_matches_spec(grammar_server):
    texts = []
    for image in (ONE, OTHER):
        messages, prompt = conversation("what? ", image)
        answer = answer_to(grammar_server, messages, guided_regex="[a-p]{20}")
        texts.append(answer["choices"][0]["token_ids"])
        assert texts[-1] == prompt.text(TOKENS, range(ord("a"), ord("q")))
    assert texts[0] != texts[1], "the output does not depend on the image"


def test_required_tool_call_after_image_is_valid(grammar_server):
    parameters = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    called = {"name": "draw", "parameters": parameters}
    messages, _ = conversation(ONE, "draw it")
    asked = {"tools": [{"type": "function", "function": called}], "tool_choice": "required"}
    more = {"parallel_tool_calls": False, "max_tokens": 180, "temperature": 1.0, "seed": 1}
    answer = answer_to(grammar_server, messages, **asked, **more)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "draw"
    assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")


def in_all_apis(text: str, url: str) -> tuple[Any, Any, Any]:
    """Returns a message with an image for chat, the Responses API and the Messages API."""
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    chat = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    items = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}]
    blocks = [{"type": "text", "text": text}, {"type": "image", "source": source}]
    return tuple([{"role": "user", "content": content}] for content in (chat, items, blocks))


@contextlib.contextmanager
def sdks(server: Server) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as first,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as second,
    ):
        yield first, second


GREEDY: Any = {"model": "default", "temperature": 0}
GREEDY_MESSAGE: Any = {"model": "default", "extra_body": {"temperature": 0}}


def test_image_answers_of_sdks_equal_chat(server):
    """Text and prompt tokens, complete and streamed."""
    chat, items, blocks = in_all_apis("what? ", url_of(stored(rgb(ONE))))
    want = answer_to(server, chat)
    text, tokens = want["choices"][0]["message"]["content"], want["usage"]["prompt_tokens"]
    asked: Any = {"input": items, "max_output_tokens": TOKENS, **GREEDY}
    sent: Any = {"messages": blocks, "max_tokens": TOKENS, **GREEDY_MESSAGE}
    with sdks(server) as (client, other):
        response = client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)
        message = other.messages.create(**sent)
        with other.messages.stream(**sent) as found:
            assembled = found.get_final_message()
        counted = other.messages.count_tokens(messages=blocks, model="default")
    assert last.type == "response.incomplete"  # by the limit
    for each in (response, last.response):
        assert (each.output_text, each.usage.input_tokens) == (text, tokens)
    for each in (message, assembled):
        cached = each.usage.cache_read_input_tokens or 0
        assert "".join(block.text for block in each.content) == text
        assert each.usage.input_tokens + cached == tokens
    assert counted.input_tokens == tokens


def test_images_in_tool_results_equal_in_both_apis(grammar_server):
    _, items, blocks = in_all_apis("see", url_of(stored(rgb(OTHER))))
    call = {"name": "look", "call_id": "c", "type": "function_call", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": items[0]["content"]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks[0]["content"]}
    history: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    with sdks(grammar_server) as (client, other):
        response = client.responses.create(input=[call, output], max_output_tokens=TOKENS, **GREEDY)
        message = other.messages.create(messages=history, max_tokens=TOKENS, **GREEDY_MESSAGE)
    assert message.content[0].text == response.output_text
    assert response.usage.input_tokens > 16


class Seen(BaseModel):
    """Schema of an answer and of a call."""

    size: Literal["small", "large"]
    model_config = ConfigDict(extra="forbid")


def test_schemas_of_sdks_are_enforced(grammar_server):
    """Texts equal chat's; the weights of the model are random."""
    chat, items, blocks = in_all_apis("size? ", url_of(stored(rgb(ONE))))
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": Seen.model_json_schema()}}
    more = {"max_tokens": 150, "response_format": form}
    want = answer_to(grammar_server, chat, **more)["choices"][0]["message"]["content"]
    with sdks(grammar_server) as (client, other):
        response = client.responses.parse(
            input=items, text_format=Seen, max_output_tokens=150, **GREEDY
        )
        message = other.messages.parse(
            messages=blocks, output_format=Seen, max_tokens=150, **GREEDY_MESSAGE
        )
    assert response.output_text == message.content[0].text == want
    assert response.output_parsed == message.parsed_output == Seen.model_validate_json(want)


def test_strict_tools_of_sdks_are_enforced(grammar_server):
    schema = Seen.model_json_schema()
    tool: Any = {"type": "function", "name": "draw", "parameters": schema, "strict": True}
    with sdks(grammar_server) as (client, other):
        response = client.responses.create(
            input="draw",
            tools=[tool],
            tool_choice={"type": "function", "name": "draw"},
            max_output_tokens=150,
            **GREEDY,
        )
        message = other.messages.create(
            messages=[{"role": "user", "content": "draw"}],
            max_tokens=150,
            **GREEDY_MESSAGE,
            tools=[{"name": "draw", "input_schema": schema, "strict": True}],
            tool_choice={"type": "tool", "name": "draw"},
        )
    (item,), (block,) = response.output, message.content
    assert item.type == "function_call"
    assert block.type == "tool_use"
    assert Seen.model_validate_json(item.arguments) == Seen.model_validate(block.input)


def test_image_token_without_image_returns_400(server):
    answer = server.post(COMPLETIONS, prompt=[1, IMAGE, 2], max_tokens=1)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert "must not contain the image token" in error["message"]
