"""Requests that agents and libraries sent are accepted; answers and events validate strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from shared.server.protocol.response_types import STREAM_END
from tests.support.event_streams import parse_events
from tests.support.http_fixtures import Server
from tests.support.recorded_requests import FOLDER, RecordedRequest, distinct, scrubbed
from tests.support.scripted_model import call_of, serving_script
from tests.support.sdk_types import message_events, message_of, response_events, response_of

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = f"<think>\nI need the tool.\n</think>\n\nFirst.{call_of('look', city='Rome')}"
RECORDED = [
    pytest.param(request, id=f"{path.stem} {number}")
    for path in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(path.read_text(encoding="utf-8")))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving_script(tmp_path_factory.mktemp("model"), [OUTPUT]) as running:
        yield running


def check_whole(path: str, answer: httpx.Response) -> None:
    kinds = {"/v1/responses": response_of, "/v1/messages": message_of}
    kinds.get(path, ChatCompletion.model_validate_json)(answer.content)


def check_events(path: str, text: str) -> None:
    kinds = {"/v1/responses": response_events, "/v1/messages": message_events}
    if path in kinds:
        last = kinds[path](text)[-1]
        assert last["type"] in ("response.completed", "message_stop")
        return
    *chunks, end = [data for _, data in parse_events(text)]
    assert end == STREAM_END
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk)


@pytest.mark.parametrize("request_", RECORDED)
def test_recorded_request_is_answered(server, request_: dict[str, Any]):
    """Both complete and streamed, whichever the client sent."""
    for stream in (False, True):
        body = {**request_["body"], "model": "default", "stream": stream}
        if not stream:
            body.pop("stream_options", None)
        answer = httpx.post(
            server.url + request_["path"], json=body, headers=request_["headers"], timeout=60
        )
        assert answer.status_code == 200, answer.text
        path = request_["path"].partition("?")[0]
        if stream:
            check_events(path, answer.text)
        else:
            check_whole(path, answer)


def test_ignored_fields_of_clients_are_documented(server):
    """Fields without effect, which `--strict-fields` rejects, are in the list of the page."""
    ignored: set[str] = set()
    for parameters in RECORDED:
        (request,) = parameters.values
        body = {**request["body"], "model": "default", "stream": False}
        body.pop("stream_options", None)
        answer = httpx.post(
            server.url + request["path"], json=body, headers=request["headers"], timeout=60
        )
        ignored.update(answer.json().get("ignored") or ())
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    _, table = page.split("| client | ignored field |")
    rows = [line for line in table.split("\n\n")[0].splitlines() if "`" in line]
    documented = {name for row in rows for name in row.split("|")[2].split("`")[1::2]}
    assert ignored == documented


def test_stored_requests_have_no_prose():
    """Stored texts are short, and long ones are replaced."""
    uuid = "01a22614-bc20-7f21-8f0d-f451c96cdcb0"
    value = {
        "text": "You are an agent. " * 9,
        "path": "/mnt/some/where/project/a.txt",
        "id": uuid,
        "arguments": '{"command": "a long command with many words in it, more than kept"}',
        "list": [5, None, "short"],
    }
    assert scrubbed(value) == {
        "text": "text of 162 characters",
        "path": "/project/a.txt",
        "id": "0",
        "arguments": value["arguments"],
        "list": [5, None, "short"],
    }
    stored = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json"))
    assert "You are" not in stored


def test_requests_with_same_fields_are_stored_once():
    bodies = [{"a": [{"type": "x", "b": 1}]}, {"a": []}, {"a": [{"type": "y", "b": 1}] * 2}]
    requests = [RecordedRequest("POST", "/a", {}, body, 200, b"") for body in bodies]
    assert [each.body for each in distinct(requests)] == [bodies[2], bodies[0]]
