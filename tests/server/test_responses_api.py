"""OpenAI's Responses API: answers, streams and the store, with the openai package."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from shared.server.completions.response_store import ResponseStore
from tests.support.api_conversations import (
    CALL,
    CONVERSATIONS,
    END,
    RESPONSES_TOOL,
    USER,
    serving_apis,
)
from tests.support.http_fixtures import CHAT, SLOW, Server
from tests.support.sdk_types import response_events, response_of

RESPONSES = "/v1/responses"
ASKED: Any = {"model": "default", "temperature": 0}
TOOLS: Any = [RESPONSES_TOOL]
ALL = f"<think>hm</think>I look.{CALL}"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("model"), "--store-responses") as running:
        yield running


@pytest.fixture(scope="module")
def stateless(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("stateless")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def whole(server: Server, **fields: Any) -> Response:
    """Returns a response after strict validation by both sides' types."""
    answer = server.post(RESPONSES, **{**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return response_of(answer.content)


def events(server: Server, **fields: Any) -> list[Any]:
    """Returns the events of a stream after strict validation by both sides' types."""
    body = {**ASKED, **fields, "stream": True}
    answer = httpx.post(server.url + RESPONSES, json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return response_events(answer.text)


def bare(items: list[Any]) -> list[Any]:
    """Returns output items without what differs between two answers."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in items
    ]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_response_equals_chat(server, name):
    chat, _, fields = CONVERSATIONS[name]
    want = server.post(CHAT, **chat, temperature=0, max_tokens=150).json()
    got = whole(server, **fields, max_output_tokens=150)
    assert got.output_text == want["choices"][0]["message"]["content"]
    assert got.usage.input_tokens == want["usage"]["prompt_tokens"]
    assert got.usage.total_tokens == want["usage"]["total_tokens"]


@pytest.mark.parametrize(
    "text", ["It is fine.", "<think>\nhm\n</think>\n\nYes.", CALL, ALL, ""], ids=repr
)
def test_response_stream_equals_whole(server, text):
    fields: Any = {"input": text + END}
    if "<tool_call>" in text:
        fields |= {"tools": TOOLS}
    want, found = whole(server, **fields), events(server, **fields)
    last = found[-1]["response"]
    assert bare(last["output"]) == bare(
        [item.model_dump(exclude_unset=True) for item in want.output]
    )
    assert (found[-1]["type"], last["status"]) == ("response.completed", "completed")
    assert last["usage"]["output_tokens"] == want.usage.output_tokens
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    check_items(found, last["output"])


def check_items(found: list[Any], output: list[Any]) -> None:
    """Checks that the events of each item have its id, and that increments sum to its text."""
    for index, item in enumerate(output):
        own = [event for event in found if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        assert (own[0]["type"], own[-1]["type"]) == (
            *("response.output_item.added", "response.output_item.done"),
        )
        assert own[-1]["item"] == item
        text = item.get("arguments", item.get("input"))
        text = item["content"][0]["text"] if text is None else text
        assert "".join(event.get("delta", "") for event in own) == text


def test_openai_client_runs_tool_round_with_items(client):
    """The output is sent back as the client stores it."""
    asked: Any = {"model": "default", "tools": TOOLS, "temperature": 0}
    first = client.responses.create(input=f"<think>hm</think>I look.{CALL}{END}", **asked)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history: Any = [{"role": "user", "content": "q"}, *first.output, result]
    second = client.responses.create(input=history, **asked)
    assert second.output_text.startswith("q[assistant](hm)I look.{ " + call.call_id)
    assert f"[tool]sunny@{call.call_id}" in second.output_text


def test_openai_client_continues_stored_response(client, server):
    asked: Any = {"model": "default", "tools": TOOLS, "temperature": 0}
    first = client.responses.create(input=CALL + END, **asked)
    result: Any = [
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "dry"}
    ]
    second = client.responses.create(
        input=result, previous_response_id=first.id, max_output_tokens=2, **asked
    )
    assert second.previous_response_id == first.id
    assert "dry" not in first.output_text
    third = client.responses.create(
        input="so?", previous_response_id=second.id, max_output_tokens=2, **asked
    )
    prompts = [each.usage.input_tokens for each in (first, second, third)]
    assert prompts == sorted(set(prompts))
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id=first.id, **asked)
    assert (caught.value.param, caught.value.code) == (
        *("previous_response_id", "previous_response_not_found"),
    )
    unsaved = client.responses.create(input="x" + END, store=False, **asked)
    assert server_get(server, unsaved.id).status_code == 404


def server_get(server: Server, name: str) -> httpx.Response:
    return httpx.get(f"{server.url}{RESPONSES}/{name}", timeout=30)


def test_openai_client_pages_through_input_items(client, server):
    """Items have the types of the client, ids that are distinct, and both orders."""
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}
    result["output"][0]["text"] = "dry"
    given: Any = [
        USER,
        {**USER, "id": "msg_a", "content": [{"type": "input_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_a", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": "I look.", "id": "msg_a"},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        result,
    ]
    asked: Any = {"model": "default", "temperature": 0, "max_output_tokens": 2}
    first = client.responses.create(input=given, **asked)
    second = client.responses.create(input="so?", previous_response_id=first.id, **asked)
    found = list(client.responses.input_items.list(second.id, limit=3, order="asc"))
    assert len({item.id for item in found}) == len(found) == len(given) + len(first.output) + 1
    kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item.type for item in found][: len(kinds)] == kinds
    assert [item.id for item in found[1:3]] == ["msg_a", "rs_a"]
    assert (found[0].content[0].text, found[3].content[0].text) == ("hi", "I look.")
    assert (found[4].namespace, found[5].output[0].text) == ("n", "dry")
    assert found[-1].content[0].text == "so?"
    assert list(client.responses.input_items.list(second.id))[::-1] == found
    path = f"{RESPONSES}/{second.id}/input_items"
    page = httpx.get(server.url + path, params={"limit": 100}).json()
    ResponseItemList.model_validate_json(json.dumps(page), strict=True)
    assert not page["has_more"]
    empty = httpx.get(server.url + path, params={"after": page["last_id"]}).json()
    assert (empty["data"], empty["has_more"]) == ([], False)
    for params in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
        answer = httpx.get(server.url + path, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(params)))


def test_openai_stream_helper_assembles_response(client):
    with client.responses.stream(
        model="default", input=f"<think>hm</think>Well.{CALL}{END}", tools=TOOLS, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_stored_response_is_cancelled_while_running(server):
    found: list[Any] = []

    def read() -> None:
        body = {**ASKED, "input": "a", "stream": True, "max_output_tokens": 380}
        with httpx.stream("POST", server.url + RESPONSES, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line[6:]))

    with server.post_slowly(3, [SLOW, 97]):  # makes every step slow
        thread = threading.Thread(target=read)
        thread.start()
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
        name = found[0]["response"]["id"]
        assert server_get(server, name).json()["status"] == "in_progress"
        cancelled = server.post(f"{RESPONSES}/{name}/cancel").json()
        thread.join(20)
    assert cancelled["status"] == "cancelled"
    assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.failed", "cancelled")
    again = server.post(f"{RESPONSES}/{name}/cancel")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "response_id")


@pytest.mark.parametrize(
    ("method", "end"), [("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")]
)
def test_store_routes_without_flag_name_flag(stateless, method, end):
    path = f"{RESPONSES}/resp_1{end}"
    answer = httpx.request(method, stateless.url + path, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_id")
    assert "--store-responses" in answer.json()["error"]["message"]


def test_previous_response_without_flag_names_field(stateless):
    answer = stateless.post(RESPONSES, input="a", previous_response_id="resp_1")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert "--store-responses" in error["message"]


def test_response_store_is_bounded_in_bytes_and_age():
    store = ResponseStore(max_bytes=1000, max_age_s=60)
    for number in range(20):
        store.put({"id": f"r{number}", "output": []}, ["a" * 100])
        assert store.num_bytes <= 1000
    assert store.get("r0") is None
    found = store.get("r19")
    assert found is not None
    assert found.items == ["a" * 100]
    store.put({"id": "r19", "output": ["b"]}, [])
    assert store.get("r19").items == ["b"]
    store.put({"id": "big", "output": []}, ["a" * 2000])
    assert (store.get("big"), store.num_bytes) == (None, 0)
    short = ResponseStore(max_bytes=1000, max_age_s=0)
    short.put({"id": "a", "output": []}, [])
    assert (short.get("a"), short.num_bytes) == (None, 0)


def test_encrypted_reasoning_returns_to_server(server):
    fields: Any = {"input": f"<think>hm, so</think>Yes{END}"}
    found = whole(server, **fields, include=["reasoning.encrypted_content"])
    item = found.output[0].model_dump(exclude_unset=True)
    assert item["encrypted_content"]
    assert whole(server, **fields).output[0].encrypted_content is None
    del item["content"]
    history: Any = [{"role": "user", "content": "q"}, item, {"role": "assistant", "content": "a"}]
    text = whole(server, input=[*history, USER], max_output_tokens=40).output_text
    assert text.startswith("q[assistant](hm, so)a")
    history[1] = {**item, "encrypted_content": "gAAAA"}
    error = server.post(RESPONSES, **ASKED, input=history).json()["error"]
    assert (error["param"], error["code"]) == (
        *("input[1].encrypted_content", "invalid_encrypted_content"),
    )


def test_logprobs_are_included_with_text(server):
    fields: Any = {
        "input": f"<think>hm</think>abcd{END}",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    part = whole(server, **fields).output[1].content[0]
    assert "".join(score.token for score in part.logprobs) == "abcd" + END
    assert [len(score.top_logprobs) for score in part.logprobs] == [2] * 5
    deltas = [e for e in events(server, **fields) if e["type"] == "response.output_text.delta"]
    streamed = "".join(score["token"] for event in deltas for score in event["logprobs"])
    assert (streamed, "".join(event["delta"] for event in deltas)) == ("abcd" + END, "abcd")


def test_cut_response_is_incomplete(server):
    """Half a call, reasoning only, and complete calls before the limit; all return."""
    for text, limit, kinds in (
        ("<think>" + "a" * 60, 20, ["reasoning"]),
        (CALL * 2, len(CALL) - 20, ["function_call"]),
        (CALL * 2, 2 * len(CALL) - 20, ["function_call", "function_call"]),
    ):
        found = whole(server, input=text + END, tools=TOOLS, max_output_tokens=limit)
        assert (found.status, found.incomplete_details.reason) == (
            *("incomplete", "max_output_tokens"),
        )
        assert [item.type for item in found.output] == kinds
        assert [item.status for item in found.output][-1] == "incomplete"
        outputs = [item.model_dump(exclude_unset=True) for item in found.output]
        assert whole(server, input=[USER, *outputs, USER], max_output_tokens=2).output
    found = whole(server, input="<think>" + "a" * 60, max_output_tokens=20)
    assert found.usage.output_tokens_details.reasoning_tokens == 20


def test_response_repeats_request_fields(server):
    fields: Any = {
        "input": "a" + END,
        "instructions": "b",
        "metadata": {"team": "x"},
        "tools": [{**RESPONSES_TOOL, "strict": False, "description": "d"}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "max_output_tokens": 50,
        "truncation": "disabled",
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "text": {"format": {"type": "text"}},
    }
    found = whole(server, **fields).model_dump(exclude_unset=True)
    for name, value in fields.items():
        if name != "input":
            assert found[name] == value, name


CUSTOM: Any = {"type": "custom", "name": "p"}
INPUT = 'a"\nü😀'


def custom_call(name: str = "p") -> str:
    arguments = {"input": INPUT}
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def test_custom_tool_returns_its_input(client, server):
    """The model calls a function with one string; the client receives the text."""
    fields: Any = {"input": f"I.{custom_call()}{END}", "tools": [CUSTOM]}
    want = whole(server, **fields)
    calls = [item for item in want.output if item.type == "custom_tool_call"]
    assert [(call.name, call.input, call.namespace) for call in calls] == [("p", INPUT, None)]
    found = events(server, **fields)
    last = found[-1]["response"]
    assert bare(last["output"]) == bare(
        [item.model_dump(exclude_unset=True) for item in want.output]
    )
    check_items(found, last["output"])
    kinds = [event["type"] for event in found if event.get("output_index") == 1]
    assert (kinds[1], kinds[-2]) == (
        *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
    )
    assert kinds.count("response.custom_tool_call_input.delta") > 2  # the input is streamed
    assert last["tools"] == [{**CUSTOM, "description": None, "format": None}]
    with client.responses.stream(model="default", temperature=0, **fields) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in want.output]


def test_custom_call_and_output_return_to_server(client, server):
    asked: Any = {"model": "default", "temperature": 0}
    first = client.responses.create(input=custom_call() + END, tools=[CUSTOM], **asked)
    (call,) = first.output
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    given: Any = [{"role": "user", "content": "q"}, call, result]
    second = client.responses.create(input=given, max_output_tokens=150, **asked)
    arguments = json.dumps({"input": INPUT}, ensure_ascii=False)
    want = f"q[assistant]{{ {call.call_id} p{arguments}}}[tool]done@{call.call_id}"
    assert second.output_text.startswith(want)
    third = client.responses.create(
        input="so?", previous_response_id=second.id, max_output_tokens=2, **asked
    )
    listed = list(client.responses.input_items.list(third.id, order="asc"))
    kinds = ["message", "custom_tool_call", "custom_tool_call_output"]
    assert [item.type for item in listed][:3] == kinds
    assert (listed[1].input, listed[2].output) == (INPUT, "done")
    path = f"{RESPONSES}/{third.id}/input_items"
    ResponseItemList.model_validate_json(httpx.get(server.url + path).content, strict=True)


def test_custom_tool_of_namespace_has_both_names(server):
    space = {"type": "namespace", "name": "n", "tools": [CUSTOM]}
    (call,) = whole(server, input=custom_call("n.p") + END, tools=[space]).output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "n", "p")


def test_custom_tool_is_described_by_its_grammar(server):
    given = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    error = server.post(RESPONSES, **ASKED, input="q", tools=[{**CUSTOM, "format": given}]).json()
    assert "--grammar-backend llguidance" in error["error"]["message"]  # this server has none
    fields: Any = {"tools": [{**CUSTOM, "format": given}], "tool_choice": "none"}
    found = whole(server, input="q" + END, **fields).model_dump(exclude_unset=True)
    assert found["tools"][0]["format"] == given
    described = {**CUSTOM, "description": "edits files"}
    text = whole(server, input="q", tools=[described], max_output_tokens=160).output_text
    assert '"name": "p", "description": "edits files"' in text
    assert '"properties": {"input": {"type": "string"}}' in text


def test_cut_custom_call_is_incomplete(server):
    text = custom_call()
    fields: Any = {"input": text + END, "tools": [CUSTOM]}
    found = whole(server, **fields, max_output_tokens=len(text) - 30)
    (call,) = found.output
    assert (call.type, call.model_extra["status"]) == ("custom_tool_call", "incomplete")
    assert INPUT.startswith(call.input)
    assert whole(server, input=[USER, call.model_dump(exclude_unset=True), USER]).output


def test_namespace_functions_are_called_by_both_names(server):
    """The model reads `n.look`; the client receives the namespace and the function."""
    space = {"type": "namespace", "name": "n", "description": "of n", "tools": TOOLS}
    text = CALL.replace('"look"', '"n.look"')
    fields: Any = {"input": text + END, "tools": [space]}
    (call,) = whole(server, **fields).output
    assert (call.namespace, call.name) == ("n", "look")
    (again,) = events(server, **fields)[-1]["response"]["output"]
    assert (again["namespace"], again["name"]) == ("n", "look")
    history = [{"role": "user", "content": "q"}, call.model_dump(), USER]
    found = whole(server, input=history, max_output_tokens=100)
    assert f"{{ {call.call_id} n.look" in found.output_text
    found = whole(server, input="q", tools=[space], max_output_tokens=100)
    assert '"name": "n.look", "description": "of n"' in found.output_text
    (plain,) = whole(server, input=CALL + END, tools=TOOLS).output
    assert (plain.namespace, plain.name) == (None, "look")
