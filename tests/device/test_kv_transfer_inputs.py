"""KV transfer of prompts with images, and with grammars on their output."""

from __future__ import annotations

import numpy as np
import pytest

from shared.engine.cache_policy import NO_CACHE
from shared.engine.request import Request, SamplingParams
from tests.support import grammar_cases, vlm
from tests.support.backends import make_backend
from tests.support.cache_policies import policy_of
from tests.support.grammars import constrained
from tests.support.run_engine import drive
from tests.support.transfers import (
    CHAIN,
    PLAIN,
    TRANSFERRED,
    TREE,
    exported,
    finish,
    wipe,
    with_transfer,
)

MATRIX = pytest.mark.matrix
IMAGES = "torch", "NEXTN"
"""Framework and drafter of the default run with images."""


@pytest.mark.parametrize(
    ("framework", "drafter"),
    [
        pytest.param(framework, drafter, marks=[] if (framework, drafter) == IMAGES else [MATRIX])
        for framework in ("torch", "jax")
        for drafter in ("none", "NEXTN", "EAGLE3", "DFLASH")
    ],
)
def test_transferred_prompt_with_images_is_cache_hit(framework, drafter):
    """The images of a record are part of its cache key; another image is no hit."""
    first, second = vlm.pixels(8, 10, 1), vlm.pixels(9, 5, 2)
    begin, between, end = (vlm.words(count, 1) for count in (20, 20, 9))
    prompt = vlm.Prompt(begin, first, between, second, end)
    source = vlm.engine_of(framework, drafter)
    drive(source, [prompt.request(tokens=0)])
    record = exported(source, prompt.request())
    assert record.num_tokens == TRANSFERRED
    assert len(record.header.images) == 2
    sink = vlm.engine_of(framework, drafter)
    wipe(sink)
    sink.transfer.begin_import(record, holds=False)
    finish(sink)
    asked = prompt.request()
    (outcome,) = drive(sink, [asked]).values()
    assert outcome.tokens == prompt.text()
    assert asked.cached_tokens == TRANSFERRED
    other = vlm.Prompt(begin, vlm.pixels(8, 10, 3), between, second, end)
    assert sink.transfer.match(other.tokens, "", other.images) == 0


@pytest.mark.parametrize(
    ("family", "drafter", "shape"),
    [
        ("qwen3_5", "NEXTN", CHAIN),
        pytest.param("llama", "EAGLE3", TREE, marks=MATRIX),
        pytest.param("llama", "NGRAM", CHAIN, marks=MATRIX),
        pytest.param("llama", "none", PLAIN, marks=MATRIX),
    ],
)
def test_transferred_prompt_with_grammar_gives_same_output(family, drafter, shape):
    config, weights = grammar_cases.model_of(family, drafter)
    head = grammar_cases.drafter_of(family, drafter)
    capacity = with_transfer(grammar_cases.capacity_of(family, drafter, shape), config, head)
    backend = make_backend("torch", config, weights, capacity, head)
    case = family, drafter, shape
    policy = policy_of(drafter, is_hybrid=family == "qwen3_5")
    found = []
    for cache in (NO_CACHE, policy):
        engine = grammar_cases.engine_of(backend, case, cache, 2)
        asked = grammar_requests(config.vocab)
        if cache is policy:
            drive(engine, prefills(asked))
            records = [exported(engine, each) for each in asked]
            engine = grammar_cases.engine_of(backend, case, cache, 2)
            wipe(engine)
            for record in records:
                engine.transfer.begin_import(record, holds=False)
            finish(engine)
        found.append({each.request_id: drive(engine, [each])[each.request_id] for each in asked})
    assert all(each.cached_tokens >= 64 for each in asked)
    grammar_cases.check_texts(asked, found[1], config.vocab)
    for number, outcome in found[0].items():
        assert found[1][number].tokens == outcome.tokens
        assert found[1][number].accepted == outcome.accepted


def grammar_requests(vocab: int) -> list[Request]:
    """Prompts of 80 tokens, held to a schema, greedy and sampled."""
    rng = np.random.default_rng(23)
    ways = [("schema", 0.0), ("schema", 1.0), ("lark", 1.0)]
    return [
        constrained(
            number,
            tuple(rng.integers(2, 250, 80).tolist()),
            vocab,
            grammar,
            max_tokens=40,
            seed32=900 + number,
            temperature=temperature,
        )
        for number, (grammar, temperature) in enumerate(ways)
    ]


def prefills(asked: list[Request]) -> list[Request]:
    """The same prompts without grammar and output."""
    sampling = SamplingParams(max_tokens=0)
    return [
        Request(request_id=each.request_id, prompt=each.prompt, sampling=sampling) for each in asked
    ]
