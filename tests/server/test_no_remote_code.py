"""Safety: no remote code of a checkpoint runs, and no URL of a request is opened."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.closing_fixture import closing_fixture
from tests.support.http_fixtures import CHAT, COMPLETIONS, Server, save_tokenizer, serving
from tests.support.tiny_models import write_tiny

HOOK = """
import os, sys
with open({events_file!r}, "a") as log:
    log.write("begun\\n")
def look(event, args):
    is_address = event == "socket.connect" and isinstance(args[1], tuple)
    if is_address or (event == "import" and args[0].startswith("canary")):
        with open({events_file!r}, "a") as log:
            log.write(f"{{event}} {{args[1] if is_address else args[0]}}\\n")
        if is_address:
            raise PermissionError("nothing is to be opened")
sys.addaudithook(look)
"""
"""Audit hook that every server process installs first; it records imports and connections."""

CODE = "raise SystemExit('the code of a checkpoint was run')\n"
AUTO_MAP = {
    "AutoConfig": "canary_configuration.CanaryConfig",
    "AutoModelForCausalLM": "canary_modeling.CanaryModel",
    "AutoTokenizer": ["canary_tokenization.CanaryTokenizer", None],
}


class Listener:
    """Listener that counts connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/canary.png"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return
            self.num_connections += 1

    def close(self) -> None:
        self._socket.close()


listener = closing_fixture(Listener)


@pytest.fixture(scope="module")
def events_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit") / "events"


@pytest.fixture(scope="module")
def server(tmp_path_factory, events_file, listener) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("canary") / "model"
    write_tiny(folder, "qwen3", 3)
    save_tokenizer(folder)
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        more = {"auto_map": AUTO_MAP, "trust_remote_code": True, "_name_or_path": listener.url}
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    for module in ("configuration", "modeling", "tokenization"):
        (folder / f"canary_{module}.py").write_text(CODE)
    (folder / "sitecustomize.py").write_text(CODE)
    hooks = events_file.parent / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK.format(events_file=str(events_file)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(hooks))
        command = ["-m", "tests.support.serve_reference", "--model-path", str(folder)]
        with serving([*command, "--port", "0"]) as running:
            yield running


def test_checkpoint_with_auto_map_runs_no_remote_code(server, events_file):
    assert server.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    body = server.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=2)
    assert body.status_code == 200
    events = events_file.read_text().splitlines()
    assert events == ["begun"] * 3, "engine, server and template worker"


REFUSED = (
    "does not support image input",
    "is not supported",
    "are not supported",
    "must be parts of type image_url",
)


def part(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "a"}, {"type": kind, kind: fields}]


def test_request_urls_are_never_opened(server, events_file, listener):
    url = listener.url
    contents = [
        part("image_url", url=url),
        part("video_url", url=url),
        part("input_audio", data=url, format="wav"),
        part("file", file_data=url),
        [{"type": "input_image", "image_url": url}],
    ]
    for content in contents:
        answer = server.post(CHAT, messages=[{"role": "user", "content": content}])
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith("messages[0]")
        assert any(words in error["message"] for words in REFUSED)
    text_request = {"messages": [{"role": "user", "content": url}], "max_tokens": 1}
    for fields, status in (
        ({"model": url}, 404),
        ({"user": url}, 200),
        ({"chat_template": url}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"$ref": url}}}, 400),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": url}}]}, 400),
        ({"web_search_options": {"url": url}}, 200),
        ({}, 200),
    ):
        assert server.post(CHAT, **{**text_request, **fields}).status_code == status, fields
    assert server.post(COMPLETIONS, prompt=url, max_tokens=1).status_code == 200
    assert "socket.connect" not in events_file.read_text()
    assert listener.num_connections == 0


def test_audit_hook_and_listener_detect_violations(tmp_path, listener):
    """The hook records an import and a connection, and the listener counts a connection."""
    events_file = tmp_path / "events"
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(events_file=str(events_file)))
    (tmp_path / "canary_modeling.py").write_text(CODE)
    script = tmp_path / "script.py"
    host, port = listener.url.split("/")[2].split(":")
    script.write_text(
        "import socket\n"
        "try:\n    import canary_modeling\nexcept SystemExit:\n    pass\n"
        f"try:\n    socket.create_connection(({host!r}, {port}))\nexcept PermissionError:\n"
        "    print('served at http://x is served at http://x')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with serving([str(script)]) as ran:
            ran.process.wait(10)
    events = events_file.read_text().splitlines()
    assert [event.split()[0] for event in events] == ["begun", "import", "socket.connect"]
    before = listener.num_connections
    socket.create_connection((host, int(port))).close()
    for _ in range(100):
        if listener.num_connections == before + 1:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the listener counts no connection")
