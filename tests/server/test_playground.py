"""Files and security headers of the playground at `/`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from shared.server.api.playground import FOLDER, PARTS
from tests.support.http_fixtures import Server, serving

LOADED = re.compile(r"""(?:href|src)="([^"]*)"|from "([^"]*)"|url\(([^)]*)\)|@import (\S+)""")
ELSEWHERE = re.compile(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("bare"))
    with serving(["-m", "tests.support.http_fixtures", folder]) as running:
        yield running


def test_playground_serves_page_and_referenced_files(server):
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(loaded(page.text))
    assert named
    for name in PARTS:
        part = httpx.get(f"{server.url}/playground/{name}")
        assert part.headers["content-type"].split(";")[0] == PARTS[name]
        assert part.content == (FOLDER / name).read_bytes()
        named |= {f"/playground/{path.removeprefix('./')}" for path in loaded(part.text)}
    assert named == {f"/playground/{name}" for name in PARTS}, "a file is missing or unused"


def loaded(text: str) -> list[str]:
    return [next(filter(None, found)) for found in LOADED.findall(text)]


def test_playground_csp_forbids_foreign_and_inline_content(server):
    page = httpx.get(server.url + "/")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page.text) == []
    for path in FOLDER.iterdir():
        assert not ELSEWHERE.search(path.read_text(encoding="utf-8")), path.name


@pytest.mark.parametrize("name", ["none.js", "index.html", "..%2fapp.py", "%2e%2e/app.py", ""])
def test_playground_unknown_file_returns_404(server, name):
    answer = httpx.get(f"{server.url}/playground/{name}")
    assert answer.status_code == 404
    assert "import" not in answer.text
