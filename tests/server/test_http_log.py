"""Request log: one line for each finished request, as text or JSON; bodies only on request."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from shared.process.logs import JsonLines, TextLines
from tests.support.echo_engine import HELD
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    FAIL,
    USER,
    Server,
    save_tokenizer,
    serving,
)

SECRET = "Pssst! 7319"
FIRST_TOKENS = "tandem:time_to_first_token_seconds_count"


@pytest.fixture
def command(tmp_path) -> list[str]:
    save_tokenizer(tmp_path)
    return ["-m", "tests.support.http_fixtures", str(tmp_path)]


def use(server: Server) -> list[str]:
    """Sends requests with every finish reason; returns the ids of the finished ones."""
    whole = server.complete(SECRET, max_tokens=8, temperature=0)
    chat = server.post(CHAT, messages=USER, max_tokens=2, n=2).json()
    events = server.stream(COMPLETIONS, prompt=SECRET, max_tokens=40, stop="!")
    failed = server.post(COMPLETIONS, prompt=[FAIL, 97])
    assert failed.status_code == 500
    before = server.metrics()[FIRST_TOKENS]
    with server.post_and_leave(prompt=HELD, max_tokens=200):
        server.wait_for_metric(FIRST_TOKENS, before + 1)
    server.wait_for_metric("tandem:num_requests_running", 0)
    assert server.post(COMPLETIONS, prompt=SECRET, temperature=9).status_code == 400
    return [whole["id"], chat["id"], events[0]["id"]]


def ends(lines: list[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "message"} <= line.keys() for line in found)
    return [line for line in found if line["message"] == "request ended"]


def test_request_log_contains_summary_without_prompt_text(command):
    with serving([*command, "--log-format", "json"]) as server:
        ids = use(server)
    assert SECRET not in "".join(server.lines)
    found = ends(server.lines)
    assert [line["id"] for line in found[:3]] == ids
    reasons = ["length", "length", "stop", "error", "abort"]
    assert [line["finish_reason"] for line in found] == reasons
    first = found[0]
    assert (first["endpoint"], first["choices"]) == ("completions", 1)
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (11, 8, 0)
    assert first["accept_length"] == 3.0
    assert 0 < first["ttft_s"] <= first["e2e_s"]
    assert (found[1]["endpoint"], found[1]["choices"]) == ("chat", 2)
    assert found[4]["output_tokens"] > 0


@pytest.mark.matrix
def test_log_requests_logs_bodies_and_outputs(command):
    with serving([*command, "--log-requests"]) as server:
        use(server)
    text = "\n".join(server.lines)
    assert text.count("request ended") == 5
    assert f'outputs=["{SECRET[:8]}"]' in text
    assert '\\"max_tokens\\":8' in text


@pytest.mark.matrix
def test_log_level_warning_keeps_only_address_line(command):
    with serving([*command, "--log-level", "warning"]) as server:
        server.complete("a", max_tokens=1)
    assert len(server.lines) == 1
    assert " is served at " in server.lines[0]


def record(**fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("tandem", logging.INFO, "", 0, "it is so", None, None)
    made.fields = fields
    return made


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_log_fields_escape_newlines(kind):
    written = kind().format(record(name="a\n2026 error forged", other=1.5))
    assert "\n" not in written
    assert "forged" in written


def test_json_log_line_contains_exception():
    try:
        raise ValueError("of the device")
    except ValueError as error:
        made = record()
        made.exc_info = (type(error), error, error.__traceback__)
    line = json.loads(JsonLines().format(made))
    assert "ValueError: of the device" in line["exception"]
    assert TextLines().format(made).splitlines()[-1] == "ValueError: of the device"
