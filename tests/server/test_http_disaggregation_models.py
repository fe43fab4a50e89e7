"""Prefill and decode servers of models with window pools and with images: output equals one
server's, and each prompt is transferred."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_fixtures import CHAT, Server, serving
from tests.support.tiny_models import write_tiny
from tests.support.vlm_servers import ONE, OTHER, conversation, folder_with_a_tokenizer

pytestmark = pytest.mark.matrix
FLAGS = "--port 0 --page-size 16 --max-running-requests 2 --dtype float32"
IMPORTED = "tandem:kv_transfer_imported_tokens_total"
FIELDS = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
MODULES = ("tests.support.serve_reference", "torch_impl.serve")


def _pair(ends: ExitStack, module: str, folder: Path, flags: str) -> tuple[Server, Server]:
    """Starts a prefill server and a decode server."""

    def start(mode: str) -> Server:
        words = f"-m {module} --model-path {folder} {FLAGS} {flags} --disaggregation-mode {mode}"
        return ends.enter_context(serving(words.split()))

    prefill = start("prefill")
    decode = f"decode --prefill-servers {prefill.url} --remote-prefill-min-tokens 32"
    return prefill, start(decode)


def _cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("module", MODULES)
def test_window_pools_are_transferred(tmp_path, module):
    write_tiny(tmp_path, "olmo3", seed=1)
    with ExitStack() as ends:
        prefill, decode = _pair(ends, module, tmp_path, "--context-length 512")
        assert any("window" in line for line in decode.lines), decode.lines
        for seed in range(3):
            prompt = [(7 * seed + 5 * i + i * i) % 200 + 10 for i in range(200)]
            before = decode.metrics()[IMPORTED]
            remote = decode.complete(prompt, **FIELDS)
            assert decode.metrics()[IMPORTED] - before == _cached(remote) == 192
            alone = prefill.complete(prompt, **FIELDS)
            assert remote["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


@pytest.mark.parametrize("module", MODULES)
def test_images_are_transferred(tmp_path, module):
    """Two prompts differ in their image only."""
    flags = "--context-length 224 --chunked-prefill-size 64"
    with ExitStack() as ends:
        prefill, decode = _pair(ends, module, folder_with_a_tokenizer(tmp_path), flags)
        for image in (ONE, OTHER):
            messages, _ = conversation("look at this: ", image, "and at these words. " * 5)
            before = decode.metrics()[IMPORTED]
            remote, alone = (_answer(server, messages) for server in (decode, prefill))
            assert decode.metrics()[IMPORTED] - before == _cached(remote) >= 64
            assert remote["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
            assert remote["choices"][0]["message"] == alone["choices"][0]["message"]


def _answer(server: Server, messages: list[dict[str, Any]]) -> dict[str, Any]:
    response = server.post(CHAT, messages=messages, **FIELDS)
    assert response.status_code == 200, response.text
    return response.json()
