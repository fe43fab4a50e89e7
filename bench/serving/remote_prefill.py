"""Time to first token and inter-token latency with remote prefill, next to one server alone.

    python -m bench.serving.remote_prefill --backend torch --flags "--model-path MODEL" \\
        --prompt-tokens 8192 --out FILE

`alone` is one server; `separate` is a decode server with a prefill server. Two measurements:

- TTFT of one prompt after the other, with the bytes of the records and the seconds of their
  transfers by the metrics of the decode server. The prefill time that a decode server saves is the
  TTFT of `alone`, less that of a prompt that is cached already.
- Inter-token latency of running requests while other prompts arrive, all at once.

With --gpus, `alone` and the decode server use the first GPU, and the prefill server the second one.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from bench.common.environment import versions, write_results
from bench.serving.prefill_load import Load, add_options
from shared.options.disaggregation import TRANSFER_BACKENDS
from tests.support.http_fixtures import Server, serving

MODULES = {"torch": "torch_impl.serve", "jax": "jax_impl.serve"}
MODULES["reference"] = "tests.support.serve_reference"
RECEIVED = 'direction="received"'
LIMIT_S = 600.0


def prompt_of(seed: int, count: int) -> list[int]:
    """Returns random token ids, which no other prompt begins with."""
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(count)]


async def stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> list[float]:
    """Returns the times of sending and of each event with tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "return_token_ids": True}
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


async def first_token_times(url: str, load: Load, seed: int) -> dict[str, float]:
    """Returns median TTFT in ms of new prompts, and of the same prompts again."""
    found: dict[str, list[float]] = {"new": [], "cached": []}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        for number in range(load.rounds + 1):
            prompt = prompt_of(seed + number, load.prompt_tokens)
            for times in found.values():
                sent = await stream(client, prompt, 1)
                if number:  # the first round warms up
                    times.append(1000 * (sent[1] - sent[0]))
    return {name: round(statistics.median(times), 3) for name, times in found.items()}


async def gaps_meanwhile(url: str, load: Load, seed: int) -> dict[str, float]:
    """Returns inter-token latency in ms while long prompts arrive, and their TTFT."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        running = [
            asyncio.create_task(stream(client, prompt_of(seed + 10**6 + i, 16), load.max_tokens))
            for i in range(load.num_running)
        ]
        await asyncio.sleep(1.0)
        arrived = time.perf_counter()
        prompts = [prompt_of(seed + i, load.prompt_tokens) for i in range(load.num_prompts)]
        long = await asyncio.gather(*(stream(client, each, 1) for each in prompts))
        ended = time.perf_counter()
        texts = [await task for task in running]
    gaps = sorted(
        1000 * (later - earlier)
        for times in texts
        for earlier, later in pairwise(times[1:])
        if later > arrived and earlier < ended
    )
    if not gaps:
        raise ValueError(
            "the running requests ended before the prompts; give a larger --max-tokens"
        )
    first = [1000 * (times[1] - times[0]) for times in long]
    return {
        "itl_p50_ms": round(statistics.median(gaps), 3),
        "itl_p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 3),
        "gaps": len(gaps),
        "ttft_p50_ms": round(statistics.median(first), 3),
    }


def transferred(server: Server) -> dict[str, float]:
    """Returns records, bytes, seconds and tokens that a server has received."""
    found = {name.removeprefix("tandem:kv_transfer_"): v for name, v in server.metrics().items()}
    sums = {
        name: sum(v for key, v in found.items() if key.startswith(f"{name}_") and RECEIVED in key)
        for name in ("records", "bytes", "seconds")
    }
    return sums | {"tokens": found.get("imported_tokens_total", 0.0)}


def _check_count(received: dict[str, float], count: int) -> None:
    """Checks that every long prompt was transferred: otherwise local prefill is measured."""
    if received["records"] < count:
        raise ValueError(f"{received['records']:g} of {count} records were transferred")


@contextmanager
def on_gpu(number: int | None) -> Iterator[None]:
    """Starts servers on one GPU; None leaves the choice to the environment."""
    chosen = {} if number is None else {"CUDA_VISIBLE_DEVICES": str(number)}
    with patch.dict(os.environ, chosen):
        yield


def started(options: argparse.Namespace, ends: ExitStack, mode: str, gpu: int) -> Server:
    """Starts a server."""
    command = ["-m", MODULES[options.backend], "--port", "0", *shlex.split(options.flags)]
    with on_gpu(gpu if options.gpus else None):
        return ends.enter_context(serving([*command, *shlex.split(mode)], threads=None))


def compared(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Returns the measurements of both sides, one after the other."""
    sides: dict[str, Any] = {}
    with ExitStack() as ends:
        alone = started(options, ends, "", 0)
        sides["alone"] = {
            "ttft_ms": asyncio.run(first_token_times(alone.url, load, 0)),
            "interference": asyncio.run(gaps_meanwhile(alone.url, load, 10**7)),
        }
    with ExitStack() as ends:
        backend = f"--disaggregation-transfer-backend {options.transfer_backend}"
        prefill = started(options, ends, f"--disaggregation-mode prefill {backend}", 1)
        mode = f"--disaggregation-mode decode --prefill-servers {prefill.url} {backend}"
        least = min(load.prompt_tokens // 2, 512)
        fetched = f"--remote-prefill-min-tokens {least} --remote-prefill-timeout {LIMIT_S:.0f}"
        decode = started(options, ends, f"{mode} {fetched}", 0)
        times = asyncio.run(first_token_times(decode.url, load, 0))
        received = transferred(decode)
        count = load.rounds + 1
        _check_count(received, count)
        interference = asyncio.run(gaps_meanwhile(decode.url, load, 10**7))
        _check_count(transferred(decode), count + load.num_prompts)
        sides["separate"] = {
            "ttft_ms": times,
            "prompt_parts": round(received["records"] / count, 3),
            "prompt_bytes": round(received["bytes"] / count),
            "prompt_tokens": round(received["tokens"] / count),
            "transfer_ms": round(1000 * received["seconds"] / count, 3),
            "gb_per_s": round(received["bytes"] / received["seconds"] / 1e9, 3),
            "interference": interference,
            "received": transferred(decode),
        }
    times = sides["alone"]["ttft_ms"]
    saved = round(times["new"] - times["cached"], 3)
    return {**sides, "prefill_saved_ms": saved}


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes what was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.serving.remote_prefill")
    add = parser.add_argument
    add("--backend", choices=tuple(MODULES), default="torch")
    add("--flags", default="", help="flags of all servers, as one quoted word")
    add("--transfer-backend", choices=TRANSFER_BACKENDS, default="auto")
    add("--gpus", action="store_true", help="one GPU for each of two servers")
    add_options(parser, max_tokens=1024, rounds=5)
    add("--out", type=Path, help="JSON file")
    options = parser.parse_args(words)
    load = Load.of(options)
    found = compared(options, load)
    print(json.dumps(found, indent=1))
    if options.out:
        command = shlex.join(["python", "-m", "bench.serving.remote_prefill", *words])
        named = versions("jax" if options.backend == "jax" else "torch", "")
        head = {"command": command, "versions": named, "cores": os.cpu_count()}
        write_results(options.out, head | {"load": os.getloadavg()} | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
