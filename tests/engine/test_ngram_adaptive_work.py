"""The adaptive choice of NGRAM against each of its tiers, over texts that are given, in simulated
time.

Texts say anew what their prompts said, in pieces, and other things between: how much a tree is
worth changes from place to place within one text. All tiers have the same texts to write.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bench.phases import Phase, Served, serve
from bench.simulated import TextBackend, seconds_of, simulated_limits, with_host_drafts
from shared.engine.adaptive.tiers import Tier
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.adaptive import AdaptiveNgramController
from shared.engine.ngram.controller import NgramController
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import NgramConfig

MILLISECONDS = {
    "off": {1: 7.1, 4: 9.0},
    "S1": {1: 11.0, 4: 13.5},
    "S3": {1: 11.6, 4: 15.0},
    "S11": {1: 14.8, 4: 22.0},
}
"""Of a step of the demo's model on a CPU, and beside it about those of four rows."""

TIERS = tuple(map(Tier.parse, MILLISECONDS))
BATCHES, VOCAB, LENGTH = (1, 2, 4), 4096, 240
SECONDS = seconds_of(MILLISECONDS)
KINDS = {"copying": 0.85, "half and half": 0.4, "free": 0.03}
"""The share of pieces that a text has from its prompt."""


@cache
def work() -> tuple[list[Phase], dict[int, list[int]]]:
    """Phases of each kind and batch, and the texts by seed."""
    rng, phases, texts = np.random.default_rng(3), list[Phase](), dict[int, list[int]]()
    for batch in (1, 4):
        for kind, share in KINDS.items():
            requests = []
            for _ in range(6 if batch == 1 else 32):
                prompt, seed = rng.integers(1, VOCAB, 200).tolist(), 1 + len(texts)
                texts[seed] = _text(rng, prompt, share)
                sampling = SamplingParams(temperature=0.0, seed32=seed, max_tokens=LENGTH)
                requests.append(Request(request_id=seed, prompt=tuple(prompt), sampling=sampling))
            phases.append(Phase(f"{kind}, batch {batch}", batch, requests))
    return phases, texts


def _text(rng: np.random.Generator, prompt: list[int], share: float) -> list[int]:
    """Pieces of a prompt, and of words of its own from a common few, which repeat by chance."""
    found: list[int] = []
    while len(found) < LENGTH:
        length = int(rng.integers(3, 30))
        if rng.random() < share:
            start = int(rng.integers(0, len(prompt) - length))
            found += prompt[start : start + length]
        else:
            found += rng.geometric(0.03, length).tolist()
    return found[:LENGTH]


@cache
def served(tier: int | None) -> list[Served]:
    """The work with one tier, or with all of them to choose from."""
    phases, texts = work()
    limits = with_host_drafts(simulated_limits(TIERS, BATCHES, overlap=1), VOCAB)
    backend = TextBackend(limits, SECONDS, texts, noise=0.03)
    engine = Engine(
        backend,
        _controller(backend, tier),
        overlap=1,
        chunked_prefill_size=2048,
        cache=NO_CACHE,
    )
    return serve(engine, phases, lambda: backend.clock)


def _controller(backend: TextBackend, tier: int | None):
    widest = TIERS[-1 if tier is None else tier]
    index = NgramIndex(
        NgramConfig(), nodes=widest.nodes, depth=widest.depth, vocab=VOCAB, chain=False
    )
    if tier is None:
        table = {batch: [SECONDS(batch, t) for t in (*TIERS, TIERS[0])] for batch in BATCHES}
        return AdaptiveNgramController(backend.limits, index, table, clock=lambda: backend.clock)
    if tier == 0:
        return StaticController(backend.limits, nodes=1, depth=0, width=0)
    return NgramController(backend.limits, index)


@pytest.mark.parametrize("phase", range(2 * len(KINDS)), ids=[each.name for each in work()[0]])
def test_each_phase_is_served_about_as_fast_as_by_its_best_tier(phase):
    static = [served(tier)[phase].speed for tier in range(len(TIERS))]
    adaptive = served(None)[phase].speed
    assert adaptive > 0.97 * max(static)
    assert adaptive > 0.98 * static[0]


def test_changing_work_is_served_faster_than_by_any_tier():
    seconds = [sum(each.seconds for each in served(tier)) for tier in range(len(TIERS))]
    assert min(seconds) > 1.05 * sum(each.seconds for each in served(None))
