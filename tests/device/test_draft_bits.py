"""Log probabilities in bfloat16 on a GPU: with drafts they have the bits of plain decoding.

    python -m pytest -o addopts= -m gpu tests/device/test_draft_bits.py

Equal tokens show less: they change only where two tokens nearly tie.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature
from shared.engine.request import Request, SamplingParams
from shared.text.tokenizer import Tokenizer
from tests.support.in_process_engine import one_bucket, started
from tests.support.tasks import Tasks

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BATCH, CONTEXT, TOKENS = 8, 1024, 96
CHUNK = 512
"""Tokens of the only prefill program, because JAX compiles each program for ten seconds."""
SHAPE = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
DRAFTS = {
    "NEXTN": (3,),
    "EAGLE": (5, 4, 16),
    "EAGLE3": (3, 4, 8),
    "DFLASH": (7, 8, 64),
    "NGRAM": (),
}


def with_logprobs(capacity: BackendLimits) -> BackendLimits:
    """Keeps one program of each kind of step, with log probabilities."""
    programs = one_bucket(capacity, CHUNK).programs
    kept = [each.with_features({ProgramFeature.LOGPROBS: True}) for each in programs]
    return replace(capacity, programs=tuple(kept))


@cache
def outputs(framework: str, algorithm: str | None) -> list[list[tuple[int, float]]]:
    """Tokens of each request with their log probabilities."""
    flags = ["--model-path", str(DEMO / "target"), "--disable-radix-cache", "--grammar-backend"]
    flags += ["none", "--max-running-requests", str(BATCH), "--context-length", str(CONTEXT)]
    if algorithm is not None:
        flags += ["--speculative-algorithm", algorithm]
        for flag, value in zip(SHAPE, DRAFTS[algorithm], strict=False):
            flags += [flag, str(value)]
        if (DEMO / algorithm.lower()).is_dir():
            flags += ["--speculative-draft-model-path", str(DEMO / algorithm.lower())]
    served = started(framework, flags, with_logprobs)
    tokenizer = Tokenizer.from_folder(DEMO / "target")
    assert tokenizer is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0)
    prompts = Tasks.of("chats", BATCH, 0, tokenizer).prompts
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        served.engine.add(Request(request_id=number, prompt=prompt, sampling=sampling))
    while served.engine.busy:
        for event in served.engine.step():
            assert not event.error
            scores = [score for score, _ in event.logprobs or ()]
            found[event.request_id] += zip(event.tokens, scores, strict=True)
    served.engine.close()
    return found


@pytest.mark.parametrize("algorithm", DRAFTS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_log_probs_equal_plain_decoding(framework: str, algorithm: str) -> None:
    plain = outputs(framework, None)
    assert sum(map(len, plain)) == BATCH * TOKENS
    assert outputs(framework, algorithm) == plain
