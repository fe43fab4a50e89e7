"""A local HTTP server that speaks the protocol of the Hugging Face hub, on the loopback alone.

It has the routes of a client: the list of a repository's files, HEAD and GET of a file at a
revision, and large files by a redirect to another host, with ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 4096
TOKEN = "hf_of_the_test"
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LISTED = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")


@dataclass
class HubRepository:
    """A repository of the hub.

    Attributes:
      commits: The files of each commit, by path.
      refs: The commit of each branch and tag.
      needs: "public"; "private" and "gated" need the token, "denied" none opens.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    needs: str = "public"

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Adds a commit; returns its hash."""
        content = b"".join(name.encode() + files[name] for name in sorted(files))
        commit = hashlib.sha1(content).hexdigest()
        self.commits[commit] = files
        self.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """The files of main, which a test may change."""
        return self.commits[self.refs["main"]]


@dataclass(frozen=True)
class HubRequest:
    """A request that came; `has_token` is whether it had the user's token."""

    method: str
    path: str
    range: str | None
    has_token: bool


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
      repositories: By id.
      requests: Those that came, in order.
      sent_bytes: Of bodies of files.
      cut_after: Bytes of a large file's body after which the connection breaks; None: never.
      cuts: Number of times that it breaks; further requests are answered.
      status: Answers every request with this status, where it is not 0.
      has_ranges: Ranges are answered; else the whole file is.
      lists_sizes: The list of files has sizes and hashes, as the hub's has on request.
      damages: The first byte of large files is sent wrong.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, HubRepository] = {}
        self.requests: list[HubRequest] = []
        self.sent_bytes = 0
        self.cut_after: int | None = None
        self.cuts = 1 << 30
        self.status = 0
        self.has_ranges = self.lists_sizes = True
        self.damages = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo_id: str, folder: Path, **more: bytes) -> HubRepository:
        """Adds a repository with the files of a folder and others."""
        made = self.repositories[repo_id] = HubRepository()
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        made.commit(files | more)
        return made

    def paths(self, method: str = "GET") -> list[str]:
        """The files that were requested, in order, and "list" for the list of files."""
        found = []
        for request in self.requests:
            file = FILE.fullmatch(request.path)
            if request.method == method and not request.path.startswith("/lfs/"):
                found.append(file[3] if file else "list")
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client has read what it needs
            self.close_connection = True

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        hub.requests.append(HubRequest(self.command, path, self.headers.get("Range"), has_token))
        if hub.status:
            return self._error(hub.status)
        if path.startswith("/lfs/"):
            return self._send_large(path.removeprefix("/lfs/"))
        quoted = urlsplit(self.path).path  # a revision may have slashes, which are quoted
        listed, file = LISTED.fullmatch(quoted), FILE.fullmatch(quoted)
        match = listed or file
        repo_id, revision = match.groups()[:2] if match else ("", None)
        repository = hub.repositories.get(repo_id)
        if repository is None or (repository.needs == "private" and not has_token):
            return self._error(401, "RepoNotFound")
        if (
            file
            and repository.needs != "public"
            and not (has_token and repository.needs != "denied")
        ):
            return self._error(403 if has_token else 401, "GatedRepo")
        named = unquote(revision or "main")
        commit = repository.refs.get(named, named)
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound")
        files = repository.commits[commit]
        if listed:
            return self._list(str(repo_id), commit, files)
        name = unquote(file[3]) if file else ""
        if name not in files:
            return self._error(404, "EntryNotFound")
        self._send_file(files[name], commit)

    def _list(self, repo_id: str, commit: str, files: dict[str, bytes]) -> None:
        siblings = [
            {"rfilename": name, **(_described(data) if self.server.lists_sizes else {})}
            for name, data in files.items()
        ]
        body = json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        self._start(200, {"Content-Type": "application/json", "Content-Length": len(body)})
        self.wfile.write(body)

    def _send_file(self, data: bytes, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_hash(data)}"'}
        if len(data) <= LARGE_BYTES:
            return self._send(data, headers)
        digest = hashlib.sha256(data).hexdigest()
        large = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": len(data)}
        other_host = f"http://localhost:{self.server.server_port}/lfs/{digest}"
        self._start(302, headers | large | {"Location": other_host, "Content-Length": 0})

    def _send_large(self, digest: str) -> None:
        for repository in self.server.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return self._send(data, {"ETag": f'"{digest}"'})
        self._error(404)

    def _send(self, data: bytes, headers: dict[str, Any]) -> None:
        hub, begin, end = self.server, 0, len(data)
        is_large = self.path.startswith("/lfs/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and hub.has_ranges:
            begin, end = int(asked[1]), min(end, int(asked[2] or end) + 1)
            if begin >= len(data):
                return self._error(416)
            headers = headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        if hub.damages and is_large:
            data = b"\0" + data[1:]
        body = data[begin:end]
        status = 206 if asked and hub.has_ranges else 200
        self._start(status, headers | {"Content-Length": len(body)})
        if self.command == "HEAD":
            return
        if is_large and hub.cut_after is not None and len(body) > hub.cut_after and hub.cuts:
            hub.cuts -= 1
            body = body[: hub.cut_after]
            self.close_connection = True
        hub.sent_bytes += len(body)
        self.wfile.write(body)

    def _error(self, status: int, code: str = "") -> None:
        named = {"X-Error-Code": code} if code else {}
        self._start(status, named | {"Content-Length": 0})

    def _start(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()


def _described(data: bytes) -> dict[str, Any]:
    size: dict[str, Any] = {"size": len(data), "blobId": _git_hash(data)}
    if len(data) > LARGE_BYTES:
        digest = hashlib.sha256(data).hexdigest()
        size["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
    return size


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without repositories; ends with the block."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
