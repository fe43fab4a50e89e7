"""Measuring HTTP client: whole or streamed requests, with the arrival time of each part.

It uses the OpenAI API, so it measures other engines too. The number of accepted drafts per verify
step is only available from this project's server.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np

from bench.common.server import headers_of, no_answer
from bench.serving.prompt_sets import Ask

CONNECT_S = 10.0
_COUNTER = re.compile(
    r"^\w+[:_]spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.MULTILINE
)


class NoServer(Exception):
    """No server responds as expected; one sentence."""


@dataclass
class Reply:
    """Response to one request.

    Attributes:
      begun_s: When it was sent, in seconds of the run's clock.
      times_s: When each event with something new arrived, in seconds after it was sent; a whole
        answer is one such event.
      ended_s: When nothing more came, likewise.
      prompt_tokens, tokens: As the server counts them.
      text: Of the first choice.
      histogram: Entry i is the number of verify steps that accepted i drafts; None if not reported.
      error: What kind of error it is, or None.
      reason: The sentence of the error; "" without one.
    """

    begun_s: float
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    histogram: list[int] | None = None
    error: str | None = None
    reason: str = ""

    def take(self, fields: dict[str, Any], at_s: float) -> None:
        """Adds an answer or an event of a stream."""
        if "error" in fields:
            self.fail("", fields["error"])
            return
        for choice in fields["choices"]:
            self._say(choice, at_s)
        if usage := fields.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.tokens = usage["completion_tokens"]
        if speculative := fields.get("speculative"):
            self.histogram = speculative["accept_length_histogram"]

    def fail(self, status: str, error: Any) -> None:
        """Notes the error object of a body, and the status where it is an answer of its own."""
        fields = error if isinstance(error, dict) else {"message": str(error)}
        kind = fields.get("code") or fields.get("type") or "error"
        self.error, self.reason = f"{status} {kind}".lstrip(), str(fields.get("message", ""))

    def _say(self, choice: dict[str, Any], at_s: float) -> None:
        message = choice.get("delta") or choice.get("message") or choice
        text = message.get("text") or message.get("content") or ""
        if text or message.get("reasoning_content") or message.get("tool_calls"):
            self.times_s.append(at_s)
        if choice["index"] == 0:
            self.text += text


class Client:
    """Client of one server; an asynchronous context manager.

    Args:
      url: Address without a path.
      key: API key, or None.
      timeout_s: Maximum seconds without data.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers_of(key),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy would be measured too
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Returns the name of the first served model.

        Raises:
          NoServer: The server lists no model.
        """
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise NoServer(no_answer(self._url, error)) from error

    async def images(self) -> dict[str, int]:
        """Returns the limits of images that this project's server reports.

        Raises:
          NoServer: It reports none.
        """
        try:
            answer = await self._http.get("/capabilities")
            answer.raise_for_status()
            bounds = answer.json()["images"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise NoServer(no_answer(self._url, error)) from error
        if bounds is None:
            raise NoServer(f"the model at {self._url} does not support images")
        return bounds

    async def accept_counters(self) -> tuple[float, float] | None:
        """Returns verify steps and accepted drafts so far; None if `/metrics` lacks them."""
        try:
            page = (await self._http.get("/metrics")).text
        except httpx.HTTPError:
            return None
        sums = dict.fromkeys(("drafts", "accepted_tokens"), 0.0)
        found = _COUNTER.findall(page)
        for name, value in found:
            sums[name] += float(value)
        return (sums["drafts"], sums["accepted_tokens"]) if found else None

    async def ask(self, ask: Ask, streams: bool, zero_s: float) -> Reply:
        """Sends a request and waits for the end of its response; the reply contains errors.

        Args:
          streams: Whether the answer is to come in parts.
          zero_s: Zero of the run's clock, which is `time.perf_counter`.
        """
        body = dict(ask.body)
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        reply = Reply(sent - zero_s)
        try:
            if streams:
                await self._stream(ask.path, body, reply, sent)
            else:
                await self._whole(ask.path, body, reply, sent)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            reply.error, reply.reason = type(error).__name__, str(error)
        reply.ended_s = time.perf_counter() - sent
        return reply

    async def _whole(self, path: str, body: dict[str, Any], reply: Reply, sent: float) -> None:
        answer = await self._http.post(path, json=body)
        if _failed(answer, reply):
            return
        reply.take(answer.json(), time.perf_counter() - sent)

    async def _stream(self, path: str, body: dict[str, Any], reply: Reply, sent: float) -> None:
        async with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                _failed(answer, reply)
                return
            is_done = False
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    is_done = True
                elif reply.error is None:
                    reply.take(json.loads(data), time.perf_counter() - sent)
        if not is_done and reply.error is None:
            reply.error = "stream without its end"


def _failed(answer: httpx.Response, reply: Reply) -> bool:
    if answer.status_code == httpx.codes.OK:
        return False
    try:
        error = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        error = answer.text[:200]
    reply.fail(str(answer.status_code), error)
    return True


@dataclass(frozen=True)
class Run:
    """Returns all replies, in the order of the requests, and the seconds until the last one."""

    replies: list[Reply]
    seconds: float


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When requests are sent, in seconds after the first: a Poisson process."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[:1]).tolist()


async def run_load(
    client: Client,
    asks: Sequence[Ask],
    *,
    rate: float,
    most: int | None,
    streams: bool,
    seed: int,
    done: Callable[[], None],
) -> Run:
    """Sends requests as independent users would.

    Args:
      rate: Requests a second on average, as a Poisson process; infinity sends all at once.
      most: Requests that are under way at once; one that would be more waits, and its clock does
        not run meanwhile. None: any number.
      seed: Of the times at which they are sent.
      done: Called at the end of each.
    """
    gate = asyncio.Semaphore(most or len(asks))
    zero = time.perf_counter()

    async def one(ask: Ask, arrival_s: float) -> Reply:
        await asyncio.sleep(zero + arrival_s - time.perf_counter())
        async with gate:
            reply = await client.ask(ask, streams, zero)
        done()
        return reply

    replies = await asyncio.gather(*map(one, asks, arrivals(len(asks), rate, seed)))
    return Run(list(replies), time.perf_counter() - zero)
