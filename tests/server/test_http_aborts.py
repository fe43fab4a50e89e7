"""Disconnects: pages and slots are freed, and other requests keep their outputs."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.http_fixtures import COMPLETIONS, Server, post_head, serving
from tests.support.serve_toy import SLOTS

STORM = 500
AT_ONCE = 60  # connections
STEP_MS = 50
TOKENS = "tandem:generation_tokens_total"
LONG = [i % 50 for i in range(300)]
"""Prompt of several prefill chunks."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(["-m", "tests.support.serve_toy", "--step-ms", str(STEP_MS)]) as running:
        yield running


def num_steps(found: dict[str, float]) -> float:
    return sum(v for name, v in found.items() if name.startswith("tandem:engine_steps_total"))


def connect(server: Server, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns the connection with the response unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection, sent = socket.create_connection((host, int(port))), json.dumps(body).encode()
    connection.sendall(post_head(COMPLETIONS, len(sent)).replace(b"model.example", b"localhost"))
    connection.sendall(sent)
    return connection


def wait_for_open(server: Server, running: int, waiting: int) -> dict[str, float]:
    expected = (running, waiting)
    deadline = time.monotonic() + 60
    while True:
        found = server.metrics()
        names = ("tandem:num_requests_running", "tandem:num_requests_waiting")
        if tuple(found[name] for name in names) == expected:
            return found
        assert time.monotonic() < deadline, [found[name] for name in names]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["waiting", "prompt", "decoding"])
def test_disconnect_frees_request_within_two_steps(server, stream, where):
    empty = wait_for_open(server, 0, 0)
    body = {"prompt": [3, 4], "max_tokens": 150, "ignore_eos": True, "stream": stream, "n": 2}
    others = []
    if where == "waiting":
        others = [connect(server, {**body, "n": 1, "seed": i}) for i in range(SLOTS)]
        wait_for_open(server, SLOTS, 0)
    prompt = [len(where) + stream, *LONG] if where == "prompt" else [3, 4]
    leaving = connect(server, {**body, "prompt": prompt})
    running, waiting = (SLOTS, 2) if others else (2, 0)
    if where == "prompt":  # the second choice waits for the prefill of the first
        running, waiting = 1, 1
    before = wait_for_open(server, running, waiting)
    if where == "decoding":
        while (
            before["tandem:generation_tokens_total"] < empty["tandem:generation_tokens_total"] + 4
        ):
            before = server.metrics()
    leaving.close()
    after = wait_for_open(server, len(others), 0)
    assert num_steps(after) - num_steps(before) <= 3  # one step was already planned
    for other in others:
        other.close()
    after = wait_for_open(server, 0, 0)
    for name in ("tandem:kv_pages_free", "tandem:request_slots_free"):
        assert after[name] == empty[name]


async def _leave(client: httpx.AsyncClient, number: int, gate: asyncio.Semaphore) -> bool:
    """Returns True if the client disconnected before the end of its response."""
    rng = random.Random(number)
    body = {"prompt": [rng.randrange(96) for _ in range(rng.randint(1, 150))], "seed": number}
    body |= {"max_tokens": rng.randint(30, 300), "ignore_eos": True, "n": rng.choice((1, 1, 2, 3))}
    body["stream"] = rng.random() < 0.5
    async with gate:
        try:
            await asyncio.wait_for(_read(client, body), rng.choice((0.01, 0.05, 0.2)))
        except TimeoutError:
            return True
    return False


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_bytes():
            pass


async def _storm(url: str) -> tuple[int, list[int]]:
    limits = httpx.Limits(max_connections=AT_ONCE + 1)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        gate = asyncio.Semaphore(AT_ONCE)
        beside = {"prompt": [1, 2, 3], "max_tokens": 300, "seed": 1, "ignore_eos": True}
        asked = client.post(COMPLETIONS, json={**beside, "return_token_ids": True})
        stays = asyncio.create_task(asked)
        left = await asyncio.gather(*(_leave(client, number, gate) for number in range(STORM)))
        return sum(left), (await stays).json()["choices"][0]["token_ids"]


def test_abort_storm_frees_pages_and_preserves_tokens(server):
    before = server.metrics()
    seeded = {"prompt": [1, 2, 3], "max_tokens": 300, "seed": 1, "ignore_eos": True}
    alone = server.complete(**seeded, return_token_ids=True)["choices"][0]["token_ids"]
    num_left, tokens = asyncio.run(_storm(server.url))
    assert num_left > STORM / 2
    assert tokens == alone
    assert len(tokens) == 300
    after = wait_for_open(server, 0, 0)
    for name in ("tandem:kv_pages_free", "tandem:request_slots_free", "tandem:kv_cache_usage_perc"):
        assert after[name] == before[name], name
    assert after['tandem:request_success_total{finished_reason="abort"}'] > num_left / 5
