"""Schemathesis tests of the server against `/openapi.json`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_fixtures import ADMIN_KEY, Server, save_tokenizer, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ thinking and '' }}"
)
# A valid body may still request an unsupported combination.
EXCLUDED_CHECK = "positive_data_acceptance"
REFUSED = [400, 401, 403, 404, 405, 413, 415, 431]
CONFIG = f"[checks.negative_data_rejection]\nexpected-statuses = {REFUSED}\n"
RUN_S = 1200
KEY = f"Bearer {ADMIN_KEY}".encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--well-behaved", "--api-key", "key", "--reasoning-parser", "qwen3"]
    flags += ["--tool-call-parser", "hermes", "--store-responses"]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


def document_of(server: Server) -> dict[str, Any]:
    """Returns the document without the default response, so only listed errors are valid."""
    document = httpx.get(server.url + "/openapi.json", headers={"authorization": KEY}).json()
    for methods in document["paths"].values():
        for operation in methods.values():
            del operation["responses"]["default"]
    return document


def check(server: Server, folder: Path, *words: str) -> None:
    """Runs schemathesis over every route with the admin key."""
    (folder / "openapi.json").write_text(json.dumps(document_of(server)))
    (folder / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", server.url]
    command += ["--header", f"Authorization: {KEY.decode('latin-1')}", "--seed", "1"]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED_CHECK, "--continue-on-failure"]
    ran = subprocess.run(
        [*command, *words], cwd=folder, capture_output=True, text=True, timeout=RUN_S
    )
    found = [line[:400] for line in ran.stdout.splitlines() if "curl" not in line]
    assert ran.returncode == 0, "\n".join([*found[-400:], ran.stderr[-2000:]])
    assert "Authentication failed" not in ran.stdout, "not every route was reached"
    assert not any("Traceback" in line for line in server.lines)
    assert server.process.poll() is None


FEW = ("/tokenize", "/detokenize", "/v1/models")
"""Routes of the default test, with few fields: those of generation take a minute."""


@pytest.mark.parametrize("routes", [FEW, pytest.param((), marks=pytest.mark.matrix)], ids=len)
def test_schemathesis_coverage_finds_no_violation(routes, server, tmp_path):
    """No 5xx, no undocumented status, type or body, and no invalid request accepted."""
    named = [word for route in routes for word in ("--include-path", route)]
    check(server, tmp_path, "--phases", "coverage", *named)


@pytest.mark.matrix
def test_schemathesis_fuzzing_finds_no_violation(server, tmp_path):
    check(server, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "400")
