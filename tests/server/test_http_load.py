"""Load test over HTTP per backend: random arrivals, disconnects, preemption."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_fixtures import Server, save_tokenizer, serving
from tests.support.tiny_models import write_tiny

SERVERS = {
    "reference": "tests.support.serve_reference",
    "torch": "torch_impl.serve",
    "jax": "jax_impl.serve",
}
NUM_KINDS = 16  # different requests
NUM_REQUESTS = 60
ARRIVALS_S = 0.9
SHARE_LEAVING = 0.2
# 16 pages of 8 tokens for up to 6 requests of up to 60 tokens: requires preemption.
FEW_PAGES = ["--page-size", "8", "--max-total-tokens", "136", "--max-running-requests", "6"]
# Prompts of one HTTP request arrive together: 6 of 49 tokens exceed the pages on any machine.
TOGETHER, TOGETHER_KIND = 6, 8
CHAIN = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"]
CHAIN += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]

Body = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """Output of a request that scheduling must not change."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("load") / "tiny"
    write_tiny(path, "qwen3_5", 3)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def bodies() -> list[Body]:
    return list(_make_bodies(random.Random(5)))


def _make_bodies(rng: random.Random) -> Iterator[Body]:
    for kind in range(NUM_KINDS):
        prompt = [rng.randrange(2, 256) for _ in range(rng.randint(1, 16))]
        body = {"prompt": prompt, "max_tokens": rng.randint(1, 44), "temperature": 0}
        if kind % 2:
            body |= {"temperature": 0.8, "seed": kind, "top_p": 0.95, "presence_penalty": 0.5}
        if kind % 3 == 0:
            body |= {"stop": list("etaoinshr")}
        yield {**body, "return_token_ids": True, "ignore_eos": kind % 4 == 0}


def _text(choices: list[dict[str, Any]]) -> Text:
    """Returns the output of a whole response, or of all events of a stream."""
    tokens = tuple(token for choice in choices for token in choice["token_ids"])
    return Text("".join(c["text"] for c in choices), tokens, choices[-1]["finish_reason"])


async def _ask(client: httpx.AsyncClient, body: Body) -> tuple[Text, dict[str, Any]]:
    """Returns the output and the last JSON object of a response."""
    if not body.get("stream"):
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return _text(answer.json()["choices"]), answer.json()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    return _text([event["choices"][0] for event in events]), events[-1]


async def _one(client: httpx.AsyncClient, body: Body, seed: int) -> Text | None:
    """Sends a request at a random time; returns None if the client disconnects first."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, ARRIVALS_S))
    patience = rng.uniform(0, 0.3) if rng.random() < SHARE_LEAVING else None
    asked = {**body, "stream": rng.random() < 0.5}
    try:
        text, last = await asyncio.wait_for(_ask(client, asked), patience)
    except TimeoutError:
        return None
    histogram = last["speculative"]["accept_length_histogram"]
    assert sum(histogram) == last["speculative"]["verify_steps"]
    assert last["usage"]["completion_tokens"] == len(text.token_ids)
    return text


async def _together(client: httpx.AsyncClient, body: Body) -> list[Text]:
    """Returns the outputs of one HTTP request with several equal prompts."""
    answer = await client.post(
        "/v1/completions", json={**body, "prompt": [body["prompt"]] * TOGETHER}
    )
    assert answer.status_code == 200, answer.text
    return [_text([choice]) for choice in answer.json()["choices"]]


async def _load(server: Server, bodies: list[Body]) -> tuple[list[Text], list[Text | None]]:
    """Returns the outputs of prompts that arrive together, and of requests at random times."""
    limits = httpx.Limits(max_connections=NUM_REQUESTS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        kinds = [bodies[i % NUM_KINDS] for i in range(NUM_REQUESTS)]
        single = asyncio.gather(*(_one(client, body, i) for i, body in enumerate(kinds)))
        return await asyncio.gather(_together(client, bodies[TOGETHER_KIND]), single)


def _cached(server: Server, user: str | None) -> int:
    """Returns the cached tokens of a prompt."""
    answer = server.complete(prompt=[7, 9] * 35, max_tokens=3, temperature=0, user=user)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(
    scope="module",
    params=[x if x == "torch" else pytest.param(x, marks=pytest.mark.matrix) for x in SERVERS],
)
def command(request, folder) -> list[str]:
    return ["-m", SERVERS[request.param], "--port", "0", "--model-path", str(folder)]


@pytest.fixture(scope="module")
def plain_texts(command, bodies) -> list[Text]:
    """Returns the outputs of requests served alone, without speculation or preemption."""
    with serving([*command, "--max-running-requests", "1", "--overlap-depth", "0"]) as server:
        return [_text(server.complete(**body)["choices"]) for body in bodies]


def test_load_preserves_plain_outputs_and_frees_pages(command, bodies, plain_texts):
    with serving([*command, *FEW_PAGES, *CHAIN, "--overlap-depth", "1"]) as server:
        before = server.metrics()
        together, got = asyncio.run(_load(server, bodies))
        server.wait_for_metric("tandem:num_requests_running", 0)
        server.wait_for_metric("tandem:num_requests_waiting", 0)
        after = server.metrics()
        cached = [_cached(server, user) for user in (None, None, "other")]
    assert together == [plain_texts[TOGETHER_KIND]] * TOGETHER
    for i, text in enumerate(got):
        assert text in (None, plain_texts[i % NUM_KINDS]), bodies[i % NUM_KINDS]
    num_left = got.count(None)
    assert 0 < num_left < NUM_REQUESTS / 2
    assert after["tandem:num_preemptions_total"] > 0
    assert after["tandem:spec_decode_num_accepted_tokens_total"] > 0
    assert cached == [0, 64, 0], "up to the last state snapshot of this user"
    for name in ("tandem:kv_pages_free", "tandem:request_slots_free", "tandem:kv_cache_usage_perc"):
        assert after[name] == before[name], name
    ends = sum(v for n, v in after.items() if n.startswith("tandem:request_success_total"))
    # Every accepted request ended exactly once; a client may disconnect earlier.
    assert NUM_REQUESTS - num_left <= ends - TOGETHER <= NUM_REQUESTS
