"""Access middleware of all routes: API keys, allowed hosts, and the head size limit."""

from __future__ import annotations

import base64
import hmac
import json
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from shared.server.api import access_middleware as gates
from shared.server.api.access_middleware import MAX_HEAD_BYTES, OPEN_PATHS
from tests.support.http_fixtures import (
    ADMIN_KEY,
    CHAT,
    COMPLETIONS,
    HOST_NAME,
    USER,
    Server,
    save_tokenizer,
    serving,
)

KEY = "schlüssel"
CORPORA = "/list_external_corpora"
GET_ROUTES = ["/v1/models", "/v1/models/default", "/metrics", "/capabilities", "/"]
GET_ROUTES += ["/playground/main.js", "/v1/requests/a/trace", "/v2"]
POST_ROUTES = [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/add_external_corpus"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    command = ["-m", "tests.support.http_fixtures", str(folder), "--api-key", KEY]
    with serving(command) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("open"))
    with serving(["-m", "tests.support.http_fixtures", folder]) as running:
        yield running


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


@pytest.fixture(scope="module")
def split_server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server with a separate listener for metrics and admin routes."""
    folder = str(tmp_path_factory.mktemp("split_server"))
    flags = ["--api-key", KEY, "--with-admin-listener"]
    with serving(["-m", "tests.support.http_fixtures", folder, *flags]) as running:
        yield running


def admin_url(server: Server) -> str:
    (line,) = [line for line in server.lines if "admin routes at " in line]
    return line.rpartition(" ")[2]


def routes_of(url: str) -> list[tuple[str, str]]:
    """Returns method and path of every route of a listener."""
    document = httpx.get(url + "/openapi.json", headers=bearer(KEY)).json()
    found = [(m.upper(), path) for path, methods in document["paths"].items() for m in methods]
    return [(method, re.sub(r"{\w+}", "default", path)) for method, path in found]


WRONG = [
    {},
    bearer("x"),
    {"authorization": b"Bearer"},
    bearer(KEY[:-1]),
    bearer(KEY + "x"),
    bearer(" " + KEY),
]
WRONG += [{"x-api-key": KEY.encode()[:-1]}, {"api-key": b"x"}, {"authorization": KEY.encode()[:-1]}]
WRONG += [{"authorization": b"Basic " + KEY.encode()}]


@pytest.mark.parametrize("headers", WRONG, ids=lambda headers: repr(headers)[:60])
def test_all_routes_except_probes_require_api_key(server, split_server, headers):
    for url in (server.url, split_server.url, admin_url(split_server)):
        with httpx.Client(base_url=url, headers=headers, params={"api_key": KEY}) as client:
            routes = [
                *routes_of(url),
                ("GET", "/no_such"),
                *(("GET", path + "/") for path in OPEN_PATHS),
            ]
            assert {("GET", path) for path in OPEN_PATHS} <= set(routes)
            assert len(routes) >= 8
            for method, path in routes:
                answer = client.request(method, path, json={} if method == "POST" else None)
                if path in OPEN_PATHS:
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path)
                error, is_messages = answer.json()["error"], path.startswith("/v1/messages")
                kind = error["type"] if is_messages else error["code"]
                assert kind == ("authentication_error" if is_messages else "invalid_api_key")
                assert KEY not in answer.text


def test_listeners_serve_only_their_routes(server, split_server):
    one, clients, admin = (
        set(routes_of(url)) for url in (server.url, split_server.url, admin_url(split_server))
    )
    both = {("GET", path) for path in (*OPEN_PATHS, "/openapi.json")}
    assert clients & admin == both
    assert clients | admin == one
    corpora = {("GET", CORPORA), ("POST", "/add_external_corpus")}
    assert {("GET", "/metrics"), *corpora} <= admin
    assert ("POST", COMPLETIONS) in clients
    for url, path in ((split_server.url, "/metrics"), (admin_url(split_server), "/v1/models")):
        assert httpx.get(url + path, headers=bearer(KEY)).status_code == 404
    page = httpx.get(admin_url(split_server) + "/metrics", headers=bearer(KEY)).text
    assert "tandem:num_requests_running" in page


def test_admin_listener_unknown_host_returns_403(split_server):
    headers = {**bearer(KEY), "host": "evil.example"}
    assert httpx.get(admin_url(split_server) + "/metrics", headers=headers).status_code == 403


def test_listening_sockets_equal_announced_addresses(server, split_server):
    for running in (server, split_server):
        (line,) = [line for line in running.lines if " is served at " in line]
        announced = {urlsplit(url).netloc for url in re.findall(r"http://[^\s,]+", line)}
        engine = psutil.Process(running.process.pid)
        sockets = [
            each
            for process in (engine, *engine.children(recursive=True))
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
        ]
        found = {f"{each.laddr.ip}:{each.laddr.port}" for each in sockets}
        assert found == announced
        assert len(announced) == (2 if running is split_server else 1)


def test_valid_api_key_returns_200(server):
    for path in GET_ROUTES[:-2]:
        assert httpx.get(server.url + path, headers=bearer(KEY)).status_code == 200
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    body = json.dumps({"messages": USER, "max_tokens": 1})
    headers = {**bearer(KEY), "content-type": "application/json"}
    assert httpx.post(server.url + CHAT, content=body, headers=headers).status_code == 200


SCHEMES = ("Bearer", "bearer", "BEARER", "bEARER")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_authorization_scheme_is_case_insensitive(server, scheme):
    """RFC 9110, 11.1."""
    for key, path in ((KEY, "/v1/models"), (ADMIN_KEY, CORPORA)):
        headers = {"authorization": f"{scheme} {key}".encode()}
        assert httpx.get(server.url + path, headers=headers).status_code == 200
    sent = base64.b64encode(f"me:{KEY}".encode())
    for basic in (b"Basic ", b"basic ", b"BASIC "):
        headers = {"authorization": basic + sent}
        assert httpx.get(server.url + "/", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["x-api-key", "X-API-Key", "api-key"])
def test_api_key_headers_of_other_apis_are_accepted(server, name):
    """Also next to a placeholder bearer token, which some clients always send."""
    for more in ({}, bearer("EMPTY")):
        for key, path in ((KEY, "/v1/models"), (ADMIN_KEY, CORPORA)):
            headers = {**more, name: key.encode()}
            assert httpx.get(server.url + path, headers=headers).status_code == 200
        assert httpx.get(server.url + CORPORA, headers={**more, name: b"x"}).status_code == 401


def test_admin_key_grants_all_routes_api_key_not(server):
    """The API key does not grant admin routes."""
    assert httpx.get(server.url + CORPORA, headers=bearer(ADMIN_KEY)).status_code == 200
    assert httpx.get(server.url + "/v1/models", headers=bearer(ADMIN_KEY)).status_code == 200
    assert httpx.get(server.url + CORPORA, headers=bearer(KEY)).status_code == 401


def test_browser_receives_basic_challenge_with_key_as_password(server):
    """The user name is arbitrary; other clients receive a bearer challenge."""
    opened = httpx.get(server.url + "/", headers={"accept": "text/html,*/*"})
    assert opened.status_code == 401
    assert opened.headers["www-authenticate"].startswith("Basic ")
    assert httpx.get(server.url + "/").headers["www-authenticate"] == "Bearer"
    for path in ("/", "/playground/main.js", "/v1/models"):
        for name in ("", "me"):
            assert httpx.get(server.url + path, auth=(name, KEY)).status_code == 200
        for wrong in ("", KEY[:-1], KEY + "x", f"a:{KEY}"):
            assert httpx.get(server.url + path, auth=("me", wrong)).status_code == 401
    for broken in ("Basic", "Basic é", f"Basic {KEY}", "Basic YWI="):
        headers = {"authorization": broken.encode()}
        assert httpx.get(server.url + "/", headers=headers).status_code == 401


def test_basic_password_does_not_grant_admin_routes(server):
    """Browsers send a stored password by themselves, also for links from other sites."""
    assert httpx.get(server.url + CORPORA, auth=("me", ADMIN_KEY)).status_code == 401


def test_server_without_api_key_accepts_any_key(open_server):
    for headers in ({}, bearer("x")):
        for path in ("/v1/models", *OPEN_PATHS):
            assert httpx.get(open_server.url + path, headers=headers).status_code == 200


def test_api_keys_use_constant_time_comparison(monkeypatch):
    asked = []
    monkeypatch.setattr(gates.hmac, "compare_digest", lambda *pair: asked.append(pair) or True)
    scope = {"type": "http", "path": "/", "headers": [(b"authorization", b"Bearer k")]}
    passed = []

    async def app(*given):
        passed.append(given)

    with pytest.raises(StopIteration):
        gates.ApiKeyMiddleware(app, ["a", "b"])(scope, None, None).send(None)
    assert asked == [(b"k", b"a"), (b"k", b"b")]
    assert len(passed) == 1
    assert gates.hmac is hmac


def raw(server: Server, head: bytes, pieces: int) -> bytes:
    """Returns the server's response to bytes that are sent in chunks."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        size = -(-len(head) // pieces)
        got = b""
        try:
            for begin in range(0, len(head), size):
                connection.sendall(head[begin : begin + size])
            while part := connection.recv(1 << 16):
                got += part
        except ConnectionError:
            pass
    return got


LONG = b"x" * (MAX_HEAD_BYTES + 1)
FIRST = f"GET /health HTTP/1.1\r\nhost: {HOST_NAME}\r\n".encode()


@pytest.mark.parametrize(
    "head",
    [
        FIRST + b"more: " + LONG + b"\r\n\r\n",
        FIRST + b"".join(b"x%d: %s\r\n" % (i, b"y" * 100) for i in range(200)) + b"\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        FIRST + b"more: " + 4 * LONG,  # the rest is never sent
    ],
    ids=["long field", "many fields", "long path", "endless field"],
)
@pytest.mark.parametrize("pieces", [1, 9])
def test_request_head_above_limit_returns_431(open_server, head, pieces):
    answer = raw(open_server, head, pieces)
    assert answer.startswith(b"HTTP/1.1 431 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert str(MAX_HEAD_BYTES) in error["message"]
    assert httpx.get(open_server.url + "/health").status_code == 200


def test_malformed_http_returns_400_json_error(open_server):
    answer = raw(open_server, b"hello\r\n\r\n", 1)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_request_head_of_usual_size_returns_200(open_server):
    headers = {f"x-{i}": "y" * 100 for i in range(100)}
    assert httpx.get(open_server.url + "/health", headers=headers).status_code == 200
