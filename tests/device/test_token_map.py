"""Draft vocabulary of a start: drafts come from its rows only, and outputs do not change."""

from __future__ import annotations

from functools import lru_cache

import pytest

from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Mapped, make_backend
from tests.support.equality import Oracle
from tests.support.random_serving import divided_drafter_of
from tests.support.run_engine import Outcome
from tests.support.small_drafting import BATCH, small_capacity, small_outcomes, small_requests
from tests.support.tiny_models import DIVIDED, EOS_ID, tiny_model
from tests.support.tree_recorder import Recorder

CHAIN, TREE = TreeShape.chain(3, BATCH), TreeShape(6, 3, 2, BATCH * 6)
FRAMEWORKS = ("torch", pytest.param("jax", marks=pytest.mark.matrix))
CASES = [
    ("qwen3_5", "NEXTN", CHAIN, "exact"),
    ("qwen3_5", "NEXTN", TREE, "exact"),
    ("llama", "EAGLE", TREE, "exact"),
    ("qwen3_5", "NEXTN", CHAIN, "rejection"),
    ("gemma2", "EAGLE", TREE, "exact"),  # the target's soft cap applies to its rows too
    ("gemma2", "EAGLE", CHAIN, "rejection"),
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
    """Returns the outcomes of two requests, and the verified trees."""
    config, weights = model_of(family)
    token_map = token_map_of(config.vocab)
    drafter = Mapped(divided_drafter_of(DIVIDED.get(family, family), kind), token_map)
    capacity = small_capacity(config.vocab, shape, rule)
    backend = Recorder(make_backend(framework, config, weights, capacity, drafter))
    outcomes = small_outcomes(backend, capacity, shape, requests())
    trees = backend.trees()
    backend.close()
    return outcomes, trees


def requests() -> list[Request]:
    return small_requests(max_tokens=14, stop_token_ids=(EOS_ID,), **HOW)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("family", "kind", "shape", "rule"), CASES, ids=str)
def test_draft_vocabulary_drafts_match_spec(family, kind, shape, rule, framework):
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
    if rule == "exact":
        oracle = Oracle(*model_of(family))
        for request in requests():
            assert not oracle.check(
                request.prompt, got[request.request_id].tokens, request.sampling
            )


@pytest.mark.parametrize(("family", "kind", "shape", "rule"), [CASES[1], CASES[3]], ids=str)
def test_draft_vocabulary_ranks_bitwise_equal(family, kind, shape, rule):
    served("torch ranks 2", family, kind, shape, rule)  # compares each step
