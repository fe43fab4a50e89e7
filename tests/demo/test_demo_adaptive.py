"""Adaptive speculation with the demo model: start on both backends, and plain outputs."""

import copy
from pathlib import Path

import pytest

from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Tokenizer
from tests.support.in_process_engine import Served, made_programs, serve_all, start
from tests.support.tasks import Tasks

TARGET = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
BATCH, TOKENS = 2, 60
TEMPERATURES = {"problems": 0.0, "copying": 0.0, "chats": 1.0}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Problems and copying greedily, chats at temperature 1."""
    tokenizer, ends = Tokenizer.from_folder(TARGET), config_from_folder(TARGET).eos_ids
    assert tokenizer is not None
    found: list[Request] = []
    for kind, temperature in TEMPERATURES.items():
        for prompt in Tasks.of(kind, 3, BATCH, tokenizer).prompts:
            sampling = SamplingParams(
                temperature=temperature,
                seed32=derive_seed(len(found), 0),
                max_tokens=TOKENS,
                stop_token_ids=ends,
            )
            found.append(Request(request_id=len(found), prompt=prompt, sampling=sampling))
    return found


def started(framework: str, requests: list[Request], *flags: str) -> Served:
    context = max(len(request.prompt) for request in requests) + TOKENS
    return start(
        framework,
        ["--model-path", str(TARGET), "--dtype", "float32", *flags],
        batch=BATCH,
        context=-(-context // 64) * 64,
        radix_cache=False,
        batches=(1, BATCH),
    )


def texts(served: Served, requests: list[Request]) -> list[list[int]]:
    found = [outcome.tokens for outcome in serve_all(served.engine, copy.deepcopy(requests))]
    served.engine.close()
    return found


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[list[int]]:
    return texts(started("torch", requests), requests)


@pytest.mark.matrix
@pytest.mark.parametrize("drafts", ["NEXTN", "NGRAM"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_adaptive_start_serves_plain_output_without_compiling(framework, drafts, requests, plain):
    """Every shape was timed at the start, and nothing is compiled once it has ended."""
    served = started(
        framework, requests, "--speculative-algorithm", drafts, "--speculative-adaptive"
    )
    table, made = served.engine.controller.costs.table, made_programs(served.backend)
    assert all(0 < each < 10 for seconds in table.values() for each in seconds)
    assert set(table) == {1, BATCH}
    assert texts(served, requests) == plain
    assert made_programs(served.backend) == made
    steps = served.engine.metrics.snapshot()
    assert steps['spec_decode_adaptive_steps_total{tier="S3"}'] > 0
