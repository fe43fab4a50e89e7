"""Prefill and decode servers of both backends, with the demo model: output equals one server's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.options.options import DEFAULT_MODEL
from tests.support.http_fixtures import Server, serving

pytestmark = pytest.mark.matrix
MODULES = {"torch": "torch_impl.serve", "jax": "tests.support.serve_fast_compile"}
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
LIMITS = "--max-running-requests 2 --context-length 1024 --max-total-tokens 8192"
IMPORTED = "tandem:kv_transfer_imported_tokens_total"


def _started(ends: ExitStack, backend: str, mode: str) -> Server:
    words = f"--port 0 --model-path {DEFAULT_MODEL} --speculative-algorithm NEXTN {LIMITS} {mode}"
    return ends.enter_context(serving(["-m", MODULES[backend], *words.split()]))


@pytest.fixture(scope="module")
def prefills() -> Iterator[dict[str, Server]]:
    with ExitStack() as ends:
        mode = "--disaggregation-mode prefill"
        yield {backend: _started(ends, backend, mode) for backend in MODULES}


def _compared(answer: dict[str, Any]) -> tuple[Any, Any]:
    return [choice["token_ids"] for choice in answer["choices"]], answer["speculative"]


@pytest.mark.parametrize("source", MODULES)
@pytest.mark.parametrize("sink", MODULES)
def test_transfer_between_backends_keeps_output(prefills, source, sink):
    rng, prefill = random.Random(f"{source}-{sink}"), prefills[source]
    mode = f"--disaggregation-mode decode --prefill-servers {prefill.url}"
    with ExitStack() as ends:
        decode = _started(ends, sink, f"{mode} --remote-prefill-min-tokens 64")
        for temperature in (0, 1):
            first = rng.randrange(len(TEXT) - 1500)
            prompt = TEXT[first : first + 1500]
            fields = {"max_tokens": 48, "temperature": temperature, "seed": 3}
            before = decode.metrics()[IMPORTED]
            remote = decode.complete(prompt, return_token_ids=True, **fields)
            cached = remote["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert decode.metrics()[IMPORTED] - before == cached >= 64
            alone = prefill.complete(prompt, return_token_ids=True, **fields)
            assert _compared(remote) == _compared(alone)
            assert remote["speculative"]["verify_steps"] > 0
