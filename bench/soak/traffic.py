"""Mixed traffic on a server: chats, streams, completions, tools and invalid requests."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import httpx

from bench.common.waiting import progress
from bench.soak.resources import SAMPLE_S, Growth, Sample, Watch, expect_released, metrics
from models.demo.problems import problems

NUM_PROMPTS = 40
AT_ONCE = 6  # clients
REPORT_S = 30.0  # between two lines of progress
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Traffic:
    """Clients that send requests of all kinds, one after another."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client, self._rng = client, random.Random(seed)
        self._prompts = [
            each.messages[-1]["content"] for each in islice(problems("held_out", 0), NUM_PROMPTS)
        ]
        self.counts: Counter[str] = Counter()

    async def ask_until(self, end: float) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.chat, 4),
            (self.stream, 4),
            (self.completions, 2),
            (self.tools, 1),
            (self.leave, 3),
            (self.refused, 2),
            (self.small, 2),
        ]
        calls, weights = zip(*kinds, strict=True)
        while time.monotonic() < end:
            (call,) = self._rng.choices(calls, weights)
            await call()
            self.counts[call.__name__] += 1

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = self._rng.choice(self._prompts)
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "temperature": 0, "max_tokens": 96, **more}

    async def _post(self, path: str, status: int, body: dict[str, Any]) -> Any:
        answer = await self._client.post(path, json=body)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()

    async def chat(self) -> None:
        body = self._body(n=self._rng.choice((1, 1, 2)))
        found = await self._post("/v1/chat/completions", 200, body)
        assert found["usage"]["completion_tokens"] > 0

    async def tools(self) -> None:
        await self._post("/v1/chat/completions", 200, self._body(tools=[TOOL]))

    async def completions(self) -> None:
        fields = {"prompt": self._rng.choice(self._prompts), "max_tokens": 48, "logprobs": 2}
        await self._post("/v1/completions", 200, fields)

    async def stream(self) -> None:
        assert await self._read(most=1 << 20), "a stream did not end"

    async def leave(self) -> None:
        await self._read(most=self._rng.randrange(12))

    async def _read(self, most: int) -> bool:
        """Reads a stream; whether it ended within the given number of events."""
        body = self._body(stream=True)
        path = "/v1/chat/completions"
        async with self._client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return True
                lines += bool(line)
                if lines > most:
                    return False
        return False

    async def refused(self) -> None:
        wrong = self._rng.choice(({"temperature": 9}, {"seed": 10**30}, {"logit_bias": {"x": 1}}))
        await self._post("/v1/chat/completions", 400, self._body(**wrong))
        await self._post("/v1/completions", 404, {"model": "gpt", "prompt": "a"})

    async def small(self) -> None:
        found = await self._post("/tokenize", 200, {"prompt": self._rng.choice(self._prompts)})
        await self._post("/detokenize", 200, {"tokens": found["tokens"]})
        for path in ("/health", "/v1/models", "/openapi.json"):
            assert (await self._client.get(path)).status_code == 200


async def soak(url: str, pid: int, seconds: float) -> tuple[list[Sample], Counter[str]]:
    """Returns samples of a run, and the number of requests of each kind; all tasks have ended."""
    limits = httpx.Limits(max_connections=3 * AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        watch, samples = Watch(pid), []
        before = metrics((await client.get("/metrics")).text)
        end = time.monotonic() + seconds
        clients = [Traffic(client, seed) for seed in range(AT_ONCE)]
        asking = [asyncio.create_task(each.ask_until(end)) for each in clients]
        with progress("samples", math.ceil(seconds / SAMPLE_S), every_s=REPORT_S) as done:
            while time.monotonic() < end:
                await asyncio.sleep(SAMPLE_S)
                samples.append(await watch.sample(client))
                done()
                for task in asking:
                    if task.done() and task.exception():
                        raise task.exception() or Growth("a client ended")
        await asyncio.gather(*asking)
        await expect_released(client, before)
    return samples, sum((each.counts for each in clients), Counter())
