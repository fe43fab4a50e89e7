"""LoRA adapters over HTTP: the field `model` selects one on every route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.http_fixtures import Server, save_tokenizer, serving
from tests.support.lora_files import write_adapter
from tests.support.tiny_models import write_tiny

COMMAND = ["-m", "tests.support.serve_reference", "--port", "0", "--context-length", "256"]
GOLDEN = Path(__file__).parents[1] / "golden"
FIELDS = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    adapters = ["--lora-paths", *(f"{x}={GOLDEN / x}" for x in ("qwen3_lora", "qwen3_lora_part"))]
    with serving([*COMMAND, "--model-path", str(GOLDEN / "qwen3"), *adapters]) as it:
        yield it


def token_ids(server: Server, model: str | None, **fields: object) -> list[int]:
    named = {} if model is None else {"model": model}
    answer = server.complete(**FIELDS, **named, return_token_ids=True, **fields)
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
