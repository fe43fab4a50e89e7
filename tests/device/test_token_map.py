"""A drafter with a vocabulary of the start's drafts by those rows alone, and changes no text."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from shared.boundary.backend import Capacity
from shared.boundary.program import Extra, Program, Work
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Mapped, make_backend
from tests.support.driving import Outcome, drive
from tests.support.equality import Oracle
from tests.support.random_serving import divided_drafter_of
from tests.support.recorder import Recorder
from tests.support.tiny_models import DIVIDED, EOS_ID, tiny_model

BATCH, PAGES = 2, 8
CHAIN, TREE = TreeShape.chain(3, BATCH), TreeShape(6, 3, 2, BATCH * 6)
FRAMEWORKS = ("torch", pytest.param("jax", marks=pytest.mark.matrix))
CASES = [
    ("qwen3_5", "NEXTN", CHAIN, "match"),
    ("qwen3_5", "NEXTN", TREE, "match"),
    ("llama", "EAGLE", TREE, "match"),
    ("qwen3_5", "NEXTN", CHAIN, "rejection"),
]
HOW = {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 60, "logit_bias": {5: 2.0}}


@lru_cache
def model_of(family: str):
    return tiny_model(DIVIDED.get(family, family), 3)


def token_map_of(vocab: int) -> tuple[int, ...]:
    """Runs of tokens and single ones, of which two ranks have unequal shares."""
    return tuple(token for token in range(vocab) if token % 3 or token % 7 == 0)


def served(
    framework: str, family: str, kind: str, shape: TreeShape, rule: str
) -> tuple[dict[int, Outcome], list[tuple]]:
    """What two requests get, and the trees that were verified."""
    config, weights = model_of(family)
    token_map = token_map_of(config.vocab)
    drafter = Mapped(divided_drafter_of(DIVIDED.get(family, family), kind), token_map)
    programs = [
        Program(work=work, batch=BATCH, pages=PAGES, tokens=n, shape=each, extras=Extra.NONE)
        for work, each, n in (
            (Work.PREFILL, TreeShape.plain(BATCH), 64),
            (Work.DECODE, shape, 0),
        )
    ]
    capacity = Capacity(
        page_size=16,
        num_pages=1 + BATCH * PAGES,
        num_slots=1 + BATCH,
        num_snapshots=1,
        programs=tuple(programs),
        overlap=1,
        context_length=100,
        vocab=config.vocab,
        max_stop_ids=1,
        max_bias=1,
        max_logprobs=1,
        accept_rule=rule,
    )
    backend = Recorder(make_backend(framework, config, weights, capacity, drafter))
    controller = StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)
    outcomes = drive(engine, requests())
    trees = backend.trees()
    backend.close()
    return outcomes, trees


def requests() -> list[Request]:
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(2, 250, 12).tolist()) for _ in range(BATCH)]
    sampling = SamplingParams(max_tokens=14, seed32=1, stop_token_ids=(EOS_ID,), **HOW)
    return [Request(request_id=i, prompt=p, sampling=sampling) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("family", "kind", "shape", "rule"), CASES, ids=str)
def test_drafts_are_of_the_map_and_the_references_and_the_text_is_the_plain_one(
    family, kind, shape, rule, framework
):
    want, trees = served("reference", family, kind, shape, rule)
    got, others = served(framework, family, kind, shape, rule)
    assert [got[i].tokens for i in got] == [want[i].tokens for i in want]
    assert [got[i].accepted for i in got] == [want[i].accepted for i in want]
    assert others == trees
    assert {0, 1} <= {count for each in got.values() for count in each.accepted}
    vocab = model_of(family)[0].vocab
    drafted = {int(token) for tokens, _ in others for token in tokens[1:]} - {0}
    assert drafted <= {*token_map_of(vocab)}
    said = {token for each in got.values() for token in each.tokens}
    assert said - {*token_map_of(vocab)}, "the target chose no token that is left out"
    if rule == "match":
        oracle = Oracle(*model_of(family))
        for request in requests():
            assert not oracle.check(
                request.prompt, got[request.request_id].tokens, request.sampling
            )


@pytest.mark.parametrize(("family", "kind", "shape", "rule"), [CASES[1], CASES[3]], ids=str)
def test_ranks_cut_the_map_and_draft_with_the_bits_of_one(family, kind, shape, rule):
    served("torch ranks 2", family, kind, shape, rule)  # compares each step
