"""Forwarding: streams, disconnects, retries, errors, stuck and draining replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from shared.options.router import ROUND_ROBIN
from tests.support.routing import (
    COMPLETIONS,
    Routed,
    is_down,
    run,
    until,
)


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    """Yields the data of the events of a stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def test_stream_is_forwarded_as_it_arrives(tmp_path):
    """The server sends the second event after the client has received the first one."""
    gate = tmp_path / "gate"

    async def scenario(found: Routed) -> None:
        fields = {"stream": True, "max_tokens": 5, "pace_s": 0.01, "gate": str(gate)}
        async with found.client.stream("POST", COMPLETIONS, json=fields) as response:
            events = events_of(response)
            first = await anext(events)
            gate.touch()
            *rest, end = [each async for each in events]
        assert end == "[DONE]"
        assert [json.loads(x)["choices"][0]["text"] for x in (first, *rest)] == [
            f"{number} " for number in range(5)
        ]

    run(scenario, 1)


def test_response_keeps_status_and_body():
    async def scenario(found: Routed) -> None:
        response = await found.post(prompt="a", status=418)
        assert (response.status_code, response.json()["echo"]["prompt"]) == (418, "a")
        assert response.headers["content-type"] == "application/json"
        assert len(response.headers.get_list("date")) == 1

    run(scenario, 1)


def test_client_disconnect_closes_upstream():
    async def scenario(found: Routed) -> None:
        fields = {"stream": True, "max_tokens": 10_000, "pace_s": 0.01}
        async with found.client.stream("POST", COMPLETIONS, json=fields) as response:
            await anext(response.aiter_bytes())
        await until(lambda: found.servers[0].num_left == 1)
        await until(lambda: next(iter(found.replicas)).num_open == 0)
        assert found.forwarder.counters.disconnects == 1
        assert found.forwarder.counters.failures == {}

    run(scenario, 1)


def test_disconnect_before_first_byte_closes_upstream():
    async def scenario(found: Routed) -> None:
        left = asyncio.create_task(found.post(pace_s=3600))
        await until(lambda: sum(found.served()) == 1)
        left.cancel()
        await until(lambda: next(iter(found.replicas)).num_open == 0)
        assert found.forwarder.counters.disconnects == 1
        assert found.forwarder.counters.retries == 0

    run(scenario, 2)


def test_slow_client_bounds_memory():
    async def scenario(found: Routed) -> None:
        reader, writer = await asyncio.open_connection(
            *found.url.removeprefix("http://").split(":")
        )
        body = json.dumps({"stream": True, "max_tokens": 2000, "pad": 50_000}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read(100)
        await asyncio.sleep(0.5)
        assert found.servers[0].num_open == 1  # 100 MB are not read ahead
        writer.transport.abort()
        await until(lambda: found.servers[0].num_open == 0)

    run(scenario, 1)


def test_request_is_retried_before_first_byte():
    async def scenario(found: Routed) -> None:
        found.servers[0].drains = True
        codes = [(await found.post(prompt="a")).status_code for _ in range(4)]
        assert codes == [200] * 4
        assert found.served()[1] == 4
        assert found.forwarder.counters.retries <= found.served()[0] <= 2

    run(scenario, 2, policy=ROUND_ROBIN)


def test_lost_connection_is_retried_once():
    async def scenario(found: Routed) -> None:
        response = await found.post(prompt="a", stream=True, cut_at=0)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_lost")
        assert sorted(found.served()) == [0, 1, 1]
        assert found.forwarder.counters.retries == 1

    run(scenario, 3)


def test_lost_replica_ends_stream_with_error_event():
    async def scenario(found: Routed) -> None:
        fields = {"stream": True, "max_tokens": 9, "cut_at": 3, "pace_s": 0.01}
        async with found.client.stream("POST", COMPLETIONS, json=fields) as response:
            events = [each async for each in events_of(response)]
        assert (response.status_code, events[-1]) == (200, "[DONE]")
        assert len(events) == 5
        error = json.loads(events[-2])["error"]
        assert (error["code"], error["type"]) == ("replica_lost", "server_error")
        assert found.forwarder.counters.failures == {"replica_lost": 1}
        assert sum(found.served()) == 1

    run(scenario, 2)


def test_closed_ports_give_named_error():
    async def scenario(found: Routed) -> None:
        urls = ["http://127.0.0.1:9", "http://127.0.0.1:11"]
        found.replicas.set_urls(urls)
        response = await found.post(prompt="a")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        assert response.headers["retry-after"] == "1"

    run(scenario, 1)


def test_stuck_replica_is_detected_and_request_retried():
    async def scenario(found: Routed) -> None:
        stuck = asyncio.create_task(found.post(prompt="a", pace_s=3600))
        await until(lambda: sum(found.served()) == 1)
        place = found.served().index(1)
        found.servers[place].health = 0
        found.servers[place].bodies[0]["pace_s"] = 0
        await until(lambda: is_down(found, place))
        await until(lambda: sum(found.served()) == 2)  # the other replica received it
        assert found.forwarder.counters.retries == 1
        stuck.cancel()
        found.servers[place].health = 200
        await until(lambda: len(found.replicas.ready) == 2)

    run(scenario, 2, timeout_s=0.3)


def test_requests_share_connections():
    async def scenario(found: Routed) -> None:
        for _ in range(5):
            assert (await found.post(prompt="a")).status_code == 200
        await asyncio.gather(*(found.post(prompt="a", pace_s=0.1) for _ in range(8)))
        assert all(each.num_open == 0 for each in found.replicas)

    run(scenario, 2)
