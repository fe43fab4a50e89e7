"""Plain and speculative outputs are equal: alone, in a batch, and after prefix-cache hits."""

from __future__ import annotations

import pytest

from tests.support.closing_fixture import closing_fixture
from tests.support.in_process import Body
from tests.support.plain_and_drafted import DRAFTS, House, accepted, answers, near, said
from tests.support.random_requests import BATCH, prompt_of
from tests.support.random_serving import Backends

LENGTH = 67
"""Tokens of a prompt: a stretch of 64, behind which a hybrid has a state, and little more."""

HOWS: tuple[Body, ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.1, "logit_bias": {"65": 20.0, "66": 19.0}},
    {"temperature": 1.0, "top_k": 5, "n": 2},
)


def bodies(tenant: str) -> list[Body]:
    """Returns one request body per batch row, each with its own prompt."""
    return [
        {
            "prompt": [*prompt_of(number, LENGTH, 3)],
            "max_tokens": 16,
            "seed": number,
            "return_token_ids": True,
            "logprobs": 2,  # these see a wrong state before a text does
            "user": tenant,
            **how,
        }
        for number, how in enumerate(HOWS)
    ]


def cached(found: list[Body]) -> list[int]:
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found]


backends = closing_fixture(Backends)


RUNS = [("reference", name, ()) for name in ("NEXTN", "NGRAM")]
RUNS += [("torch", name, pytest.mark.matrix) for name in DRAFTS]


@pytest.mark.parametrize(
    ("framework", "algorithm"), [pytest.param(*run[:2], marks=run[2]) for run in RUNS]
)
def test_output_equals_plain_alone_batched_and_cached(framework, algorithm, backends):
    house = House(backends, framework, algorithm)
    drafting = house.drafting(cached=True)
    plain = [said(house.plainly(body)) for body in bodies("")]
    assert len(plain) == BATCH
    alone = [answers(drafting, [body])[0] for body in bodies("one")]
    batched = answers(drafting, bodies("two"))
    found = answers(drafting, bodies("two"))
    assert cached(alone) == cached(batched) == [0] * BATCH
    # A hybrid has few states, and those of the texts used longest ago have gone.
    assert sum(number >= 64 for number in cached(found)) >= BATCH // 2
    for runs in (alone, batched, found):
        for want, answer in zip(plain, runs, strict=True):
            assert near(want) == said(answer)
        assert any(any(accepted(answer)[1:]) for answer in runs), "no draft was accepted"
