"""Two replicas of the demo model: equal texts, cached conversations, a killed replica, the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.http_fixtures import CHAT, Server, is_alive, serving

pytestmark = pytest.mark.matrix

COMMAND = ["-m", "torch_impl.serve", "--port", "0", "--context-length", "512"]
COMMAND += ["--max-running-requests", "4"]
QUESTIONS = ["Tom has 3 apples and buys 4. How many has he? " * 8, "And if he eats 2?", "Why?"]


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    with serving(COMMAND) as server:
        yield server


@pytest.fixture(scope="module")
def replicated() -> Iterator[Server]:
    with serving([*COMMAND, "--replicas", "2"]) as server:
        wait_ready(server)
        yield server


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_ready(server: Server) -> None:
    def is_ready() -> bool:
        fields = httpx.get(f"{server.url}/capabilities", timeout=30).json()
        return [each["state"] for each in fields.get("replicas", [])] == ["ready"] * 2

    wait_until(is_ready)


def conversation(server: Server) -> list[tuple[str, int]]:
    """Returns the reply and the cached prompt tokens of each turn."""
    messages, found = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        fields = server.post(CHAT, messages=messages, max_tokens=24, temperature=0.7, seed=3).json()
        text = fields["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        found.append((text, fields["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return found


def test_replicas_give_texts_of_single_server(single, replicated):
    assert conversation(replicated) == conversation(single)


def test_conversation_hits_cache_of_its_replica(replicated):
    replicated.post(CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    assert [cached > 0 for _, cached in conversation(replicated)][1:] == [True, True]


def test_killed_replica_returns(replicated):
    """Requests meanwhile go to the other replica; those of the killed one fail with 502."""

    def complete() -> None:
        while not done.is_set():
            response = replicated.post("/v1/completions", prompt="1 + 1 =", max_tokens=8)
            codes.append(response.status_code)

    done, codes = threading.Event(), list[int]()
    clients = [threading.Thread(target=complete) for _ in range(4)]
    for each in clients:
        each.start()
    before = replicated.pids()
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: len(set(replicated.pids()) - set(before)) == 1)
    wait_ready(replicated)
    done.set()
    for each in clients:
        each.join()
    assert set(codes) <= {200, 502}
    assert codes.count(502) <= 4


def test_sigterm_ends_all_processes():
    with serving([*COMMAND, "--replicas", "2"]) as server:
        wait_ready(server)
        pids = [pid for root in server.pids() for pid in [root, *children_of(root)]]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not [pid for pid in pids if is_alive(pid)]


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
