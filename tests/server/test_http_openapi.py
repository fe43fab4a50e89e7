"""`/openapi.json`: routes, fields, bounds, responses and errors equal the server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from pydantic import BaseModel

from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from shared.server.api.admin import AddCorpus, RemoveCorpus
from shared.server.api.tokens import Detokenize, TokenizeChat, TokenizeText
from shared.server.protocol import response_types as answers
from shared.server.protocol.messages_types import MessagesRequest, TokenCountRequest
from shared.server.protocol.openai_types import MAX_COUNT, MAX_SEED, ChatRequest, CompletionRequest
from shared.server.protocol.responses_types import ResponsesRequest
from tests.support.http_fixtures import (
    ADMIN_KEY,
    CHAT,
    COMPLETIONS,
    SPECIAL,
    USER,
    Server,
    save_tokenizer,
    serving,
)

ROUTES = {
    "/": "get",
    "/add_external_corpus": "post",
    "/load_lora_adapter": "post",
    "/unload_lora_adapter": "post",
    "/capabilities": "get",
    "/detokenize": "post",
    "/health": "get",
    "/ping": "get",
    "/version": "get",
    "/list_external_corpora": "get",
    "/live": "get",
    "/metrics": "get",
    "/openapi.json": "get",
    "/playground/{name}": "get",
    "/remove_external_corpus": "post",
    "/tokenize": "post",
    "/v1/chat/completions": "post",
    "/v1/completions": "post",
    "/v1/messages": "post",
    "/v1/messages/count_tokens": "post",
    "/v1/models": "get",
    "/v1/models/{name}": "get",
    "/v1/requests/{request_id}/trace": "get",
    "/v1/responses": "post",
    "/v1/responses/{response_id}": "get",
    "/v1/responses/{response_id}/cancel": "post",
    "/v1/responses/{response_id}/input_items": "get",
}
CALL = '<think>a</think>b<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    listed = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}" + listed)
    flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def document(server) -> dict[str, Any]:
    return httpx.get(server.url + "/openapi.json").json()


def test_openapi_document_is_valid_with_resolved_references(document):
    OpenAPI.model_validate(document)
    assert document["openapi"].startswith("3.1")
    names = {ref.rpartition("/")[2] for ref in references(document)}
    assert names <= document["components"]["schemas"].keys()
    assert "Error" in names


def references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)


def test_openapi_lists_routes_with_errors(document):
    assert {path: next(iter(methods)) for path, methods in document["paths"].items()} == ROUTES
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for path, method, operation in operations:
        assert operation["summary"]
        statuses = operation["responses"].keys()
        assert {"200", "401", "403", "431", "500", "default"} <= statuses
        assert "422" not in statuses
        if "requestBody" in operation:
            assert {"400", "413", "415"} <= statuses
        assert ("requestBody" in operation) == (method == "post" and "/cancel" not in path)


BODIES = [
    CompletionRequest,
    ChatRequest,
    MessagesRequest,
    TokenCountRequest,
    ResponsesRequest,
    TokenizeText,
    TokenizeChat,
    Detokenize,
    AddCorpus,
    RemoveCorpus,
]


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_openapi_lists_all_request_fields(document, kind: type[BaseModel]):
    schema = document["components"]["schemas"][kind.__name__]
    fields = set(kind.model_fields)
    endpoint = getattr(kind, "ENDPOINT", None)
    unsupported = [field for field in UNSUPPORTED_FIELDS if "." not in field.name]
    fields |= {field.name for field in unsupported if endpoint in field.endpoints}
    assert set(schema["properties"]) == fields
    assert schema["additionalProperties"] is False
    for name, field in schema["properties"].items():
        shape = field.keys() - {"title", "default", "description"}
        assert shape, f"{name} has no type"


def test_openapi_numbers_have_bounds(document):
    schemas = document["components"]["schemas"]
    for kind in BODIES:
        for name, field in schemas[kind.__name__]["properties"].items():
            for number in numbers(field):
                for bounds in ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}):
                    assert bounds & number.keys(), f"{kind.__name__}.{name} has no bound"
    seed = schemas["ChatRequest"]["properties"]["seed"]["anyOf"][0]
    assert (seed["minimum"], seed["maximum"]) == (-MAX_SEED - 1, MAX_SEED)
    most = schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0]["maximum"]
    assert most == MAX_COUNT


def numbers(field: Any) -> Iterator[dict[str, Any]]:
    if isinstance(field, dict):
        if field.get("type") in ("integer", "number"):
            yield field
        for value in field.values():
            yield from numbers(value)
    elif isinstance(field, list):
        for value in field:
            yield from numbers(value)


def test_generation_responses_match_openapi_models(server):
    plain: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "logprobs": 2}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": CALL + SPECIAL[0]}],
        "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "logprobs": True,
        "top_logprobs": 1,
    }
    for fields in (plain, {**plain, "return_token_ids": True, "n": 2}):
        answers.Completion.model_validate(server.post(COMPLETIONS, **fields).json())
        for event in server.stream(COMPLETIONS, **fields, stream_options={"include_usage": True}):
            answers.Completion.model_validate(event)
    document = {"echo": True, "prompt_logprobs": 1, "max_tokens": 0}
    for fields in (plain | document, {**plain, **document, "prompt": "a"}):
        found = answers.Completion.model_validate(server.post(COMPLETIONS, **fields).json())
        assert found.choices[0].prompt_logprobs
    whole = answers.Chat.model_validate(server.post(CHAT, **chat, prompt_logprobs=1).json())
    assert whole.prompt_logprobs
    assert whole.choices[0].message.tool_calls
    assert whole.choices[0].message.reasoning_content == "a"
    for event in server.stream(CHAT, **chat, prompt_logprobs=2):
        answers.ChatEvent.model_validate(event)
    found = server.post("/tokenize", prompt="a", return_token_strs=True).json()
    answers.Tokenized.model_validate(found)
    answers.Detokenized.model_validate(server.post("/detokenize", tokens=[97]).json())
    answers.Error.model_validate(server.post(CHAT, messages=USER, seed=10**30).json())


def test_server_responses_match_openapi_models(server):
    headers = {"authorization": f"Bearer {ADMIN_KEY}".encode()}
    for path, kind in (
        ("/v1/models", answers.Models),
        ("/v1/models/default", answers.ModelCard),
        ("/capabilities", answers.Capabilities),
        ("/list_external_corpora", answers.CorpusList),
        ("/no_such", answers.Error),
    ):
        kind.model_validate(httpx.get(server.url + path, headers=headers).json())
