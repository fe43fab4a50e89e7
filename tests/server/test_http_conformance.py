"""Rarer forms of HTTP: HEAD, absolute-form targets, compressed bodies, CORS."""

from __future__ import annotations

import gzip
import json
import socket
import tomllib
from collections.abc import Iterator

import httpx
import pytest

from shared.options.flags import ConfigError
from shared.options.server import ServerOptions
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    HOST_NAME,
    JSON,
    ROOT,
    Server,
    save_tokenizer,
    serving,
)

SITE, KEY = "https://chat.example:8443", "key"
GET_ROUTES = ["/health", "/ping", "/live", "/version", "/v1/models", "/v1/models/repeater"]
GET_ROUTES += ["/capabilities", "/metrics", "/openapi.json", "/", "/playground/main.js"]
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def cors_server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server with one allowed origin and an API key."""
    folder = tmp_path_factory.mktemp("pages")
    save_tokenizer(folder)
    flags = ["--allowed-origins", SITE, "--api-key", KEY]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


@pytest.mark.parametrize("path", GET_ROUTES)
def test_head_equals_get_without_body(server, path):
    got = httpx.get(server.url + path, timeout=10)
    with socket.create_connection(address(server), timeout=10) as connection:
        head = f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode())
        response = received(connection)
    assert response.startswith(b"HTTP/1.1 200 ")
    fields, _, body = response.partition(b"\r\n\r\n")
    assert body == b""
    if path != "/metrics":  # its content changes between requests
        assert f"content-length: {len(got.content)}".encode() in fields.lower()


def test_head_of_post_route_returns_405(server):
    answer = httpx.head(server.url + COMPLETIONS, timeout=10)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def address(server: Server) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def received(connection: socket.socket) -> bytes:
    parts = b""
    while part := connection.recv(1 << 16):
        parts += part
    return parts


def get_target(server: Server, target: str, host: str) -> tuple[int, bytes]:
    """Returns the status and the body of a GET of a raw target."""
    with socket.create_connection(address(server), timeout=10) as connection:
        head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = received(connection)
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def test_absolute_form_target_is_accepted(server):
    models = httpx.get(server.url + "/v1/models", timeout=10).content
    for target in ("http://localhost:80/v1/models", "HTTP://127.0.0.1/v1/models?x=1"):
        assert get_target(server, target, "localhost") == (200, models)
    assert get_target(server, "http://localhost", "localhost")[0] == 200  # the playground page
    assert get_target(server, "http://localhost/v1/models/re%70eater", "localhost")[0] == 200


def test_absolute_form_host_overrides_host_header(server):
    """RFC 9112, 3.2.2; otherwise a page could bypass the host check."""
    assert get_target(server, f"http://{HOST_NAME}/health", "evil.example")[0] == 200
    assert get_target(server, "http://evil.example/health", "localhost")[0] == 403


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_compressed_body_returns_415(server, path, coding):
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    headers = {**JSON, "content-encoding": coding}
    answer = httpx.post(server.url + path, content=body, headers=headers, timeout=10)
    assert answer.status_code == 415
    assert repr(coding) in answer.json()["error"]["message"]
    plain = {**JSON, "content-encoding": "identity"}
    taken = httpx.post(server.url + "/tokenize", content=b'{"prompt": "a"}', headers=plain)
    assert taken.status_code == 200


def test_version_equals_pyproject(server):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in ("/version", "/openapi.json"):
        response = httpx.get(server.url + path, timeout=10).json()
        assert response.get("info", response)["version"] == project["version"]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/no_such"])
def test_cors_allowed_origin_may_request_and_read(cors_server, path):
    asked = {"origin": SITE, **PREFLIGHT}
    answer = httpx.request("OPTIONS", cors_server.url + path, headers=asked, timeout=10)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == SITE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    for key in (KEY, "wrong"):  # errors have CORS headers too
        headers = {"origin": SITE, "authorization": f"Bearer {key}"}
        read = httpx.get(cors_server.url + path, headers=headers, timeout=10)
        assert read.headers["access-control-allow-origin"] == SITE
        assert read.headers["vary"] == "Origin"
        for each in (answer, read):
            assert "access-control-allow-credentials" not in each.headers


def test_cors_headers_are_set_on_streams(cors_server):
    headers = {**JSON, "origin": SITE, "authorization": f"Bearer {KEY}"}
    body = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": True})
    answer = httpx.post(cors_server.url + COMPLETIONS, content=body, headers=headers, timeout=10)
    assert answer.headers["access-control-allow-origin"] == SITE
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["https://chat.example", SITE + ".evil", "null", "*"])
def test_cors_unknown_origin_returns_403(cors_server, origin):
    asked = {"origin": origin, **PREFLIGHT}
    answer = httpx.request("OPTIONS", cors_server.url + CHAT, headers=asked, timeout=10)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    read = httpx.get(cors_server.url + "/live", headers={"origin": origin}, timeout=10)
    for each in (answer, read):
        assert "access-control-allow-origin" not in each.headers


def test_cors_preflight_checks_host(cors_server):
    asked = {"origin": SITE, "host": "evil.example", **PREFLIGHT}
    answer = httpx.request("OPTIONS", cors_server.url + CHAT, headers=asked, timeout=10)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"


def test_cors_without_allowed_origins_sets_no_headers(server):
    asked = {"origin": SITE, **PREFLIGHT}
    answer = httpx.request("OPTIONS", server.url + CHAT, headers=asked, timeout=10)
    assert answer.status_code == 405
    read = httpx.get(server.url + "/live", headers={"origin": SITE}, timeout=10)
    for each in (answer, read):
        assert not any(name.startswith("access-control") for name in each.headers)


def test_allowed_origins_flag_parses_or_rejects_origins():
    options = ServerOptions(allowed_origins=f"{SITE.upper()}, http://localhost:3000")
    assert options.origins == (SITE, "http://localhost:3000")
    assert ServerOptions(allowed_origins="*").origins == ("*",)
    assert ServerOptions().origins == ()
    for wrong in ("chat.example", SITE + "/", SITE + "/chat", "null", "https://a@b"):
        with pytest.raises(ConfigError, match="--allowed-origins contains .* not an origin"):
            ServerOptions(allowed_origins=wrong)
