"""LoRA adapters over HTTP: the field `model` selects one on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.http_fixtures import ADMIN_KEY, JSON, Server, save_tokenizer, serving
from tests.support.lora_files import write_adapter
from tests.support.polling import wait_until
from tests.support.tiny_models import write_tiny

COMMAND = ["-m", "tests.support.serve_reference", "--port", "0", "--context-length", "256"]
GOLDEN = Path(__file__).parents[1] / "golden"
RUNNING = "tandem:num_requests_running"
ENDED = "tandem:e2e_request_latency_seconds_count"
FIELDS = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    adapters = ["--lora-paths", *(f"{x}={GOLDEN / x}" for x in ("qwen3_lora", "qwen3_lora_part"))]
    with serving([*COMMAND, "--model-path", str(GOLDEN / "qwen3"), *adapters]) as it:
        yield it


def token_ids(server: Server, model: str | None, **fields: object) -> list[int]:
    named = {} if model is None else {"model": model}
    answer = server.complete(**{**FIELDS, **fields}, **named, return_token_ids=True)
    assert answer["model"] == (model or "qwen3")
    return answer["choices"][0]["token_ids"]


def test_model_field_selects_adapter(server: Server) -> None:
    found = [token_ids(server, name) for name in (None, "qwen3", "qwen3_lora", "qwen3_lora_part")]
    assert found[0] == found[1]
    assert len({tuple(each) for each in found}) == 3
    assert token_ids(server, "qwen3_lora", n=1) == found[2]


def test_adapted_completion_matches_golden(server: Server) -> None:
    want = np.load(GOLDEN / "qwen3_lora" / "vectors.npz")
    answer = server.complete(
        [int(x) for x in want["short_ids"]],
        model="qwen3_lora",
        max_tokens=1,
        temperature=0,
        return_token_ids=True,
    )
    assert answer["choices"][0]["token_ids"] == [int(want["short_logits"][-1].argmax())]


@pytest.mark.parametrize(
    "version", [{}, {"anthropic-version": "2023-06-01"}], ids=["", "anthropic"]
)
def test_models_lists_adapters_with_parent(server: Server, version: dict[str, str]) -> None:
    page = httpx.get(f"{server.url}/v1/models", headers=version).json()
    assert [card["id"] for card in page["data"]] == ["qwen3", "qwen3_lora", "qwen3_lora_part"]
    card = httpx.get(f"{server.url}/v1/models/qwen3_lora", headers=version).json()
    assert card == page["data"][1]
    if not version:
        parents = [card.get("parent") for card in page["data"]]
        assert parents == [None, "qwen3", "qwen3"]


def test_unknown_model_returns_404_with_names(server: Server) -> None:
    answer = server.post("/v1/completions", **FIELDS, model="other")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    names = "'qwen3', 'qwen3_lora' and 'qwen3_lora_part'"
    assert error["message"] == f"the model 'other' does not exist; this server has {names}"
    assert httpx.get(f"{server.url}/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
def test_chat_routes_accept_adapter_name(
    path: str, fields: dict[str, object], chat_server: Server
) -> None:
    found = chat_server.post(path, **fields, model="mine")
    assert found.status_code == 200, found.text
    assert found.json()["model"] == "mine"
    assert chat_server.post(path, **fields, model="yours").status_code == 404


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chat")
    base = folder / "base"
    write_tiny(base, "qwen3", 1)
    save_tokenizer(base)
    adapter = write_adapter(folder / "mine", base, ["model.layers.0.self_attn.q_proj"])
    words = ["--model-path", str(base), "--lora-paths", f"mine={adapter}"]
    with serving([*COMMAND, *words]) as it:
        yield it


def test_prefix_cache_is_not_shared_with_adapter(server: Server) -> None:
    prompt = [int(x) for x in np.random.default_rng(3).integers(1, 200, 60)]

    def cached(model: str) -> int:
        usage = server.complete(prompt, model=model, max_tokens=1)["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert [cached(x) > 0 for x in ("qwen3", "qwen3_lora", "qwen3", "qwen3_lora")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.matrix)])
def open_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that starts without adapters, on the reference backend or on two torch ranks."""
    module = "torch_impl.serve" if request.param == 2 else "tests.support.serve_reference"
    words = ["-m", module, *COMMAND[2:], "--tp-size", str(request.param)]
    words += ["--model-path", str(GOLDEN / "qwen3"), "--dtype", "float32"]
    pool = ["--max-lora-rank", "4", "--lora-target-modules", "all", "--max-loras-per-batch", "1"]
    with serving([*words, *pool, "--admin-api-key", ADMIN_KEY]) as it:
        yield it


def change(server: Server, route: str, key: str | None = ADMIN_KEY, **body: str) -> httpx.Response:
    headers = {**JSON, "authorization": f"Bearer {key}".encode()} if key else JSON
    url, content = f"{server.url}/{route}_lora_adapter", json.dumps(body)
    return httpx.post(url, content=content, headers=headers, timeout=60)


def test_adapters_are_loaded_and_unloaded(open_server: Server, server: Server) -> None:
    """One slot serves two adapters in turn, with the texts of a server that named them."""
    names = ("qwen3_lora", "qwen3_lora_part")
    folders = {name: str(GOLDEN / name) for name in names}
    want = {name: token_ids(server, name) for name in ("qwen3", *names)}
    for name in names:
        found = change(open_server, "load", lora_name=name, lora_path=folders[name])
        assert found.status_code == 200, found.text
    assert found.json() == {"success": True, "loaded_adapters": folders, "notes": []}
    cards = httpx.get(f"{open_server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["qwen3", *names]
    assert {name: token_ids(open_server, name) for name in (*names, "qwen3")} == want
    again = change(open_server, "load", lora_name="qwen3_lora", lora_path=folders["qwen3_lora"])
    assert again.json()["loaded_adapters"] == folders
    other = change(open_server, "load", lora_name="qwen3_lora", lora_path=folders[names[1]])
    assert other.status_code == 400
    assert "is loaded with other files; unload it first" in other.json()["error"]["message"]
    gone = change(open_server, "unload", lora_name="qwen3_lora")
    assert gone.json()["loaded_adapters"] == {names[1]: folders[names[1]]}
    missing = open_server.post("/v1/completions", **FIELDS, model="qwen3_lora")
    assert missing.status_code == 404
    change(open_server, "load", lora_name="qwen3_lora", lora_path=folders[names[1]])
    assert token_ids(open_server, "qwen3_lora") == want[names[1]]


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        ("load", {"lora_name": "x"}, "lora_path", "is missing"),
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, "lora_path", "adapter_config.json"),
        ("load", {"lora_name": "qwen3", "lora_path": "/x"}, "lora_name", "a name of the model"),
        ("load", {"lora_name": "", "lora_path": "/x"}, "lora_name", "at least 1"),
        ("unload", {"lora_name": "x"}, "lora_name", "'x' is not loaded"),
    ],
)
def test_invalid_adapter_changes_return_400(
    route: str, body: dict[str, str], param: str, words: str, open_server: Server
) -> None:
    found = change(open_server, route, **body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    assert words in found.json()["error"]["message"]


@pytest.mark.parametrize("route", ["load", "unload"])
def test_adapter_changes_without_key_return_401(route: str, open_server: Server) -> None:
    assert change(open_server, route, None, lora_name="x", lora_path="y").status_code == 401


def test_unload_waits_for_running_request(open_server: Server) -> None:
    """A stream of the adapter ends whole, and requests after the unload began get 404."""
    folder = str(GOLDEN / "qwen3_lora")
    change(open_server, "load", lora_name="busy", lora_path=folder)
    want = token_ids(open_server, "busy", max_tokens=80)
    num_ended = open_server.metrics()[ENDED]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(token_ids, open_server, "busy", max_tokens=80)
        assert wait_until(lambda: running.done() or open_server.metrics()[RUNNING])
        assert change(open_server, "unload", lora_name="busy").status_code == 200
        assert open_server.metrics()[ENDED] == num_ended + 1
        assert running.result(60) == want
    assert open_server.post("/v1/completions", **FIELDS, model="busy").status_code == 404
