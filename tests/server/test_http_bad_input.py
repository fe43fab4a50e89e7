"""Invalid requests: an error that names the field, and a server that continues."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from tests.support.field_requests import post_field
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    JSON,
    MAX_LOGPROBS,
    MAX_OPEN,
    MAX_PROMPT_LOGPROBS,
    POOL_TOKENS,
    SLOTS,
    USER,
    VOCAB,
    post_head,
    serving,
)

BAD_FIELDS = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": ["a", [1]]}),
    ("prompt", {"prompt": [1, True]}),
    ("prompt", {"prompt": [1.0]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": [VOCAB]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": "x" * CONTEXT}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": ["a"] * 100, "n": 100}),
    ("max_tokens", {"max_tokens": CONTEXT}),
    ("max_tokens", {"max_tokens": POOL_TOKENS - 1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 10**400}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": float("nan")}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("min_tokens", {"min_tokens": 100}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": True}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 1e30}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": "1"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": [1]}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": float("nan")}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": float("-inf")}),
    ("seed", {"seed": 1.5}),
    ("seed", {"seed": "7"}),
    ("seed", {"seed": float("nan")}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": 0}),
    ("stop", {"stop": False}),
    ("stop", {"stop": {}}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
    ("stop_token_ids", {"stop_token_ids": [1, 2, 3, 4]}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.more", {"stream": True, "stream_options": {"more": True}}),
    ("return_token_ids", {"return_token_ids": "yes"}),
    ("speculative", {"speculative": True}),
    ("speculative.enabled", {"speculative": {"enabled": 1}}),
    ("speculative.max_draft_tokens", {"speculative": {"max_draft_tokens": -1}}),
    ("speculative.max_draft_tokens", {"speculative": {"max_draft_tokens": 1.5}}),
    ("speculative.depth", {"speculative": {"depth": 1}}),
    ("model", {"model": 5}),
    ("model", {"model": "\ud800"}),
    ("user", {"user": 5}),
    ("user", {"user": "x" * 257}),
    ("user", {"user": "\ud800"}),
    ("stop", {"stop": "\ud800"}),
    ("logprobs", {"logprobs": MAX_LOGPROBS + 1}),
    ("logprobs", {"logprobs": 10**30}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("logprobs", {"logprobs": 1.5}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": "1"}),
    ("logit_bias", {"logit_bias": {"a": 1}}),
    ("logit_bias", {"logit_bias": {"": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"1.0": 1}}),
    ("logit_bias", {"logit_bias": {"\u0661": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 5000: 1}}),
    ("logit_bias", {"logit_bias": {str(VOCAB): 1}}),
    ("logit_bias", {"logit_bias": {"1": 100.5}}),
    ("logit_bias", {"logit_bias": {"1": -101}}),
    ("logit_bias", {"logit_bias": {"1": float("nan")}}),
    ("logit_bias", {"logit_bias": {"1": True}}),
    ("logit_bias", {"logit_bias": {"1": None}}),
    ("logit_bias", {"logit_bias": {"1": "2"}}),
    ("logit_bias", {"logit_bias": {"1": 1, "01": 2}}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(4)}}),
    ("best_of", {"best_of": 2}),
    ("logprobs", {"echo": True, "logprobs": MAX_PROMPT_LOGPROBS + 1}),
    ("prompt_logprobs", {"prompt_logprobs": MAX_PROMPT_LOGPROBS + 1}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": True}),
    ("max_tokens", {"max_tokens": -1, "echo": True}),
    ("echo", {"echo": "yes"}),
    (
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": 1}},
    ),
    ("suffix", {"suffix": "x"}),
    ("unheard_of", {"unheard_of": 1}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: repr(value)[:40])
def test_invalid_field_returns_400_with_param(server, param, fields):
    body = json.dumps({"prompt": "ab", "temperature": 0, **fields})
    answer = httpx.post(server.url + COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert len(error["message"]) < 300


BAD_CHATS = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": [{"role": "system", "content": "rejected by the template"}]}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "", "tool_calls": []}]}),
    ("messages", {"messages": [{"role": "user", "name": "half", "content": "x"}]}),
    ("messages[0].name", {"messages": [{"role": "user", "name": "\ud800", "content": "x"}]}),
    ("user", {"user": "\udfff"}),
    ("max_completion_tokens", {"max_completion_tokens": CONTEXT}),
    ("max_tokens", {"max_tokens": CONTEXT}),
    ("min_tokens", {"min_tokens": POOL_TOKENS}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3, "logprobs": False}),
    ("top_logprobs", {"top_logprobs": MAX_LOGPROBS + 1, "logprobs": True}),
    ("top_logprobs", {"top_logprobs": -1, "logprobs": True}),
    ("top_logprobs", {"top_logprobs": True, "logprobs": True}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("prompt", {"prompt": "x"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHATS, ids=lambda value: repr(value)[:40])
def test_chat_invalid_field_returns_400_with_param(server, param, fields):
    answer = server.post(CHAT, **{"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_neutral_and_limit_values_are_accepted(server):
    nothing = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stop",
            "stop_token_ids",
            "n",
            "stream",
            "stream_options",
            "user",
            "model",
            "logprobs",
            "logit_bias",
            "suffix",
        ]
    )
    server.complete("a", **nothing, best_of=1, echo=False)
    server.complete("a", temperature=1e-40, top_p=1e-40, top_k=2**31 - 1, seed=-(2**63))
    server.complete("a", top_k=-1, presence_penalty=-2, repetition_penalty=2, stop=["a", "b"] * 4)
    server.complete("a", logit_bias={})
    text = {"type": "text"}
    more = {"tools": [], "response_format": text, "logprobs": False, "top_logprobs": 0}
    answer = server.post(CHAT, messages=USER, max_tokens=2, **more)
    assert answer.status_code == 200


OF_ENDPOINTS = [
    (field, endpoint)
    for field in UNSUPPORTED_FIELDS
    for endpoint in field.endpoints
    if not field.is_advice  # see test_http_ignored_fields.py
]


@pytest.mark.parametrize(
    ("field", "endpoint"), OF_ENDPOINTS, ids=lambda of: getattr(of, "name", of)
)
def test_unsupported_field_accepts_only_neutral_values(server, field, endpoint):
    for value in (None, *field.neutral):
        answer = post_field(server, endpoint, field.name, value)
        assert answer.status_code == 200, value
    error = post_field(server, endpoint, field.name, field.example).json()["error"]
    message = f"{field.reason}; {field.hint}"
    if endpoint == "messages":
        path_in_message = field.name.replace("[]", "")
        assert error["message"] == f"{path_in_message}: {message.removeprefix(field.name).strip()}"
    else:
        assert (error["param"], error["message"]) == (field.name, message)


def test_user_hints_and_empty_stop_are_neutral(server):
    plain = server.post(CHAT, messages=USER, temperature=0, max_tokens=4).json()["choices"]
    for more in ({"safety_identifier": "a"}, {"prompt_cache_key": "b"}, {"stop": ""}, {"stop": []}):
        response = server.post(CHAT, messages=USER, temperature=0, max_tokens=4, **more).json()
        assert response["choices"] == plain
    for name in ("safety_identifier", "prompt_cache_key"):
        error = server.post(CHAT, messages=USER, **{name: "x" * 257}).json()["error"]
        assert error["param"] == name
    error = server.post(CHAT, messages=USER, user="x" * 257).json()["error"]
    assert error["message"].startswith("user should have at most 256 characters, not 257, got ")


def test_max_completion_tokens_overrides_max_tokens(server):
    for older, newer in ((5, 2), (2, 5), (3, 3)):
        bounds = {"max_tokens": older, "max_completion_tokens": newer}
        usage = server.post(CHAT, messages=USER, temperature=0, **bounds).json()["usage"]
        assert usage["completion_tokens"] == newer


def test_disconnect_during_upload_logs_no_traceback(tmp_path):
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as own:
        host, port = own.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(post_head(COMPLETIONS, 1000) + b'{"prompt":')
            time.sleep(0.2)  # until the handler waits for the rest
        own.complete([97], max_tokens=1)
    assert not any("Traceback" in line for line in own.lines)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"{} x", b"\xff\xfe", b"[" * 100_000, b'{"seed":' + b"9" * 5000],
    ids=lambda body: repr(body)[:12],
)
def test_malformed_json_body_returns_400(server, body):
    answer = httpx.post(server.url + COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "JSON" in message
    assert "sys." not in message  # no hint that only the server's operator could follow


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_non_json_content_type_returns_415(server, kind):
    """Browsers let any web page send other content types without a CORS preflight."""
    body, headers = b'{"prompt": "a", "max_tokens": 1}', {"content-type": kind}
    for path in (COMPLETIONS, CHAT):
        answer = httpx.post(server.url + path, content=body, headers=headers)
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = httpx.post(server.url + COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 200


def test_full_queue_returns_503_and_recovers(server):
    assert len(server.complete([[97]] * MAX_OPEN, max_tokens=1)["choices"]) == MAX_OPEN
    with server.post_slowly(MAX_OPEN):
        server.wait_for_metric("tandem:num_requests_waiting", MAX_OPEN - SLOTS)
        full = server.post(COMPLETIONS, prompt=[97], max_tokens=1)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        assert full.headers["retry-after"] == "1"
        assert f"at most {MAX_OPEN} requests" in full.json()["error"]["message"]
    server.wait_for_metric("tandem:num_requests_waiting", 0)
    server.complete([97], max_tokens=1)


def test_request_above_queue_capacity_returns_400(server):
    """A 503 would make the client retry forever."""
    asked = ({"prompt": [[97]] * (MAX_OPEN + 1)}, {"prompt": [[97]] * (MAX_OPEN // 2 + 1), "n": 2})
    for fields in asked:
        answer = server.post(COMPLETIONS, **fields, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert f"at most {MAX_OPEN} are supported" in answer.json()["error"]["message"]


def test_unknown_model_and_path_return_404(server):
    answer = server.post(COMPLETIONS, prompt="a", model="other")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    for answer in (httpx.get(server.url + "/v2"), httpx.get(server.url + COMPLETIONS)):
        assert answer.status_code in (404, 405)
        assert "message" in answer.json()["error"]


def test_chunked_body_above_limit_returns_413(server):
    sent = 0

    def chunks():
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b" " * (1 << 20)

    answer = httpx.post(server.url + COMPLETIONS, content=chunks(), headers=JSON, timeout=30)
    assert answer.status_code == 413
    # The remaining sent bytes are in socket buffers.
    assert sent < 60 << 20


def test_client_sending_whole_large_body_receives_413(server):
    host, port = server.url.removeprefix("http://").split(":")
    size = 12 << 20  # for example clients that send a large image
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(post_head(COMPLETIONS, size) + b" " * size)
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_content_length_above_limit_returns_413_before_body(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(post_head(COMPLETIONS, 100 << 20))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
