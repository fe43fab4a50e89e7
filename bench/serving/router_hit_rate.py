"""Prefix hit rate of routing policies on a chat workload, simulated, or of a running server.

    python -m bench.serving.router_hit_rate --out bench/results/router_hit_rate.json
    python -m bench.serving.router_hit_rate --base-url http://127.0.0.1:8000

The workload is fixed: users with a shared system prompt send held-out word problems of the demo
model, and the reply to each is the reference answer. The simulation replays it in virtual
time with the router's policies. Every replica has an unlimited prefix cache of whole pages, and a
request occupies its replica for a time that grows with uncached prompt tokens and output tokens.
The hit rate is the share of prompt tokens found in the cache. `single` is one server with the cache
of all. With `--base-url` the same requests are sent, and the hit rate is that of their `usage`.
"""

import argparse
import asyncio
import heapq
import json
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx

from bench.common.environment import write_results
from bench.common.server import headers_of, plain_url
from models.demo.data import SYSTEM_PROMPTS, problems
from models.demo.example import Example, Message
from shared.options.router import CACHE_AWARE, LEAST_LOAD, ROUND_ROBIN
from shared.router.policy import LOAD_BOUND, RoutingPolicy, prefix_keys
from shared.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
PAGE = 16
UNBOUNDED = 1e9
THINK_S = 10.0
"""Mean seconds between a reply and the next turn of its user."""

BASE_S, PREFILL_S, DECODE_S = 0.05, 0.0005, 0.02
"""Seconds of a request, of each uncached prompt token and of each output token."""

SYSTEM_COPIES = 4
"""Repetitions of the demo model's system prompts in the system prompt of the workload."""

Chat = list[Message]


def workload(users: int, turns: int) -> list[Chat]:
    """Returns the whole conversation of each user: system prompt, then questions and answers."""
    system: Message = {"role": "system", "content": " ".join(SYSTEM_PROMPTS * SYSTEM_COPIES)}
    found = []
    for user in range(users):
        solved = islice(problems("held_out", user), turns)
        found.append([system, *chain.from_iterable(map(_turn, solved))])
    return found


def _turn(solved: Example) -> list[Message]:
    return [*solved.messages, {"role": "assistant", "content": solved.answer}]


@dataclass
class Replica:
    """Simulated replica.

    Attributes:
      pages: Cached prefixes, as tuples of all tokens up to the end of a page.
      num_open: Requests in progress.
      num_requests: All requests.
    """

    pages: set[int] = field(default_factory=set)
    num_open: int = 0
    num_requests: int = 0

    def cached(self, tokens: Sequence[int]) -> int:
        """Returns the cached tokens of a prompt."""
        ends = range(PAGE, len(tokens), PAGE)  # at least one token is prefilled
        return next(
            (end - PAGE for end in ends if _key(tokens, end) not in self.pages), _most(ends)
        )

    def add(self, tokens: Sequence[int]) -> None:
        """Caches a prompt with its output."""
        self.pages.update(_key(tokens, end) for end in range(PAGE, len(tokens) + 1, PAGE))


def _key(tokens: Sequence[int], end: int) -> int:
    return hash(tuple(tokens[:end]))


def _most(ends: range) -> int:
    return ends[-1] if ends else 0


@dataclass(frozen=True)
class Turn:
    """One request of a user.

    Attributes:
      keys: Prefixes by `shared.router.policy.prefix_keys`.
      prompt, whole: Tokens of the prompt, and with the output.
    """

    keys: list[bytes]
    prompt: list[int]
    whole: list[int]


def turns_of(chat: Chat, tokenizer: Tokenizer) -> list[Turn]:
    """Returns the requests of a conversation."""
    found = []
    for end in range(2, len(chat), 2):
        prompt = tokenizer.encode_chat(chat[:end])
        output = tokenizer.encode(str(chat[end]["content"]))
        found.append(Turn(prefix_keys({"messages": chat[:end]}), prompt, [*prompt, *output]))
    return found


def simulate(
    users: Sequence[Sequence[Turn]], policy: RoutingPolicy, count: int, seed: int
) -> dict[str, float]:
    """Replays all conversations; returns the hit rate and the load of the busiest replica."""
    rng, replicas = random.Random(seed), [Replica() for _ in range(count)]
    events = [(rng.uniform(0, THINK_S), user, 0, -1) for user in range(len(users))]
    heapq.heapify(events)
    num_cached = num_prompt = 0
    while events:
        now, user, turn, place = heapq.heappop(events)
        request = users[user][turn]
        if place < 0:  # arrival
            loads = {i: each.num_open for i, each in enumerate(replicas)}
            place = policy.choose(request.keys, loads)
            replica = replicas[place]
            cached = replica.cached(request.prompt)
            num_cached, num_prompt = num_cached + cached, num_prompt + len(request.prompt)
            replica.num_open += 1
            replica.num_requests += 1
            uncached = len(request.prompt) - cached
            output = len(request.whole) - len(request.prompt)
            end = now + BASE_S + PREFILL_S * uncached + DECODE_S * output
            heapq.heappush(events, (end, user, turn, place))
            continue
        replicas[place].num_open -= 1
        replicas[place].add(request.whole)
        if turn + 1 < len(users[user]):
            later = now + rng.expovariate(1 / THINK_S)
            heapq.heappush(events, (later, user, turn + 1, -1))
    most = max(each.num_requests for each in replicas)
    mean = sum(each.num_requests for each in replicas) / count
    return {"hit_rate": round(num_cached / num_prompt, 4), "busiest": round(most / mean, 3)}


def compared(users: Sequence[Sequence[Turn]], count: int, seed: int) -> dict[str, dict[str, float]]:
    """Returns the results of all policies."""
    policies = {
        "single": (RoutingPolicy(ROUND_ROBIN), 1),
        "longest prefix": (RoutingPolicy(CACHE_AWARE, UNBOUNDED), count),
        f"{CACHE_AWARE} (load bound {LOAD_BOUND})": (RoutingPolicy(CACHE_AWARE), count),
        LEAST_LOAD: (RoutingPolicy(LEAST_LOAD), count),
        ROUND_ROBIN: (RoutingPolicy(ROUND_ROBIN), count),
    }
    return {
        name: simulate(users, policy, number, seed) for name, (policy, number) in policies.items()
    }


async def replayed(url: str, key: str | None, chats: Sequence[Chat]) -> dict[str, float]:
    """Sends the requests of all users to a server, each user's in turn; returns the hit rate."""
    counts = {"prompt_tokens": 0, "cached_tokens": 0}
    async with httpx.AsyncClient(base_url=url, headers=headers_of(key), timeout=600) as client:

        async def converse(chat: Chat) -> None:
            for end in range(2, len(chat), 2):
                body = {"messages": chat[:end], "max_tokens": 1}
                response = await client.post("/v1/chat/completions", json=body)
                usage = response.raise_for_status().json()["usage"]
                counts["prompt_tokens"] += usage["prompt_tokens"]
                counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*map(converse, chats))
    return counts | {"hit_rate": round(counts["cached_tokens"] / counts["prompt_tokens"], 4)}


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the hit rates."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.serving.router_hit_rate")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5, help="simulations; the median is reported")
    parser.add_argument("--base-url", type=plain_url, help="replays on a server instead")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(words)
    chats = workload(options.users, options.turns)
    if options.base_url:
        found: dict[str, Any] = asyncio.run(replayed(options.base_url, options.api_key, chats))
    else:
        found = simulated(chats, options.replicas, options.seeds)
    print(json.dumps(found, indent=1))
    if options.out:
        command = shlex.join(["python", "-m", "bench.serving.router_hit_rate", *words])
        write_results(options.out, {"command": command, "found": found})
    return 0


def simulated(chats: Sequence[Chat], count: int, seeds: int) -> dict[str, dict[str, float]]:
    """Returns the median of all seeds for each policy."""
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    users = [turns_of(chat, tokenizer) for chat in chats]
    rounds = [compared(users, count, seed) for seed in range(seeds)]
    return {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in first}
        for name, first in rounds[0].items()
    }


if __name__ == "__main__":
    sys.exit(main())
