"""Agents and libraries of package registries complete loops of ten calls; see `make clients`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.client_sessions import END, NUM_CALLS, SESSIONS, skip_without

pytestmark = pytest.mark.matrix
AGENTS = {"codex": "node_modules/.bin/codex", "claude_code": "node_modules/.bin/claude"}
LIBRARIES = sorted(SESSIONS.keys() - AGENTS)


def results_in(body: Any) -> int:
    """Returns the number of tool results in the body of a request of any API."""
    items = body.get("input") or body["messages"]
    blocks = [block for item in items for block in blocks_of(item)]
    kinds = ("function_call_output", "tool_result", "tool")
    return sum((each.get("type") or each.get("role")) in kinds for each in blocks)


def blocks_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    content = item.get("content")
    is_list = item.get("role") == "user" and isinstance(content, list)
    return [item, *content] if is_list else [item]


@pytest.mark.parametrize("name", AGENTS)
def test_agent_completes_ten_calls(tmp_path, name):
    skip_without(AGENTS[name])
    output, requests = SESSIONS[name].run(tmp_path)
    assert output.strip().endswith(END)
    bodies = [request.body for request in requests if request.body]
    assert max(map(results_in, bodies)) == NUM_CALLS
    assert (tmp_path / "project" / "a.txt").read_text().startswith("0\n1\n")


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_completes_ten_calls(tmp_path, name):
    """Each loop computes ten products, complete and streamed."""
    skip_without("venv")
    output, _ = SESSIONS[name].run(tmp_path)
    loops = json.loads(output.splitlines()[-1])
    assert len(loops) >= 2
    for results, text in loops:
        assert (results, text) == ([str(7 * number) for number in range(NUM_CALLS)], END)
