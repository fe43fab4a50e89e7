"""Prefix hit rate of routing policies with running servers, on the workload of `router_hit_rate`.

    python -m bench.serving.live_hit_rate --out bench/results/router_hit_rate_live_cpu.json

By default the servers have a random model of one small layer and the demo model's tokenizer: hits
depend on neither weights nor sizes, and 800 requests take seconds. `--flags` starts servers of the
torch backend with another model, side by side. Users wait for a random time between two requests,
and replies are the reference answers. The router runs in this process, with one policy after the
other; each has its own cache namespace (field `user`), so servers start once. `single` sends all
requests to one of the servers. Hits are those of `usage`.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.common.environment import versions, write_results
from bench.serving.router_hit_rate import DEMO, UNBOUNDED, Chat, workload
from shared.options.router import CACHE_AWARE, LEAST_LOAD, ROUND_ROBIN
from shared.process.address import bind
from shared.router.aggregation import AggregateRoutes
from shared.router.app import router_apps
from shared.router.forwarding import Forwarder
from shared.router.policy import LOAD_BOUND, RoutingPolicy
from shared.router.replicas import Replicas
from shared.server.api.connection import ConnectionLimit
from shared.server.api.service import HttpServer
from tests.support.default_signals import heard_signals
from tests.support.http_fixtures import serving

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 4093,
}
FLAGS = "--load-format dummy --page-size 16 --max-running-requests 16 --grammar-backend none"
FLAGS += " --context-length 1536 --max-total-tokens 400000"
SINGLE = "single"
LIMIT_S = 60.0
Counts = dict[str, Any]


def write_model(folder: Path) -> None:
    """Writes a small model with the tokenizer and the chat template of the demo model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


@asynccontextmanager
async def routed(policy: RoutingPolicy, urls: Sequence[str]) -> AsyncIterator[tuple[str, Replicas]]:
    """Runs a router in this event loop; yields its URL and its replicas."""
    replicas, listening = Replicas(policy, None, 2.0, 30.0), asyncio.Event()
    replicas.set_urls(urls)
    forwarder = Forwarder(replicas)
    app, _ = router_apps(AggregateRoutes(replicas, forwarder), forwarder, False)
    server = HttpServer(app, ConnectionLimit.of(2000, 1), 1, listening.set)
    (listener,) = bind("127.0.0.1", 0)  # without Nagle's algorithm
    with listener:
        task = asyncio.create_task(server.serve([listener]))
        await listening.wait()
        while len(replicas.ready) < len(urls):
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", replicas
        server.should_exit = True
        await task
    replicas.close()


async def replayed(url: str, tenant: str, chats: Sequence[Chat], think_s: float) -> Counts:
    """Sends the requests of all users, each user's in order; returns the hit rate."""
    num_prompt = num_cached = 0
    # The router closes idle connections, and a request on one of them would fail.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:

        async def converse(user: int, chat: Chat) -> None:
            nonlocal num_prompt, num_cached
            rng = random.Random(user)
            for end in range(2, len(chat), 2):
                await asyncio.sleep(rng.expovariate(1 / think_s))
                body = {"messages": chat[:end], "max_tokens": 1, "user": tenant}
                response = await client.post("/v1/chat/completions", json=body)
                usage = response.raise_for_status().json()["usage"]
                num_prompt += usage["prompt_tokens"]
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*(converse(user, chat) for user, chat in enumerate(chats)))
    return {"prompt_tokens": num_prompt, "hit_rate": round(num_cached / num_prompt, 4)}


async def measured(
    name: str, policy: RoutingPolicy, urls: Sequence[str], chats: Sequence[Chat], think_s: float
) -> Counts:
    """Returns the hit rate of a policy and the load of the busiest replica."""
    began = time.perf_counter()
    async with routed(policy, urls) as (url, replicas):
        counts = await replayed(url, name, chats, think_s)
        requests = [each.num_requests for each in replicas]
    busiest = round(max(requests) / statistics.mean(requests), 3)
    seconds = round(time.perf_counter() - began, 1)
    return {"policy": name, **counts, "busiest": busiest, "seconds": seconds}


def started(command: Sequence[str], count: int, ends: ExitStack) -> list[str]:
    """Starts servers at the same time; returns their URLs."""
    with heard_signals(), ThreadPoolExecutor() as pool:
        starts = [pool.submit(ends.enter_context, serving(command)) for _ in range(count)]
    return [each.result().url for each in starts]


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the hit rates."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.serving.live_hit_rate")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument(
        "--think-s", type=float, default=1.0, help="mean pause of a user between two requests"
    )
    parser.add_argument(
        "--flags", help="flags of torch servers with another model, as one quoted word"
    )
    parser.add_argument("--out", type=Path, help="JSON file, written after each policy")
    options = parser.parse_args(words)
    chats, rows = workload(options.users, options.turns), []
    head: Counts = {"command": shlex.join(["python", "-m", parser.prog.split()[-1], *words])}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head |= {"versions": versions("torch", device), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        write_model(Path(folder))
        flags = shlex.split(options.flags or f"--model-path {folder} {FLAGS}")
        command = ["-m", "torch_impl.serve", "--port", "0", *flags]
        urls = started(command, options.replicas, ends)
        for name, policy, used in (
            (SINGLE, RoutingPolicy(ROUND_ROBIN), urls[:1]),
            ("longest prefix", RoutingPolicy(CACHE_AWARE, UNBOUNDED), urls),
            (f"{CACHE_AWARE} (load bound {LOAD_BOUND})", RoutingPolicy(CACHE_AWARE), urls),
            (LEAST_LOAD, RoutingPolicy(LEAST_LOAD), urls),
            (ROUND_ROBIN, RoutingPolicy(ROUND_ROBIN), urls),
        ):
            rows.append(asyncio.run(measured(name, policy, used, chats, options.think_s)))
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                write_results(options.out, head | {"load": os.getloadavg(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
