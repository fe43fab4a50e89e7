"""Event loop during the parsing of large bodies; work is counted, not timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.engine.checks import RequestLimits
from shared.server.api import request_parsing as bodies
from shared.server.api.app import make_apps
from shared.server.completions.grammars import GrammarChecks
from shared.server.engine_link.body_thread import SHORT_BYTES, BodyParsingThread
from shared.server.engine_link.chunked_write import PIECE
from shared.server.engine_link.workers import WorkerPool
from shared.server.protocol import content
from shared.server.protocol.errors import ApiError
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from shared.text import worker
from tests.support.engine_info import facts_of
from tests.support.http_fixtures import CHAT, COMPLETIONS

FACTS = facts_of(
    RequestLimits(
        context_length=8,
        max_request_tokens=8,
        vocab_size=8,
        max_stop_token_ids=1,
        max_logit_bias_entries=1,
        max_logprobs=1,
    )
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def body_of(parts: list[dict[str, Any]]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


def test_too_many_images_rejected_before_reading_parts(monkeypatch):
    read: list[Any] = []
    monkeypatch.setattr(content, "_read_part", lambda part, kinds: read.append(part) or part)
    bodies.parse(body_of([IMAGE] * content.MAX_IMAGES), ChatRequest)
    assert len(read) == content.MAX_IMAGES
    with pytest.raises(ApiError, match="has 10000 images, at most 64 are supported"):
        bodies.parse(body_of([IMAGE] * 10_000), ChatRequest)
    assert len(read) == content.MAX_IMAGES


def test_parse_yields_to_threads_per_object(monkeypatch):
    """A thread releases the GIL only in Python code; its calls are counted here."""
    runs: list[Any] = []
    monkeypatch.setattr(bodies, "_let_others_run", lambda fields: runs.append(fields) or fields)
    bodies.parse(body_of([{"type": "text", "text": "a"}] * 1000), ChatRequest)
    assert len(runs) == 1002


def test_parse_part_count_independent_of_chunk_size(monkeypatch):
    texts = json.dumps({"prompt": ['"a" ' * 9] * 9, "stop": ["b"] * 9}).encode()

    def fewest() -> int:
        """Returns the lowest bound that accepts the body."""
        for bound in range(100):
            monkeypatch.setattr(bodies, "MAX_PARTS", bound)
            with contextlib.suppress(ApiError):
                bodies.parse(texts, CompletionRequest)
                return bound
        raise AssertionError("no bound accepts the body")

    at_once = fewest()
    for piece in (1, 2, 3, 64):
        monkeypatch.setattr(bodies, "AT_ONCE", piece)
        assert fewest() == at_once == 20  # two names and 18 strings, without inner quotes


def test_body_parsing_thread_serializes_without_blocking_loop():
    """The first work item ends only if the event loop runs meanwhile."""
    goes_on = threading.Event()

    def first() -> int:
        assert goes_on.wait(30)
        return threading.get_ident()

    async def run() -> list[int]:
        work = BodyParsingThread()
        long = [work.do(1 + SHORT_BYTES, each) for each in (first, threading.get_ident)]
        both = asyncio.gather(*long)
        await asyncio.sleep(0)
        goes_on.set()
        return [*await both, await work.do(SHORT_BYTES, threading.get_ident)]

    one, other, short = asyncio.run(run())
    assert one == other != short == threading.get_ident()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_routes_parse_long_bodies_off_loop(path, monkeypatch):
    threads: list[int] = []

    def read(body: bytes) -> dict[str, Any]:
        threads.append(threading.get_ident())
        raise ApiError(400, "")

    monkeypatch.setattr(bodies.json, "loads", lambda body, **hook: read(body))
    client: Any = SimpleNamespace(facts=FACTS)
    made = make_apps(client, None, None, None, GrammarChecks(FACTS), (), has_admin_listener=False)

    async def ask() -> None:
        transport = httpx.ASGITransport(made.clients)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
            for size in (SHORT_BYTES, 1 + SHORT_BYTES):
                headers = {"content-type": "application/json"}
                await asking.post(path, content=b" " * size, headers=headers)

    asyncio.run(ask())
    short, long = threads
    assert short == threading.get_ident() != long


def test_parse_error_holds_no_reference_to_body():
    async def refused() -> ApiError:
        with pytest.raises(ApiError) as raised:
            await BodyParsingThread().do(
                1 + SHORT_BYTES, bodies.parse, b'{"messages": [3]}', ChatRequest
            )
        return raised.value

    error = asyncio.run(refused())
    assert error.param == "messages[0]"
    assert (error.__cause__, error.__context__) == (None, None)
    assert "parse" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_worker_pool_writes_long_message_in_chunks(monkeypatch):
    taken: list[int] = []

    class Process:
        def __init__(self) -> None:
            self.stdin, self.stdout = self, asyncio.StreamReader()
            self.stdout.feed_data(worker.frame(worker.DONE + b"read"))

        def write(self, data: bytes | memoryview) -> None:
            taken.append(len(data))

        async def drain(self) -> None:
            taken.append(0)

    async def start(*command: str, **options: Any) -> Process:
        return Process()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    workers = WorkerPool("", b"first", name="", deadline_s=1.0, part="")
    assert asyncio.run(workers.call_bytes(bytes(2 * PIECE + 1))) == b"read"
    assert taken == [5, PIECE, 0, PIECE, 0, 1, 0]
