"""Work whose acceptance is given, in simulated time: what a choice of drafts gives on any device.

What a step costs is a table that was measured. A drafter's rates of acceptance differ between
requests and change within them, and an oracle that knows them takes the best tier of each step.
NGRAM drafts for texts that say their prompts again in pieces, so its acceptance is its own.

There are always requests that wait, as in a server that is busy: a phase is timed until its last
request has begun, so that no choice is judged by how long its slowest request is alone. Requests
are of different lengths, half to one and a half of what is asked for, so that plain decoding does
not serve them in step and their prompts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from shared.engine.adaptive.acceptance import Expected
from shared.engine.adaptive.choice import BestValue, Greedy, Policy, Situation, Static
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.tiers import Tier
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.adaptive import AdaptiveNgramController
from shared.engine.ngram.controller import NgramController
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import NgramConfig
from tests.support.simulation.device import (
    SimulatedBackend,
    TextBackend,
    simulated_limits,
    with_host_drafts,
)
from tests.support.simulation.phases import Imposed, Phase, Served, imposed, serve

LOWEST, HIGHEST, PART = 0.2, 0.95, 100
"""Of imposed rates, and the tokens for which a request keeps one."""

LEAST_REQUESTS = 20
"""Of a phase whose rates are imposed: with fewer, what differs between them would decide it."""

PROMPT, VOCAB = 200, 4096
SHARES = {"copying": 0.85, "half and half": 0.4, "free": 0.03}
"""Of the pieces of a text, those that its prompt has too."""

ASLEEP = "asleep"
"""Plain steps that do not wait for each other, beside those of NGRAM's tiers that do."""

Table = Mapping[int, Sequence[float]]
"""Seconds of a step, by batch bucket: of each tier, and last of one asleep where NGRAM drafts."""

Runs = dict[str, list[Served]]


def rated_work(batches: Sequence[int], tokens: int) -> tuple[list[Phase], Imposed]:
    """Phases whose rates are high, low, or differ between requests and within them."""

    def changing(rng: np.random.Generator) -> list[float]:
        return rng.uniform(LOWEST, HIGHEST, max(1, tokens // PART)).tolist()

    kinds = {
        "0.95": lambda rng: (HIGHEST,),
        "0.2": lambda rng: (LOWEST,),
        "by request": lambda rng: (float(rng.uniform(LOWEST, HIGHEST)),),
        "by part": changing,
    }
    plan = [
        (f"{name}, batch {batch}", batch, max(LEAST_REQUESTS, 5 * batch), tokens, rates)
        for batch, (name, rates) in product(batches, kinds.items())
    ]
    phases, law = imposed(plan, part=PART)
    rng, found = np.random.default_rng(6), list[Phase]()
    for phase in phases:
        requests = [
            replace(r, sampling=replace(r.sampling, max_tokens=_length(rng, tokens)))
            for r in phase.requests
        ]
        found.append(replace(phase, requests=requests, goes_on=True))
    return found, law


def _length(rng: np.random.Generator, tokens: int) -> int:
    """Of a request's output."""
    return int(rng.integers(tokens // 2, tokens * 3 // 2))


def written_work(batches: Sequence[int], tokens: int) -> tuple[list[Phase], dict[int, list[int]]]:
    """Phases of each kind of `SHARES`, and the texts that are written in them, by seed."""
    rng, phases, texts = np.random.default_rng(3), list[Phase](), dict[int, list[int]]()
    for batch, (kind, share) in product(batches, SHARES.items()):
        requests = []
        for _ in range(max(6, 5 * batch)):
            prompt, seed = rng.integers(1, VOCAB, PROMPT).tolist(), 1 + len(texts)
            length = _length(rng, tokens)
            texts[seed] = _written(rng, prompt, share, length)
            sampling = SamplingParams(temperature=0.0, seed32=seed, max_tokens=length)
            requests.append(Request(request_id=seed, prompt=tuple(prompt), sampling=sampling))
        phases.append(Phase(f"{kind}, batch {batch}", batch, requests, goes_on=True))
    return phases, texts


def _written(rng: np.random.Generator, prompt: list[int], share: float, tokens: int) -> list[int]:
    """Pieces of a prompt, and of words of its own from a common few, which repeat by chance."""
    found: list[int] = []
    while len(found) < tokens:
        length = int(rng.integers(3, 30))
        if rng.random() < share:
            start = int(rng.integers(0, len(prompt) - length))
            found += prompt[start : start + length]
        else:
            found += rng.geometric(0.03, length).tolist()
    return found[:tokens]


class KnowsRates(AdaptiveController):
    """An adaptive controller that is told what is imposed: the oracle."""

    law: Imposed

    def situation(self, ready: Sequence[Request]) -> tuple[Situation, np.ndarray]:
        """What is known before a step, with the true rates in place of those that were learnt."""
        known, _ = super().situation(ready)
        seeds = np.array([r.sampling.seed32 for r in ready], np.uint32)
        rates = self.law(seeds, np.array([len(r.output) for r in ready]))
        cold = np.array([r.request_id in self._cold for r in ready])
        chains = np.cumprod(rates, axis=1)
        warm, now = [], []
        for tier in self.shapes.tiers:
            hits = 1 - (1 - rates[:, : tier.depth]) ** tier.tries
            worth = np.cumprod(hits, axis=1)
            budget = tier.shape(self.shapes.bucket(len(ready))).rows - len(ready)
            for found, drafts in ((warm, worth), (now, np.where(cold[:, None], 0, worth))):
                best = np.sort(drafts, axis=None)[::-1]
                total = best[:budget] if tier.width <= 1 else best
                found.append(len(ready) + float(total.sum()))
        tiers = len(warm)
        nothing = [[0.0] * tiers for _ in range(tiers)]
        expected = Expected(warm, now, nothing, nothing, holds=[0.0] * tiers, lasts=[0.0] * tiers)
        situation = Situation(known.seconds, expected, known.num_rows, known.cold, known.horizon)
        return situation, chains[:, : max(tier.depth for tier in self.shapes.tiers)]


def rated_runs(
    tiers: Sequence[Tier], table: Table, work: tuple[list[Phase], Imposed], overlap: int
) -> Runs:
    """Every tier, the adaptive choice and the oracle, where a law accepts drafts."""
    phases, law = work
    limits = simulated_limits(tiers, list(table), overlap=overlap)

    def run(make: Callable[..., AdaptiveController], policy: Policy) -> list[Served]:
        backend = SimulatedBackend(limits, lambda b, tier: table[b][tiers.index(tier)], law)
        return _served(backend, make(limits, policy, table), phases)

    KnowsRates.law = law
    found = {str(tier): run(AdaptiveController, Static(n)) for n, tier in enumerate(tiers)}
    found["adaptive"] = run(AdaptiveController, BestValue())
    return found | {"oracle": run(KnowsRates, Greedy())}


def written_runs(
    tiers: Sequence[Tier],
    table: Table,
    work: tuple[list[Phase], Mapping[int, Sequence[int]]],
    overlap: int,
    noise: float = 0.0,
) -> Runs:
    """Every tier of NGRAM, off without waiting, and the adaptive choice, of texts that are given.

    Args:
      noise: Standard deviation of a step's time, as a share of it.
    """
    phases, texts = work
    limits = simulated_limits(tiers, list(table), overlap=overlap)
    limits = with_host_drafts(limits, VOCAB)

    def run(tier: Tier | None) -> list[Served]:
        def seconds(batch: int, planned: Tier) -> float:
            follows = planned.is_off and not backend.is_idle
            return table[batch][-1 if follows else tiers.index(planned)]

        backend = TextBackend(limits, seconds, texts, noise=noise)
        controller = _ngram(backend, tiers, tier, table)
        return _served(backend, controller, phases)

    found = {str(tier): run(tier) for tier in tiers}
    return found | {"adaptive": run(None)}


def _ngram(
    backend: TextBackend, tiers: Sequence[Tier], tier: Tier | None, table: Table
) -> Controller:
    """With an index of its own; no tier: the adaptive one."""
    if tier is not None and tier.is_off:
        return StaticController(backend.limits, nodes=1, depth=0, width=0)
    widest = tiers[-1] if tier is None else tier
    sizes = {"nodes": widest.nodes, "depth": widest.depth, "vocab": VOCAB}
    index = NgramIndex(NgramConfig(), **sizes, chain=False)
    if tier is None:
        return AdaptiveNgramController(backend.limits, index, table, lambda: backend.clock)
    return NgramController(backend.limits, index)


def _served(
    backend: SimulatedBackend | TextBackend, controller: Controller, phases: Sequence[Phase]
) -> list[Served]:
    how = {"overlap": backend.limits.overlap, "chunked_prefill_size": 2048, "cache": NO_CACHE}
    return serve(Engine(backend, controller, **how), phases, lambda: backend.clock)
