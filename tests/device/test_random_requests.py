"""Random requests on random servers: no crash, no leak, and the output of plain decoding.

A default run serves some tens of requests in numpy and with torch; `-m matrix` serves 10,000 and
500, and 2,500 with JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.closing_fixture import closing_fixture
from tests.support.equality import TALLY, assert_few_excused
from tests.support.random_requests import (
    DRAFTERS,
    FAMILIES,
    HYBRID,
    PAGE_SIZES,
    RULES,
    TRAFFIC,
    Asked,
    Server,
    servers,
)
from tests.support.random_serving import Backends, check, serve
from tests.support.tiny_models import EXPERTS, LATENT, WITH_MTP

ANY = {"drafters": DRAFTERS, "page_sizes": PAGE_SIZES, "families": FAMILIES, "rules": RULES}
MANY = [("reference", 500, n) for n in range(2, 22)] + [("torch", 100, n) for n in range(2, 7)]
"""Number of requests, by framework and number of the draw."""

SLIDING = ("mistral", "qwen2")
"""Families with windows of 4 in all layers, and of 20 in two of three."""

IN_JAX = [
    ("exact", ("NEXTN", "DFLASH", "NGRAM")),
    ("exact", ("EAGLE", "EAGLE3")),
    ("exact", ("STANDALONE", "none")),
    ("rejection", ("NEXTN", "DFLASH")),
    ("block", ("EAGLE3", "STANDALONE")),
]
"""Rules and drafters: XLA compiles each of their programs once."""

EXAMPLES = 10
"""Loads of one draw of hypothesis, which begins with small ones: some 25 requests."""

MOST_USED = ("qwen2", "qwen3_5_moe", "deepseek_v3")
"""Families of windows, experts and latent attention that a default run serves at random."""


backends = closing_fixture(Backends)


def serve_at_random(backends: Backends, count: int, number: int, strategy) -> None:
    """Serves at least `count` requests; another `number` draws others.

    Whether pages run short depends on the steps in flight, hence on the machine: up to six times
    as many are served until they have.
    """
    begun, preempted = TALLY.requests, TALLY.preemptions
    for part in itertools.count():
        serve_some(backends, 1000 * number + part, strategy)
        served, was_short = TALLY.requests - begun, TALLY.preemptions > preempted
        if served >= (count if was_short else 6 * count):
            break
    assert TALLY.preemptions > preempted, "pages were never short"
    assert_few_excused()


def serve_some(backends: Backends, number: int, strategy) -> None:
    """Serves `EXAMPLES` loads, and looks for a small one among those that fail."""

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(server=strategy, traffic=TRAFFIC)
    def one(server: Server, traffic: list[Asked]) -> None:
        for visit in serve(server, traffic, backends):
            check(server, visit)

    one()


@pytest.mark.parametrize(("framework", "count"), [("reference", 60), ("torch", 50)])
def test_random_requests_equal_plain_output(framework, count, backends):
    serve_at_random(backends, count, 1, servers(framework, **ANY))


def families(names: Iterable[str]) -> list:
    return [
        pytest.param(name, marks=() if name in MOST_USED else pytest.mark.matrix) for name in names
    ]


@pytest.mark.parametrize("family", families(SLIDING))
def test_random_requests_with_sliding_window_equal_plain_output(family, backends):
    """Layers with a sliding window are covered, in the target model and in a small drafter."""
    drafters, rules = ("STANDALONE", "NGRAM", "EAGLE3", "none"), ("exact",)
    any_of = {"drafters": drafters, "page_sizes": PAGE_SIZES, "families": (family,), "rules": rules}
    serve_at_random(backends, 25, 3, servers("torch", **any_of))


@pytest.mark.parametrize("family", families(EXPERTS))
def test_random_requests_with_moe_equal_plain_output(family, backends):
    drafters, rules = ("STANDALONE", "NGRAM", "EAGLE3", "DFLASH", "none"), ("exact",)
    if family in WITH_MTP:
        drafters = ("NEXTN", *drafters)
    any_of = {"drafters": drafters, "page_sizes": PAGE_SIZES, "families": (family,), "rules": rules}
    serve_at_random(backends, 25, 6, servers("torch", **any_of))


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "gemma4"])
def test_random_requests_with_other_layers_equal_plain_output(family, backends):
    """Attention next to Mamba2, in other layers and in the same, and shared KV."""
    drafters, rules = ("STANDALONE", "NGRAM", "EAGLE3", "none"), ("exact",)
    any_of = {"drafters": drafters, "page_sizes": PAGE_SIZES, "families": (family,), "rules": rules}
    serve_at_random(backends, 25, 8, servers("torch", **any_of))


@pytest.mark.matrix
@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("rule", ["exact", "rejection", "block"])
def test_random_requests_with_latent_attention_on_jax(family, rule, backends):
    drafters = ("NEXTN", "none") if rule == "exact" else ("NEXTN",)
    few = {"page_sizes": (16,), "families": (family,), "rules": (rule,)}
    serve_at_random(backends, 200, 7, servers("jax", drafters=drafters, **few))


@pytest.mark.matrix
@pytest.mark.parametrize(("framework", "count", "number"), MANY)
def test_random_requests_full_matrix_equal_plain_output(framework, count, number, backends):
    serve_at_random(backends, count, number, servers(framework, **ANY))


@pytest.mark.matrix
@pytest.mark.parametrize(("rule", "drafters"), IN_JAX)
def test_random_requests_on_jax_equal_plain_output(rule, drafters, backends):
    few = {"page_sizes": (16,), "families": (HYBRID,), "rules": (rule,)}
    serve_at_random(backends, 500, 2, servers("jax", drafters=drafters, **few))
