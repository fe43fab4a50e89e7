"""Every request field with every drafter and every limit of drafts: the output of plain decoding.

A default run combines each field with some drafter and limit, and each of these with some field, on
the numpy backend; `-m matrix` runs the full product on torch. A new field without a case is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from shared.engine.request import SamplingParams
from shared.options.algorithms import ALGORITHMS, JOINED_ALGORITHMS, WITH_COPIES
from shared.server.completions.sampling import make_sampling
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from tests.support.closing_fixture import closing_fixture
from tests.support.http_fixtures import END
from tests.support.in_process import Body
from tests.support.plain_and_drafted import DRAFTS, House, accepted, answers, near, said
from tests.support.random_requests import prompt_of
from tests.support.random_serving import Backends

ROOT = Path(__file__).resolve().parents[2]
LIMITS: tuple[int | None, ...] = (0, 1, None)
"""Drafts of a step; None: all that it has."""

PROMPT = [*prompt_of(0, 20, 2)]
TEXT: Body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, "temperature": 0.0}
DRAWN: Body = {**TEXT, "temperature": 1.0, "seed": 3}
# Two tokens are likely over and over, so that penalties change their order.
REPEATED: Body = {**DRAWN, "logit_bias": {"65": 9.0, "66": 8.5}}
TALK: Body = {
    "messages": [{"role": "user", "content": "one two one two one"}],
    "max_completion_tokens": 12,
    "return_token_ids": True,
    "temperature": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One value of a field.

    Attributes:
      base: The request without it.
      value: The value; a function of the plain answer to `base` if it depends on that.
      more: What it needs beside it, in the request without it too.
    """

    base: Body
    value: Any
    more: Body = field(default_factory=dict)


def _token(place: int) -> Callable[[Body], list[int]]:
    return lambda answer: [answer["choices"][0]["token_ids"][place]]


CASES: dict[str, Case] = {
    "prompt": Case(TEXT, [*prompt_of(1, 20, 3)]),
    "messages": Case(TALK, [{"role": "user", "content": "three four three four"}]),
    "n": Case(DRAWN, 2),
    "max_tokens": Case(TEXT, 7),
    "max_completion_tokens": Case(TALK, 7),
    "min_tokens": Case(TEXT, 6, {"logit_bias": {str(END): 30.0}}),
    "temperature": Case(TEXT, 0.9, {"seed": 3}),
    "top_p": Case(DRAWN, 0.2),
    "top_k": Case(DRAWN, 2),
    "min_p": Case(DRAWN, 0.6),
    "presence_penalty": Case(REPEATED, 2.0),
    "frequency_penalty": Case(REPEATED, 2.0),
    "repetition_penalty": Case(REPEATED, 0.3),
    "logit_bias": Case(TEXT, {"65": 8.0, "66": 7.9}),
    "seed": Case(DRAWN, 4),
    "stop": Case(TEXT, lambda answer: answer["choices"][0]["text"][4:6]),
    "stop_token_ids": Case(TEXT, _token(5)),
    "ignore_eos": Case(TEXT, True, {"logit_bias": {str(END): 30.0}}),
    "return_token_ids": Case(TEXT, False),
    "echo": Case(TEXT, True),
    "logprobs": Case(TEXT, 2),
    "prompt_logprobs": Case(TEXT, 2),
    "top_logprobs": Case(TALK, 2, {"logprobs": True}),
}
"""A value of each field that changes an answer, and does."""

HTTP, ENGINE = "tests/server/test_http", "tests/engine/test_prefix_cache.py"
FORMS = f"{HTTP}_grammar.py::test_structured_output_fields_constrain_completion"
ELSEWHERE = {
    "response_format": f"{HTTP}_grammar.py::test_structured_output_equals_plain_decoding",
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex"), FORMS),
    **dict.fromkeys(("guided_choice", "guided_grammar"), FORMS),
    "stream": f"{HTTP}_api.py::test_completion_stream_equals_whole_response",
    "stream_options": f"{HTTP}_api.py::test_include_usage_sends_separate_last_event",
    "tools": "tests/text/test_tool_calls.py::test_tool_call_parser_independent_of_chunks",
    "tool_choice": f"{HTTP}_tool_choice.py::test_tool_choice_none_forbids_calls",
    "parallel_tool_calls": (f"{HTTP}_tools.py::test_parallel_tool_calls_false_returns_one_call"),
    "chat_template_kwargs": (f"{HTTP}_tools.py::test_reasoning_opened_by_template_is_separated"),
    **dict.fromkeys(
        ("safety_identifier", "prompt_cache_key"),
        f"{HTTP}_bad_input.py::test_user_hints_and_empty_stop_are_neutral",
    ),
    **dict.fromkeys(
        ("reasoning_effort", "verbosity", "enable_thinking", "thinking"),
        "tests/server/test_reasoning_effort.py::test_reasoning_advice_reaches_template_variables",
    ),
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message"),
        f"{HTTP}_tokens.py::test_tokenize_applies_generation_prompt_and_continue_final_message",
    ),
    "trace": "tests/engine/test_step_trace.py::test_step_trace_only_for_requesting_requests",
    "user": f"{ENGINE}::test_prefix_cache_isolates_tenants",
    "priority": f"{ENGINE}::test_priority_scheduling_without_starvation",
}
"""Tests of fields without an effect on tokens, and of grammar fields, whose masks need own
programs.
"""

NO_TEXT = {"model": "names what is served", "speculative": "is the limit of drafts itself"}


def test_every_request_field_has_case():
    known = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
    assert CASES.keys() | ELSEWHERE.keys() | NO_TEXT.keys() == known.keys()
    assert len(CASES) + len(ELSEWHERE) + len(NO_TEXT) == len(known)
    for name in ELSEWHERE.values():
        file, test = name.split("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_drafts_cover_all_algorithms():
    assert DRAFTS.keys() == {*ALGORITHMS, *JOINED_ALGORITHMS}


def with_field(name: str, plain: Callable[[Body], Body]) -> tuple[Body, Body]:
    """A request without a field, and with it."""
    case = CASES[name]
    base = case.base | case.more
    value = case.value(plain(base)) if callable(case.value) else case.value
    return base, base | {name: value}


def limited(body: Body, limit: int | None) -> Body:
    return body if limit is None else body | {"speculative": {"max_draft_tokens": limit}}


backends = closing_fixture(Backends)


def check(house: House, chosen: list[tuple[str, int | None]]) -> None:
    """Serves some fields at some limits at once, and compares the answers with plain ones."""
    drafting, num_accepted = house.drafting(cached=False), 0
    for is_talk in (False, True):
        some = [(n, limit) for n, limit in chosen if (CASES[n].base is TALK) is is_talk]
        if not some:
            continue
        pairs = [with_field(name, house.plainly) for name, _ in some]
        asked = [limited(body, limit) for (_, body), (_, limit) in zip(pairs, some, strict=True)]
        found = answers(drafting, asked)
        for (name, limit), (base, body), answer in zip(some, pairs, found, strict=True):
            plain = house.plainly(body)
            assert near(said(house.plainly(base))) != said(plain), f"{name} changes nothing"
            assert near(said(plain)) == said(answer), (name, limit)
            histogram = accepted(answer)
            most = house.depth if limit is None else limit
            assert not any(histogram[most + 1 :]), (name, limit)
            num_accepted += sum(i * count for i, count in enumerate(histogram))
    assert num_accepted > 0, "no draft was accepted, so none could do harm"


PRODUCT = [(name, limit) for limit in LIMITS for name in CASES]  # each share has all limits


def some_of(algorithm: str) -> list[tuple[str, int | None]]:
    """A share of the product, another one for each drafter; with copies that of the drafter."""
    place = ALGORITHMS.index(algorithm.removesuffix(WITH_COPIES)) + 4  # of each some are accepted
    return PRODUCT[place % len(ALGORITHMS) :: len(ALGORITHMS)]


def test_default_run_covers_every_field_and_draft_limit():
    asked = [pair for algorithm in ALGORITHMS for pair in some_of(algorithm)]
    assert sorted(asked, key=str) == sorted(PRODUCT, key=str)
    assert all({limit for _, limit in some_of(each)} == set(LIMITS) for each in DRAFTS)


@pytest.mark.parametrize(
    "algorithm",
    [
        *(name for name in DRAFTS if name not in JOINED_ALGORITHMS),
        "NEXTN+NGRAM",
        *(pytest.param(n, marks=pytest.mark.matrix) for n in JOINED_ALGORITHMS[1:]),
    ],
)
def test_every_field_preserves_plain_output(algorithm, backends):
    check(House(backends, "reference", algorithm), some_of(algorithm))


@pytest.mark.matrix
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_every_field_full_matrix_preserves_plain_output(algorithm, backends):
    check(House(backends, "torch", algorithm), PRODUCT)


@pytest.mark.matrix
@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", "NEXTN+NGRAM"])
def test_every_field_with_draft_vocabulary_preserves_plain_output(algorithm, backends):
    """The tokens that are no drafts are some of those that every answer has."""
    house = House(backends, "torch", algorithm, tuple(range(0, 256, 2)))
    check(house, PRODUCT)


def test_every_sampling_param_set_by_some_field(backends):
    """The HTTP server sets every field of `SamplingParams`; a new field needs a case as well."""
    facts, neutral = House(backends, "reference", "NGRAM").facts, SamplingParams()
    # Set by choice, by the model, by its name, by the limit of drafts, and for traces.
    differs = {"seed32", "stop_token_ids", "lora", "max_draft_tokens", "traces", "grammar"}
    for name, case in CASES.items():
        kind = ChatRequest if case.base is TALK else CompletionRequest
        value = [5] if callable(case.value) and name == "stop_token_ids" else case.value
        if callable(value):
            continue
        body = kind.model_validate(case.base | case.more | {name: value})
        asked = make_sampling(body.to_generation().sampling, 20, facts)
        differs |= {
            each.name
            for each in fields(SamplingParams)
            if getattr(asked, each.name) != getattr(neutral, each.name)
        }
    assert differs == {each.name for each in fields(SamplingParams)}
