"""Token ids outside the vocabulary return 400 in every field, and a parallel request is unaffected.

The fields are those that `/openapi.json` marks with the format `token-id`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_fixtures import JSON, Server, save_tokenizer, serving
from tests.support.schema_places import Place, places
from tests.support.tiny_models import write_tiny

matrix = pytest.mark.matrix
BACKENDS = {
    "reference": "tests.support.serve_reference",
    "torch": "torch_impl.serve",
    "jax": "jax_impl.serve",
}
DRAFTS = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-external-sam-budget", "2"]
HEADERS = {**JSON, "authorization": "Bearer key"}
NEIGHBOUR = {"prompt": [7, 9, 7, 9, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
# All fields with token ids; the test compares them with the marked ones.
FIELDS = {
    ("/add_external_corpus", "documents[][]"),
    ("/detokenize", "tokens[]"),
    ("/v1/chat/completions", "logit_bias{}"),
    ("/v1/chat/completions", "stop_token_ids[]"),
    ("/v1/completions", "logit_bias{}"),
    ("/v1/completions", "prompt[]"),
    ("/v1/completions", "prompt[][]"),
    ("/v1/completions", "stop_token_ids[]"),
}


@pytest.fixture(
    scope="module",
    params=[name if name == "reference" else pytest.param(name, marks=matrix) for name in BACKENDS],
)
def server(request, tmp_path_factory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("ids") / "tiny"
    write_tiny(folder, "qwen3_5", 3)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    command = ["-m", BACKENDS[request.param], "--port", "0", "--model-path", str(folder), *DRAFTS]
    with serving([*command, "--admin-api-key", "key"]) as running:
        yield running


def vocab_of(server: Server) -> int:
    """Returns the vocabulary size from the error message of an invalid id."""
    message = server.post("/detokenize", tokens=[2**31 - 1]).json()["error"]["message"]
    return int(message.rpartition(" ")[2]) + 1


def test_out_of_range_token_ids_return_400(server):
    """A parallel request keeps its tokens."""
    plain = server.complete(**NEIGHBOUR, return_token_ids=True)["choices"][0]["token_ids"]
    document = httpx.get(server.url + "/openapi.json").json()
    marked = [place for place in places(document) if place.schema.get("format") == "token-id"]
    assert {(place.route, place.name) for place in marked} == FIELDS
    vocab, got = vocab_of(server), list[list[int]]()
    asks_on = threading.Event()

    def neighbour() -> None:
        while not asks_on.is_set():
            answer = server.complete(**NEIGHBOUR, return_token_ids=True)
            got.append(answer["choices"][0]["token_ids"])

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as client:
            for place in marked:
                for wrong in (vocab, vocab + 1, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 10**18, -1):
                    check_refused(client, place, wrong, vocab)
    finally:
        asks_on.set()
        thread.join()
    assert len(got) > 1
    assert all(tokens == plain for tokens in got)
    server.complete([vocab - 1], max_tokens=2, logit_bias={str(vocab - 1): 1})


def check_refused(client: httpx.Client, place: Place, wrong: int, vocab: int) -> None:
    """Sends the value alone and after a valid one; both must return 400."""
    for body in (place.put(wrong), after_valid_id(place, wrong)):
        answer = client.post(place.route, content=json.dumps(body))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), (place, body)
        assert error["param"].startswith(place.field), (place, error)
        message = error["message"]
        # Values that no vocabulary contains fail the schema check instead.
        assert (
            f"ids are 0 to {vocab - 1}" in message
            or "equal to" in message
            or "as its keys" in message
        )


def after_valid_id(place: Place, wrong: int) -> Any:
    body = json.loads(json.dumps(place.put(wrong)))
    inner = body[place.field]
    if isinstance(inner, dict):
        return {**body, place.field: {"1": 0.5, **inner}}
    nested = isinstance(inner[0], list)
    return {**body, place.field: [[1, *inner[0]]] if nested else [1, *inner]}
