"""torch on several ranks, each a process: HTTP outputs equal one rank, and a soak loses nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from tests.support.http_fixtures import COMPLETIONS, ROOT, Server, serving
from tests.support.tp_server import OpenStream, ended, ranks_of, steps_of

IS_ON_GPUS = torch.cuda.device_count() > 1
MODEL = ROOT / "models" / ("demo/target" if IS_ON_GPUS else "random")
FLAGS = [
    "--model-path",
    str(MODEL),
    "--port",
    "0",
    "--context-length",
    "256",
    "--max-running-requests",
    "8",
]
FLAGS += ["--max-total-tokens", "2048"]
FLAGS += ["--dtype", "bfloat16"] * IS_ON_GPUS
DRAFTING = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"]
PROMPTS = ("The weather in", "Once upon a time", "1 2 3 4", "def f(x):")
CLIENTS, KINDS, MOST_TOKENS = 12, 12, 10


@contextmanager
def torch_ranks(count: int, *flags: str, module: str = "torch_impl.serve") -> Iterator[Server]:
    command = ["-m", module, *FLAGS, *flags, "--tp-size", str(count)]
    with serving(command) as server:
        yield server


def body_of(kind: int) -> dict[str, Any]:
    """A request body: greedy, sampled and penalised ones alternate, some with logprobs."""
    how = [{"temperature": 0.0}, {"temperature": 0.9}, {"frequency_penalty": 0.5}][kind % 3]
    logprobs = {"logprobs": 3} if kind % 4 == 0 else {}
    prompt = PROMPTS[kind % len(PROMPTS)]
    return {"prompt": prompt, "max_tokens": MOST_TOKENS, "seed": kind, **how, **logprobs}


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"], choice["logprobs"]


def all_said(server: Server, kinds: int = KINDS) -> list[tuple[Any, ...]]:
    """The answers of all kinds, one after the other, so that the steps are the same each time."""
    return [said(server.complete(**body_of(kind))) for kind in range(kinds)]


@pytest.fixture(scope="module")
def wanted() -> list[tuple[Any, ...]]:
    """Answers of one rank."""
    with torch_ranks(1, *DRAFTING) as server:
        return all_said(server)


def test_torch_two_ranks_served_output_bitwise_equal(wanted):
    with torch_ranks(2, *DRAFTING) as server:
        pids = server.pids()
        assert all_said(server) == wanted
        server.wait_for_metric('tandem:tp_rank_steps_total{rank="1"}', steps_of(server))
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0
        assert not any("Traceback" in line for line in server.lines)


def test_torch_multi_host_ranks_output_and_lost_rank(wanted):
    """They exchange by torch.distributed, and get their plans by a socket."""
    with torch_ranks(2, *DRAFTING, module="tests.support.serve_multi_host") as server:
        assert all_said(server, 4) == wanted[:4]
        pids, stream = server.pids(), OpenStream(server)
        os.kill(ranks_of(server)[0], signal.SIGKILL)
        assert stream.error().startswith("rank 1 was terminated by SIGKILL while serving")
        assert ended(server, pids) == 1


def test_jax_two_ranks_output_equals_torch(wanted):
    """The ranks are virtual CPU devices of one process."""
    few = ["--max-running-requests", "1", *FLAGS[:6], *FLAGS[10:]]
    few += ["--chunked-prefill-size", "64", "--disable-radix-cache"]  # two programs to compile
    with serving(["-m", "tests.support.serve_fast_compile", *few, "--tp-size", "2"]) as server:
        assert len(server.pids()) == 2, "the engine and the HTTP server"
        assert server.metrics()["tandem:tp_size"] == 2
        assert [answer[:2] for answer in all_said(server)] == [answer[:2] for answer in wanted]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.matrix)],
    ids=lambda each: each.name,
)
def test_lost_rank_error_names_rank_and_signal(number):
    with torch_ranks(2) as server:
        pids, stream = server.pids(), OpenStream(server)
        os.kill(ranks_of(server)[0], number)
        assert stream.error().startswith(("rank 1 was terminated by SIGKILL", "rank 1 is stopped"))
        assert ended(server, pids) == 1


@pytest.mark.parametrize(
    ("requests", "aborts"),
    [(24, 6), pytest.param(2000, 500, marks=pytest.mark.matrix)],
)
def test_torch_ranks_soak_with_aborts_frees_everything(requests, aborts, wanted):
    rng = random.Random(5)
    left = set(rng.sample(range(requests), aborts))
    kinds = [rng.randrange(KINDS) for _ in range(requests)]
    with torch_ranks(2, *DRAFTING) as server:
        pids, pages = server.pids(), server.metrics()["tandem:kv_pages_free"]

        def ask(number: int) -> str:
            body = body_of(kinds[number])
            if number in left:
                _leave(server, {**body, "max_tokens": 200, "ignore_eos": True})
                return "left"
            answer = said(server.complete(**body))
            # How many others a step serves moves the last bits of logprobs, never the text.
            return "right" if answer[:2] == wanted[kinds[number]][:2] else f"{body}: {answer}"

        with ThreadPoolExecutor(CLIENTS) as clients:
            outcomes = list(clients.map(ask, range(requests)))
        assert outcomes.count("left") == aborts
        assert set(outcomes) == {"left", "right"}
        for name in ("running", "waiting"):
            server.wait_for_metric(f"tandem:num_requests_{name}", 0)
        server.wait_for_metric('tandem:tp_rank_steps_total{rank="1"}', steps_of(server))
        figures = server.metrics()
        aborted = figures['tandem:request_success_total{finished_reason="abort"}']
        assert aborted == aborts
        assert figures["tandem:request_slots_free"] == 8
        assert figures["tandem:kv_pages_free"] == pages > 0
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0


def _leave(server: Server, body: dict[str, Any]) -> None:
    """Opens a stream and disconnects at its first event."""
    with httpx.stream(
        "POST", server.url + COMPLETIONS, json={**body, "stream": True}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_lines())
