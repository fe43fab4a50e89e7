"""Recorded requests of clients: a recording proxy, and the form in which requests are stored.

A stored request has the structure of the original. Prose, grammars, ids of machines
and paths are replaced.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.patches import PATCH_GRAMMAR

FOLDER = Path(__file__).resolve().parents[1] / "server" / "recorded"
TIMEOUT_S = 120.0
MAX_TEXT = 48  # characters of a text that is stored unchanged
_STORED_HEADERS = ("anthropic-version", "anthropic-beta", "accept", "content-type", "user-agent")
_HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "date", "server", "host")
_NO_PROSE = re.compile(r"[\w./:+=-]*|data:image/.*")
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{64}")
_PATH = re.compile(r"/[\w./-]*/(?=project\b)")


@dataclass(frozen=True)
class RecordedRequest:
    """Request of a client with the answer.

    Attributes:
      method, path: Request line.
      headers: Headers; the names are in lower case.
      body: JSON of the body; None without one.
      status, answer: Status and body of the answer.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    answer: bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the request in the form in which it is stored."""
        headers = {name: self.headers[name] for name in _STORED_HEADERS if name in self.headers}
        return {"path": self.path, "headers": headers, "body": scrubbed(self.body)}


def scrubbed(value: Any) -> Any:
    """Returns JSON in which the length of a text replaces prose."""
    if isinstance(value, dict):
        kept = {"definition": PATCH_GRAMMAR} if "definition" in value else {}
        return {key: scrubbed(each) for key, each in value.items()} | kept
    if isinstance(value, list):
        return list(map(scrubbed, value))
    if not isinstance(value, str):
        return value
    text = _ID.sub("0", _PATH.sub("/", value))
    is_kept = len(text) <= MAX_TEXT or _NO_PROSE.fullmatch(text) or _is_object(text)
    return text if is_kept else f"text of {len(text)} characters"


def _is_object(text: str) -> bool:
    """Returns True for the arguments of a call, and for objects in metadata."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def distinct(requests: Sequence[RecordedRequest]) -> list[RecordedRequest]:
    """Returns the requests with fields or types that no longer request has."""
    found: list[RecordedRequest] = []
    seen: set[tuple[str, ...]] = set()
    posts = [request for request in requests if request.method == "POST"]
    for request in sorted(posts, key=lambda each: -len(json.dumps(each.body))):
        parts = set(_parts(request.body, (request.path.partition("?")[0],)))
        if parts - seen:
            found.append(request)
        seen |= parts
    return found


def _parts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the path of every field, and every value of the fields `type` and `role`."""
    if isinstance(value, list):
        for each in value:
            yield from _parts(each, (*path, "[]"))
    elif isinstance(value, dict):
        kind = str(value.get("type") or value.get("role") or "")
        for key, each in value.items():
            yield from _parts(each, (*path, kind, key))
    else:
        yield path


class RecordingProxy:
    """HTTP proxy of one server that records requests and answers.

    Args:
      url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        self.requests: list[RecordedRequest] = []
        self._target = urlsplit(url).netloc
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[RecordingProxy]:
        """Forwards requests until the block ends."""
        thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._listener.shutdown()
            self._listener.server_close()
            thread.join(TIMEOUT_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                sent = self.rfile.read(int(self.headers.get("content-length", 0)))
                given = {name.lower(): value for name, value in self.headers.items()}
                answer, content = proxy._forward(self.command, self.path, given, sent)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP_HEADERS:
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_HEAD = do_DELETE = do

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _forward(
        self, method: str, path: str, headers: dict[str, str], sent: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=TIMEOUT_S)
        forwarded = {name: value for name, value in headers.items() if name not in _HOP_HEADERS}
        connection.request(method, path, sent, forwarded | {"accept-encoding": "identity"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        body = json.loads(sent) if sent else None
        recorded = RecordedRequest(method, path, headers, body, answer.status, content)
        self.requests.append(recorded)
        return answer, content
