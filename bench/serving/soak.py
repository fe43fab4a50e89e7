"""Mixed traffic on a server over minutes, to check that its resources do not grow.

`python -m bench.serving.soak --minutes 10 --out FILE` serves the shipped model with torch, NEXTN
and few pages. It sends chats, streams, completions, tools, tokens, invalid requests and requests
that are cancelled, until the time is up. Memory, threads, open files and acceptance of the last
quarter are compared with those of the second; caches fill in the first. The exit code is 1 if a
limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.common.waiting import progress
from models.demo.problems import problems

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo" / "target"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FLAGS = ["--speculative-algorithm", "NEXTN", "--tool-call-parser", "hermes", "--port", "0"]
FLAGS += ["--max-total-tokens", "4096", "--max-running-requests", "4", "--log-level", "warning"]
NUM_PROMPTS = 40
AT_ONCE = 6  # clients
SAMPLE_S = 2.0
REPORT_S = 30.0  # between two lines of progress
FAILED = 2
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

MOST_GROWTH = {"rss_bytes": 0.03, "threads": 0.0, "files": 0.0, "acceptance": 0.03}
"""Largest growth from the second to the last quarter, as a share; also the largest loss of
acceptance.
"""

LEAST_NOTICED = {"rss_bytes": 8 << 20, "threads": 6.0, "files": 3.0, "acceptance": 0.0}
"""Growth up to these values is ignored: allocator pages, one connection, and threads that the event
loop and a second renderer start when they first need them."""


@dataclass(frozen=True)
class Sample:
    """Resources of a server's processes at one time, and acceptance since the previous sample."""

    at_s: float
    rss_bytes: int
    threads: int
    files: int
    acceptance: float


class Growth(Exception):
    """Something grew; the message has its name and the growth."""


def judge(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Medians of the second and the last quarter of a run, by what was measured.

    Raises:
      Growth: They differ by more than the bounds allow.
    """
    size = len(samples) // 4
    early, late = samples[size : 2 * size], samples[-size:]
    found = {}
    for name, share in MOST_GROWTH.items():
        before, after = (
            statistics.median(getattr(s, name) for s in part) for part in (early, late)
        )
        found[name] = {"second_quarter": before, "last_quarter": after}
        growth = abs(after - before) if name == "acceptance" else after - before
        if growth > max(share * before, LEAST_NOTICED[name]):
            raise Growth(f"{name} went from {before:,.4g} to {after:,.4g}")
    return found


class Watch:
    """Takes samples of a server."""

    def __init__(self, pid: int) -> None:
        self._engine = psutil.Process(pid)
        self._began, self._counts = time.monotonic(), (0.0, 0.0)

    async def sample(self, client: httpx.AsyncClient) -> Sample:
        processes = [self._engine, *self._engine.children(recursive=True)]
        found = metrics((await client.get("/metrics")).text)
        names = ("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
        accepted, drafts = (found[name] for name in names)
        before, self._counts = self._counts, (accepted, drafts)
        return Sample(
            at_s=time.monotonic() - self._began,
            rss_bytes=sum(p.memory_info().rss for p in processes),
            threads=sum(p.num_threads() for p in processes),
            files=sum(p.num_fds() for p in processes),
            acceptance=(accepted - before[0]) / max(1.0, drafts - before[1]),
        )


def metrics(page: str) -> dict[str, float]:
    """Values of /metrics by bare name; those with further labels are summed."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("tandem:")] += float(value)
    return found


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
        await _expect(client, before)
    return samples, sum((each.counts for each in clients), Counter())


async def _expect(client: httpx.AsyncClient, before: dict[str, float]) -> None:
    """Slots and pages are back; what is cached counts as free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_pages_free", "request_slots_free")
    for wait in itertools.count():
        found = metrics((await client.get("/metrics")).text)
        if all(found[name] == before[name] for name in names):
            return
        if wait == 50:
            raise Growth(
                f"{[(name, found[name], before[name]) for name in names]} did not come back"
            )
        await asyncio.sleep(0.1)


@contextmanager
def own_server(flags: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Address and process of a server of the model that ships, with a template that reads tools."""
    with tempfile.TemporaryDirectory() as folder:
        for file in MODEL.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
        command = [sys.executable, "-m", "torch_impl.serve", "--model-path", folder, *flags]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            lines = deque[str](maxlen=1)
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r" is served at (http://[\w.:]+)", line):
                    yield found[1], process.pid
                    break
            else:
                raise RuntimeError(f"the server did not start: {''.join(lines).strip()}")
        finally:
            process.terminate()
            process.wait(60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was measured; 0 where nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="JSON file for the samples")
    args = parser.parse_args(arguments)
    try:
        with own_server(FLAGS) as (url, pid):
            samples, counts = asyncio.run(soak(url, pid, 60 * args.minutes))
    except (RuntimeError, httpx.HTTPError, AssertionError) as error:
        print(f"The soak failed: {error or type(error).__name__}", file=sys.stderr)
        return FAILED
    report: dict[str, Any] = {"minutes": args.minutes, "asked": dict(counts)}
    try:
        report["measured"] = judge(samples)
    except Growth as growth:
        report["growth"] = str(growth)
    print(json.dumps(report, indent=1))
    if args.out:
        rows = [asdict(sample) for sample in samples]
        args.out.write_text(json.dumps({**report, "samples": rows}, indent=1))
    return int("growth" in report)


if __name__ == "__main__":
    raise SystemExit(main())
