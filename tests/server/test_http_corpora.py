"""External corpora: loaded at startup, and added, listed and removed over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from shared.server.api.admin import AdminRoutes
from shared.server.protocol.errors import ApiError
from tests.support.http_fixtures import (
    ADMIN_KEY,
    JSON,
    MAX_CORPUS_TOKENS,
    ROOT,
    VOCAB,
    Server,
    save_tokenizer,
    serving,
)
from tests.support.tiny_models import write_tiny

IDS = f"ids are 0 to {VOCAB - 1}"
ADD, REMOVE, LIST = "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    corpus = folder / "corpus.jsonl"
    corpus.write_text('"four"\n\n[1, 2, 3]\n', encoding="utf-8")
    with serving(["-m", "tests.support.http_fixtures", str(folder), str(corpus)]) as running:
        yield running


def ask(server: Server, route: str, body: object = None, key: str | None = ADMIN_KEY):
    headers = {**JSON, "authorization": f"Bearer {key}".encode()} if key else JSON
    method, url, content = "GET" if route == LIST else "POST", server.url + route, json.dumps(body)
    return httpx.request(method, url, content=content, headers=headers, timeout=60)


def test_external_corpora_are_added_listed_and_removed(server):
    start = {"start": 7}  # 4 letters and 3 ids, from the file
    assert ask(server, LIST).json() == {"corpora": start}
    added = ask(server, ADD, {"corpus_id": "more", "documents": ["abc", [5, 6]]})
    assert (added.status_code, added.json()) == (200, {"corpora": start | {"more": 5}})
    assert server.complete("hi", max_tokens=2)["choices"]
    assert ask(server, REMOVE, {"corpus_id": "more"}).json() == {"corpora": start}


@pytest.mark.parametrize("route", [ADD, REMOVE, LIST])
@pytest.mark.parametrize("key", [None, "wrong", ADMIN_KEY[:-1]])
def test_corpus_routes_without_admin_key_return_401(route, key, server):
    found = ask(server, route, {"corpus_id": "start", "documents": ["x"]}, key)
    assert found.status_code == 401
    assert found.json()["error"]["code"] == "invalid_api_key"


def test_corpus_routes_without_configured_key_return_403():
    client = SimpleNamespace(facts=SimpleNamespace(admin_api_key=None))
    routes = AdminRoutes(client, None)
    with pytest.raises(ApiError, match="--admin-api-key") as refused:
        asyncio.run(routes.list_corpora(SimpleNamespace(headers={"authorization": "Bearer None"})))
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        (ADD, {"documents": ["x"]}, "corpus_id", "is missing"),
        (ADD, {"corpus_id": "\ud800", "documents": ["x"]}, "corpus_id", "lone surrogates"),
        (ADD, {"corpus_id": "a", "documents": ["\ud800"]}, "documents", "must be strings"),
        (ADD, {"corpus_id": "a", "documents": [[1.5]]}, "documents", "must be strings"),
        (REMOVE, {"corpus_id": "\ud800"}, "corpus_id", "lone surrogates"),
        (ADD, {"corpus_id": "a", "documents": []}, "documents", "must be a list of 1 to"),
        (ADD, {"corpus_id": "a", "documents": ["x"], "b": 1}, "b", "not a known field"),
        (ADD, {"corpus_id": "a", "documents": [[-1]]}, "documents", IDS),
        (ADD, {"corpus_id": "a", "documents": [[1 << 40]]}, "documents", IDS),
        (ADD, {"corpus_id": "a", "documents": [[VOCAB]]}, "documents", IDS),
        (ADD, {"corpus_id": "a", "documents": [""]}, "documents", "at least one token"),
        (ADD, {"corpus_id": "start", "documents": ["x"]}, "corpus_id", "remove it first"),
        (
            ADD,
            {"corpus_id": "a", "documents": ["x" * MAX_CORPUS_TOKENS]},
            "documents",
            "--speculative-ngram-external-corpus-max-tokens",
        ),
        (REMOVE, {"corpus_id": "a"}, "corpus_id", "not found"),
    ],
)
def test_corpus_routes_reject_invalid_fields(route, body, param, words, server):
    found = ask(server, route, body)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert ask(server, LIST).json() == {"corpora": {"start": 7}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "line 2 must be a string"),
        ("[999]", IDS),
        *(
            pytest.param(line, "line 2", marks=pytest.mark.matrix)
            for line in ("[1.5]", "[1", r'"\ud800"')
        ),
    ],
)
def test_invalid_corpus_file_fails_startup_with_line(line, words, tmp_path):
    save_tokenizer(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps("fine") + "\n" + line, encoding="utf-8")
    command = [sys.executable, "-m", "tests.support.http_fixtures", str(tmp_path), str(corpus)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("--speculative-ngram-external-corpus-path")
    assert words in last


def test_ngram_drafts_use_user_scope_and_corpora(tmp_path):
    """End to end: flags, memory plan, reference backend, engine, socket, HTTP."""
    write_tiny(tmp_path / "model", "llama", 5)
    command = ["-m", "tests.support.serve_reference", "--model-path", str(tmp_path / "model")]
    command += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    command += ["--speculative-ngram-external-sam-budget", "2", "--admin-api-key", ADMIN_KEY]
    prompt = [9, 10, 11, 12, 13]
    asked = {"max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with serving([*command, "--port", "0"]) as server:
        plain = server.complete(prompt, **asked, speculative={"enabled": False}, user="a")
        (text,) = [choice["token_ids"] for choice in plain["choices"]]
        for user, at_least in (("a", 3.0), ("b", 1.0)):
            again = server.complete(prompt, **asked, user=user)
            assert again["choices"][0]["token_ids"] == text
            assert again["speculative"]["accept_length"] >= at_least
        added = ask(server, ADD, {"corpus_id": "own", "documents": [prompt + text]})
        assert added.json() == {"corpora": {"own": len(prompt + text)}}
        third = server.complete(prompt, **asked, user="c")
        assert third["choices"][0]["token_ids"] == text
        assert third["speculative"]["accept_length"] >= 3
