"""Agents, libraries and Node SDKs of package registries; see `make clients`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client_sessions import (
    END,
    NODE_ENV,
    NUM_CALLS,
    SESSIONS,
    node_command,
    skip_without,
)
from tests.support.http_fixtures import CHAT, Server, serving
from tests.support.images import rgb, stored, url_of
from tests.support.vlm import pixels

pytestmark = pytest.mark.matrix
AGENTS = {
    "codex": ("codex", "0\n1\n"),
    "codex_patching": ("codex", "8\n"),
    "claude_code": ("claude", "0\n1\n"),
}
"""Program of each session, and the start of the file that it writes."""

LIBRARIES = sorted(SESSIONS.keys() - AGENTS)


def results_in(body: Any) -> int:
    """Returns the number of tool results in the body of a request of any API."""
    items = body.get("input") or body["messages"]
    blocks = [block for item in items for block in blocks_of(item)]
    kinds = ("function_call_output", "custom_tool_call_output", "tool_result", "tool")
    return sum((each.get("type") or each.get("role")) in kinds for each in blocks)


def blocks_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    content = item.get("content")
    is_list = item.get("role") == "user" and isinstance(content, list)
    return [item, *content] if is_list else [item]


@pytest.mark.parametrize("name", AGENTS)
def test_agent_completes_ten_calls(tmp_path, name):
    program, written = AGENTS[name]
    skip_without(f"node_modules/.bin/{program}")
    output, requests = SESSIONS[name].run(tmp_path)
    assert output.strip().endswith(END)
    bodies = [request.body for request in requests if request.body]
    assert max(map(results_in, bodies)) == NUM_CALLS
    assert (tmp_path / "project" / "a.txt").read_text().startswith(written)


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_completes_ten_calls(tmp_path, name):
    """Each loop computes ten products, complete and streamed."""
    skip_without("node_modules" if name.endswith("_node") else "venv")
    output, _ = SESSIONS[name].run(tmp_path)
    loops = json.loads(output.splitlines()[-1])
    assert len(loops) >= 2
    for results, text in loops:
        assert (results, text) == ([str(7 * number) for number in range(NUM_CALLS)], END)


SHORT: Any = {"temperature": 0, "max_tokens": 16}
LIMITS = ["--context-length", "512", "--max-running-requests", "2", "--tool-call-parser", "hermes"]


@pytest.fixture(scope="module", params=["torch_impl.serve", "tests.support.serve_fast_compile"])
def vlm_server(request) -> Iterator[Server]:
    command = ["-m", request.param, "--model-path", "models/demo/vlm", "--port", "0", *LIMITS]
    with serving(command) as running:
        yield running


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_node_sdk_answers_equal_chat(vlm_server, package):
    """Complete and streamed answers with an image, a schema, a strict tool, and errors."""
    skip_without("node_modules")
    url, question = url_of(stored(rgb(pixels(8, 8, 1)))), "Is the circle small or large?"
    command = node_command(f"{package}_answers", vlm_server.url, question, url)
    env = os.environ | NODE_ENV
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    content = [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    answer = vlm_server.post(CHAT, messages=[{"role": "user", "content": content}], **SHORT).json()
    want = answer["choices"][0]["message"]["content"]
    assert found["whole"] == found["streamed"] == want
    assert found["tokens"] == answer["usage"]["prompt_tokens"]
    for each in (found["parsed"], found["call"]):
        assert each["size"] in ("small", "large")
    statuses = [(each["status"], each["field"]) for each in found["errors"]]
    last = "background" if package == "openai" else "mcp_servers"
    assert statuses == [(404, "model"), (400, "temperature"), (400, last)]
    kinds = {each["name"] for each in found["errors"]}
    assert kinds == (
        {"NotFoundError", "BadRequestError"}
        if package == "openai"
        else {"not_found_error", "invalid_request_error"}
    )
