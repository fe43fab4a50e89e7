"""The request check: invalid values, and field names of the caller in its errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.engine.checks import TOO_LONG, RequestLimits, check
from shared.engine.request import InvalidRequestError, SamplingParams

LIMITS = RequestLimits(
    context_length=64,
    max_request_tokens=64,
    vocab_size=100,
    max_stop_token_ids=2,
    max_logit_bias_entries=1,
    max_logprobs=5,
    max_prompt_logprobs=3,
)
CHAT = {"prompt": "messages", "max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
CHAT |= {"prompt_logprobs": "echoed"}


@pytest.mark.parametrize(
    ("prompt", "asked", "field", "words"),
    [
        ([], {}, "messages", "messages must not be empty"),
        ([1] * 64, {"max_tokens": 1}, "messages", "messages has 64 tokens, which leaves no room"),
        ([100], {}, "messages", "messages contains token id 100; valid ids are 0 to 99"),
        ([1], {"max_tokens": 64}, "max_completion_tokens", "max_completion_tokens is 64: together"),
        ([1], {"max_tokens": -1}, "max_completion_tokens", "must be at least 0"),
        ([1], {"min_tokens": 17}, "min_tokens", "must not exceed max_completion_tokens, which"),
        ([1], {"stop_token_ids": (1, 2, 3)}, "stop_token_ids", "at most 2 ids, got 3"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids", "contains token id -1"),
        ([1], {"logit_bias": {1: 1.0, 2: 1.0}}, "logit_bias", "at most 1 tokens, got 2"),
        ([1], {"logit_bias": {10**30: 1.0}}, "logit_bias", "contains token id 1000"),
        ([1], {"logprobs": 6}, "top_logprobs", "top_logprobs must be 0 to 5, got 6"),
        (
            [1],
            {"prompt_logprobs": 4},
            "echoed",
            "echoed must be 0 to 3 for logprobs",
        ),
        (
            [1],
            {"prompt_logprobs": -1},
            "echoed",
            "echoed must be 0 to 3 for logprobs",
        ),
    ],
)
def test_check_error_names_field_of_caller(prompt, asked, field, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        check(prompt, SamplingParams(**asked), LIMITS, CHAT)
    assert refused.value.field == field


def test_check_accepts_longest_request_and_rejects_longer():
    check([1] * 60, SamplingParams(max_tokens=4, min_tokens=4, logprobs=5), LIMITS)
    with pytest.raises(InvalidRequestError, match="more than the context of 64 tokens") as refused:
        check([1] * 60, SamplingParams(max_tokens=5), LIMITS)
    assert refused.value.code == TOO_LONG
    pages = replace(LIMITS, max_request_tokens=32)
    with pytest.raises(
        InvalidRequestError, match="the 32 tokens that the KV pages hold"
    ) as refused:
        check([1] * 32, SamplingParams(), pages)
    assert refused.value.code == TOO_LONG


def test_check_rejects_logprobs_without_program():
    with pytest.raises(InvalidRequestError, match="logprobs are off"):
        check([1], SamplingParams(logprobs=0), replace(LIMITS, max_logprobs=None))
