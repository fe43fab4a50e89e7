"""Expensive chat templates: limits of time and output, without delay for other requests."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.text.template_worker import DEADLINE_S, MAX_BYTES
from tests.support.http_fixtures import CHAT, Server, is_alive, save_tokenizer, serving

# The first message selects the behavior.
TEMPLATE = (
    "{% set action = messages[0].content %}{{ action }}"
    "{% if action == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif action == 'fill' %}{{ action * 10 ** 9 }}"
    "{% elif action == 'write' %}{% for a in range(9) %}{{ action * 10 ** 6 }}{% endfor %}"
    "{% elif action == 'count' %}{{ (action|length ** (action|length ** 12)) % 7 }}{% endif %}"
)
TOO_LONG = f"the chat template took longer than {DEADLINE_S:g} s"
MAX_GAP_S = 0.05
TRIES = 5  # retries, because a busy machine delays single runs


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running


def ask(server: Server, text: str) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    return server.post(CHAT, messages=messages, temperature=0, max_tokens=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("loop", TOO_LONG),
        ("count", TOO_LONG),  # a single C call that no other thread can interrupt
        ("fill", "the chat template failed"),
        ("write", f"the chat template wrote more than {MAX_BYTES} bytes"),
    ],
)
def test_expensive_chat_template_returns_400(server, text, reason):
    answer = ask(server, text)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"].startswith(reason)
    assert ask(server, "hi").json()["choices"][0]["message"]["content"] == "hi"


def worst_gap(server: Server) -> float:
    """Returns the longest response time of a route during an endless template."""
    gaps: list[float] = []
    bomb = threading.Thread(target=ask, args=(server, "loop"))
    with httpx.Client(base_url=server.url) as others:
        others.get("/health")
        bomb.start()
        while bomb.is_alive():
            began = time.monotonic()
            assert others.get("/health").status_code == 200
            gaps.append(time.monotonic() - began)
            time.sleep(0.005)
    return max(gaps)


def test_endless_chat_template_does_not_block_health(server):
    gaps: list[float] = []
    while len(gaps) < TRIES and min(gaps, default=1.0) >= MAX_GAP_S:
        gaps.append(worst_gap(server))
    assert min(gaps) < MAX_GAP_S


def test_endless_chat_template_does_not_block_other_chats(server):
    ask(server, "hi")
    is_beside = False
    for _ in range(TRIES):
        bomb = threading.Thread(target=ask, args=(server, "loop"))
        bomb.start()
        time.sleep(0.2)
        assert ask(server, "hi").status_code == 200
        is_beside = is_beside or bomb.is_alive()
        bomb.join()
        if is_beside:
            break
    assert is_beside


def workers_of(server: Server) -> list[int]:
    """Returns the pids of the server's child processes."""
    pid = server.pids()[1]
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_endless_chat_template_worker_ends_with_server(tmp_path, number):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as own:
        assert ask(own, "hi").is_success
        threading.Thread(target=ask_in_vain, args=(own,), daemon=True).start()
        time.sleep(0.3)
        pids = [own.pids()[1], *workers_of(own)]
        assert len(pids) == 2
        os.kill(own.process.pid if number == signal.SIGTERM else pids[0], number)
        own.process.wait(60)
        deadline = time.monotonic() + 60
        while any(map(is_alive, pids)):
            assert time.monotonic() < deadline, "a process is still alive"
            time.sleep(0.02)
    assert not any("Traceback" in line or "Exception" in line for line in own.lines)


def ask_in_vain(server: Server) -> None:
    with contextlib.suppress(httpx.HTTPError):
        ask(server, "loop")
