"""The shipped model served by a hub id: downloaded at the first start, cached at the second."""

from __future__ import annotations

import httpx

from shared.options.options import DEFAULT_MODEL
from tests.support.http_fixtures import serving
from tests.support.hub import running_hub

ID = "tandem/demo"
MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]
QUESTION = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def test_hub_id_served_from_hub_then_from_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    command = ["-m", "torch_impl.serve", "--port", "0", "--model-path", ID]
    answers = []
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(ID, DEFAULT_MODEL)
        with serving(command) as server:
            (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
            assert model["id"] == ID
            answers.append(server.post("/v1/chat/completions", model=ID, **QUESTION).json())
        assert any("Downloading 18.2 MB of weights" in line for line in server.lines)
        assert hub.sent_bytes > (DEFAULT_MODEL / "model.safetensors").stat().st_size
        hub.requests.clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with serving(command) as server:
            answers.append(server.post("/v1/chat/completions", model=ID, **QUESTION).json())
        assert not hub.requests
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] != ""
