"""The unmodified openai package: responses, streams and errors.

The model-free test engine repeats the prompt. `test_http_tools.py` tests tool calls with the
package.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.echo_engine import HELD
from tests.support.http_fixtures import (
    FAIL,
    MAX_OPEN,
    SPECIAL,
    TOKENS_PER_STEP,
    USER,
    Server,
    is_alive,
    save_tokenizer,
    serving,
)

KEY = "key-of-the-tests"
GREEDY: Any = {"model": "default", "temperature": 0}
LETTERS = [{"role": "user", "content": "abcdef" + SPECIAL[0]}]
SHOWN = "abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    command = ["-m", "tests.support.http_fixtures", str(folder), "--api-key", KEY]
    with serving(command) as running:
        yield running


def client_of(server: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def test_openai_client_lists_and_retrieves_models(client):
    assert [model.id for model in client.models.list()] == ["repeater"]
    assert client.models.retrieve("repeater").owned_by == "tandem"


def test_openai_client_completion_whole_equals_stream(client):
    asked = {"prompt": "abc", "max_tokens": 6, **GREEDY}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == "abcabc"
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabc"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    several = client.completions.create(**{**asked, "prompt": ["ab", "cd"], "max_tokens": 2}, n=2)
    assert [choice.text for choice in several.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    echoed = client.completions.create(**asked, echo=True)
    assert echoed.choices[0].text == "abcabcabc"


def test_openai_client_chat_whole_equals_stream(client):
    whole = client.chat.completions.create(messages=LETTERS, **GREEDY)
    message = whole.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", SHOWN, None)
    assert (whole.choices[0].finish_reason, whole.object) == ("stop", "chat.completion")
    chunks = list(
        client.chat.completions.create(
            messages=LETTERS, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(text) == SHOWN
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    with client.chat.completions.stream(messages=LETTERS, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.message.content, final.finish_reason) == (SHOWN, "stop")


def test_openai_client_stream_separates_choices(client):
    """The first letter of each choice depends on its seed."""
    asked = {"model": "default", "messages": LETTERS, "seed": 5, "n": 4, "max_tokens": 5}
    whole = client.chat.completions.create(**asked)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert len(set(texts.values())) > 1


def test_openai_client_parses_logprobs(client):
    asked = {"messages": LETTERS, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [entry.token for entry in whole] == list("abcd")
    assert [(best.token, best.logprob) for best in whole[0].top_logprobs] == [
        ("a", -97 / 256),
        ("b", -98 / 256),
    ]
    assert whole[0].bytes == [97]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for entry in choice.logprobs.content
    ]
    assert streamed == whole
    plain = client.completions.create(prompt="ab", max_tokens=2, logprobs=1, **GREEDY)
    found = plain.choices[0].logprobs
    assert (found.tokens, found.text_offset) == (["a", "b"], [0, 1])
    assert found.top_logprobs == [{"a": -97 / 256}, {"b": -98 / 256}]


def test_openai_client_passes_extra_fields_both_ways(client):
    body = {"speculative": {"max_draft_tokens": 1}, "top_k": 5, "return_token_ids": True}
    answer = client.chat.completions.create(
        messages=LETTERS,
        max_completion_tokens=5,
        user="a",
        stop=["zz"],
        seed=1,
        extra_body=body,
        logit_bias={"122": -1},
        presence_penalty=0.5,
        store=False,
        response_format={"type": "text"},
        **GREEDY,
    )
    assert answer.model_extra["speculative"]["accept_length_histogram"] == [0, 2, 0]
    assert answer.choices[0].model_extra["token_ids"] == list(b"abcde")
    free = client.chat.completions.create(messages=LETTERS, max_tokens=7, **GREEDY)
    assert free.model_extra["speculative"]["accept_length"] == TOKENS_PER_STEP


def test_openai_client_reads_raw_and_streaming_responses(client):
    raw = client.chat.completions.with_raw_response.create(messages=LETTERS, **GREEDY)
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.parse().choices[0].message.content == SHOWN
    asked = {"messages": LETTERS, "stream": True, **GREEDY}
    with client.chat.completions.with_streaming_response.create(**asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.with_raw_response.create(prompt="a", model="default", top_p=2)
    assert caught.value.response.json()["error"]["param"] == "top_p"


def test_async_openai_client_returns_same_output(server):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY) as client:
            make = client.chat.completions.create
            whole, chunks, *others = await asyncio.gather(
                make(messages=LETTERS, **GREEDY),
                make(messages=LETTERS, stream=True, **GREEDY),
                *(make(messages=USER, max_tokens=2, **GREEDY) for _ in range(16)),
            )
            parts = [choice.delta.content or "" async for c in chunks for choice in c.choices]
            texts = {other.choices[0].message.content for other in others}
            assert [model.id async for model in client.models.list()] == ["repeater"]
            return [whole.choices[0].message.content, "".join(parts), *texts]

    assert asyncio.run(ask()) == [SHOWN, SHOWN, "hi"]


ERRORS = {
    "temperature": (openai.BadRequestError, {"temperature": 9}),
    "max_tokens": (openai.BadRequestError, {"max_tokens": 10**6}),
    "no_such": (openai.BadRequestError, {"extra_body": {"no_such": 1}}),
    "model": (openai.NotFoundError, {"model": "gpt-4o"}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("param", ERRORS)
def test_openai_client_raises_error_class_with_param(client, param, stream):
    kind, fields = ERRORS[param]
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "default", "prompt": "a", **fields}, stream=stream)
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_wrong_key_raises_authentication_error(server):
    for key in ("wrong", KEY + "x", KEY[:-1]):
        with client_of(server, key) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


def wait_until_empty(client: openai.OpenAI) -> None:
    """Waits until the engine has processed all disconnects."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            client.completions.create(prompt=[[97]] * MAX_OPEN, max_tokens=1, model="default")
            return
        except openai.InternalServerError:
            time.sleep(0.05)
    raise AssertionError("the queue is still full")


def test_full_queue_and_nan_raise_internal_server_error(client):
    slow: Any = {"prompt": [HELD] * MAX_OPEN, "max_tokens": 300, "model": "default"}
    with client.completions.create(**slow, stream=True) as others:
        assert next(iter(others)).choices
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(prompt="a", **GREEDY)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    wait_until_empty(client)
    failing: Any = {"prompt": [FAIL, 97], "model": "default"}
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.completions.create(**failing)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(**failing, stream=True))


def test_slow_or_stopped_server_raises_connection_errors(server, tmp_path):
    slow: Any = {"prompt": HELD, "max_tokens": 300, "model": "default"}
    with client_of(server) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(**slow, timeout=0.3)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as own:
        pids = own.pids()
        own.process.terminate()
        own.process.wait(10)
        assert not any(map(is_alive, pids))
        with client_of(own) as client, pytest.raises(openai.APIConnectionError):
            client.completions.create(**slow)


@pytest.mark.parametrize("call", ["embeddings", "moderations", "images"])
def test_unsupported_endpoint_raises_not_found_with_hint(client, call):
    calls = {
        "embeddings": lambda: client.embeddings.create(model="default", input="a"),
        "moderations": lambda: client.moderations.create(model="default", input="a"),
        "images": lambda: client.images.generate(model="default", prompt="a"),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        calls[call]()
    assert f"POST /v1/{call}" in caught.value.message
    assert "/openapi.json" in caught.value.message


class City(BaseModel):
    name: str
    people: int


def test_response_format_without_grammar_raises_bad_request(client):
    """`test_http_grammar.py` tests response formats with a grammar backend."""
    schema = {"name": "city", "schema": City.model_json_schema(), "strict": True}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=LETTERS, response_format=wanted, **GREEDY)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(messages=LETTERS, response_format=City, **GREEDY)
    assert caught.value.param == "response_format"
